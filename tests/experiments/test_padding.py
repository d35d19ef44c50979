"""The measure of padding: masked, a sentence does not feel it; counted, it does."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.tiny_text import SENTENCES, tiny_model
from torch import nn

from experiments import embedding, padding
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, encode
from uncollapse.lab.data.text.glue import Examples

CURE = {"axis": "tokens", "scale": 0.2}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, EncodedTexts]:
    place = str(tiny_model(tmp_path_factory.mktemp("model"), layers=3))
    texts = Examples([text for text, _ in SENTENCES], None, None)
    return embedding.encoder(place), encode(texts, load_tokenizer(Origin(place)), 32, classes=False, cache=None)


def shift(parts: tuple[nn.Module, EncodedTexts], cure: dict[str, Any]) -> dict[str, float]:
    model, data = parts
    with padding.cured(model, cure, 7):
        return padding.change(padding.last_tokens(model, data), padding.last_tokens(model, data, 32))


@pytest.mark.parametrize("cure", [{}, CURE | {"padding": "masked"}, CURE | {"padding": "masked", "axis": "features"}])
def test_padding_that_is_masked_changes_nothing(parts: Any, cure: dict[str, Any]) -> None:
    found = shift(parts, cure)
    assert max(found["embedding_max"], found["tokens_max"]) < 1e-5
    assert found["cosine_min"] > 1 - 1e-6


@pytest.mark.parametrize("axis", ["tokens", "features"])
def test_padding_that_is_counted_changes_sentences(parts: Any, axis: str) -> None:
    found = shift(parts, CURE | {"padding": "counted", "axis": axis})
    assert found["tokens_max"] > found["tokens_mean"] > 1e-3
    assert found["embedding_max"] > found["embedding_mean"] > 1e-3


def test_the_cure_is_out_again_afterwards(parts: Any) -> None:
    model, data = parts
    before = padding.last_tokens(model, data)[0]
    shift(parts, CURE | {"padding": "counted"})
    assert torch.equal(padding.last_tokens(model, data)[0], before)


def test_change_by_hand() -> None:
    alone, filled = torch.tensor([[3.0, 0.0], [3.0, 0.0]]), torch.tensor([[3.0, 0.0], [3.0, 8.0]])
    found = padding.change([alone, alone], [alone, filled])
    assert found["embedding_max"] == pytest.approx(4 / 3, abs=1e-5)
    assert found["embedding_mean"] == pytest.approx(2 / 3, abs=1e-5)
    assert found["tokens_max"] == pytest.approx(8 / 18**0.5, abs=1e-5)
    assert found["cosine_min"] == pytest.approx(0.6)


def test_chosen_sentences_are_short_and_different(parts: Any) -> None:
    data = parts[1]
    twice = embedding.some(data, torch.arange(len(data)).repeat(2))
    kept = padding.chosen(twice, 20, 10, seed=0)
    rows = {tuple(row[mask > 0].tolist()) for row, mask in _rows(kept)}
    assert len(kept) == len(rows) == 20
    assert int(kept.lengths.max()) <= 10
    assert rows <= {tuple(row[mask > 0].tolist()) for row, mask in _rows(data)}


def _rows(data: EncodedTexts) -> Any:
    batch = data.batch(torch.arange(len(data)))
    return zip(batch["input_ids"], batch["attention_mask"], strict=True)


def test_embeddings_are_in_the_order_of_the_sentences(parts: Any) -> None:
    model, data = parts
    (found,) = embedding.embed(model, data, (-1,))
    alone = torch.stack([rows.mean(0) for rows in padding.last_tokens(model, data)])
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)


def test_quality_by_hand() -> None:
    first, second = torch.eye(3), torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    found = embedding.quality(torch.cat([first, second]), torch.tensor([5.0, 4.0, 1.0]))
    assert found["alignment"] == pytest.approx((2 - 2 * 0.5**0.5) / 2, abs=1e-5)  # of the first two pairs: 0, 2 − √2
    assert found["spearman"] == pytest.approx(1.0)


def test_the_data_folder_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNCOLLAPSE_DATA", raising=False)
    monkeypatch.setattr(sys, "argv", ["padding"])
    with pytest.raises(SystemExit, match="--data"):
        padding.main()
    monkeypatch.setenv("UNCOLLAPSE_DATA", "here")
    assert embedding.data_root(None) == Path("here")
