"""The training on pairs: all of them, and each way's own loss."""

from typing import Any

import pytest
import torch
from experiments.embedding import Pairs, pooled
from experiments.sts_embeddings import WAYS, Config, Training
from tests.lab.tiny_text import SENTENCES, tiny_model

import uncollapse as uc
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.lab.data.text.encoded_texts import encode
from uncollapse.lab.data.text.glue import Examples


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Pairs]:
    place = str(tiny_model(tmp_path_factory.mktemp("model")))
    texts = Examples([text for text, _ in SENTENCES], None, None)  # the first half is paired with the second
    data = encode(texts, load_tokenizer(Origin(place)), 32, classes=False, cache=None)
    return Config(model=place, batch=10), Pairs(data, torch.linspace(0, 5, len(SENTENCES) // 2))


def test_an_epoch_has_each_pair_once(given: tuple[Config, Pairs]) -> None:
    config, train = given
    training = Training("none", config, 0, train)
    first, second = training.batches(1), training.batches(2)
    seen = torch.cat([batch["scores"] for batch in first])
    assert torch.equal(seen.sort().values, train.scores)
    assert not torch.equal(seen, torch.cat([batch["scores"] for batch in second]))
    whole = dict(zip(train.scores.tolist(), _rows(train), strict=True))
    for batch in first:
        for score, *pair in zip(batch["scores"].tolist(), *_halves(batch), strict=True):
            assert tuple(pair) == whole[score]


def _rows(train: Pairs) -> list[tuple[Any, Any]]:
    return list(zip(*_halves(train.sentences.batch(torch.arange(2 * len(train)))), strict=True))


def _halves(batch: dict[str, torch.Tensor]) -> list[list[tuple[int, ...]]]:
    rows = [
        tuple(ids[mask > 0].tolist()) for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return [rows[: len(rows) // 2], rows[len(rows) // 2 :]]


@torch.no_grad()
def test_the_loss_of_each_way(given: tuple[Config, Pairs]) -> None:
    found = {}
    for way in WAYS:
        training = Training(way, given[0], 0, given[1])
        training.model.eval()
        batch = training.batches(1)[0]
        found[way] = float(training.loss(training.model, batch))
        if way == "contra_norm":
            continue
        inputs = {name: tensor for name, tensor in batch.items() if name != "scores"}
        rows = pooled(training.model(**inputs).last_hidden_state, batch["attention_mask"])
        a, b = torch.nn.functional.normalize(rows.double(), dim=1).chunk(2)
        error = float((((a * b).sum(1) - batch["scores"] / 5) ** 2).mean())
        even = float(uc.uniform_loss(a) + uc.uniform_loss(b)) / 2 if way == "uniform_loss" else 0.0
        assert found[way] == pytest.approx(error + 0.01 * even, abs=1e-5)
    assert len({round(value, 4) for value in found.values()}) == 3  # ContraNorm too changes something


def test_pooling_leaves_padding_out() -> None:
    tokens = torch.tensor([[[1.0], [3.0], [100.0]], [[1.0], [2.0], [6.0]]])
    assert pooled(tokens, torch.tensor([[1, 1, 0], [1, 1, 1]])).tolist() == [[2.0], [3.0]]


def test_attached_contra_norm_is_the_published_form_for_bert(given: tuple[Config, Pairs]) -> None:
    (handle,) = uc.attachments(Training("contra_norm", given[0], 0, given[1]).model)
    assert handle.options == {"preset": "bert", "scale": 0.1}
    assert handle.at == ("attention.residual",)
