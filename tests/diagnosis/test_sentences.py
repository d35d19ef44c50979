"""A SentenceTransformer is diagnosed without `call`: its tokens and its embeddings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnosis.tiny_sentences_model import TEXTS, make

import uncollapse as uc
from uncollapse.backbones import torchvision_ops
from uncollapse.backbones.forward import group_texts
from uncollapse.diagnosis.result import Cause, Verdict
from uncollapse.diagnosis.sentences import join_verdicts

torchvision_ops.declare()
pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make(tmp_path_factory.mktemp("encoder"))


def test_tokens_and_embeddings_are_those_of_encode(model: Any) -> None:
    found = uc.diagnose(model, TEXTS)
    assert [layer.label for layer in found.layers] == ["embed", "block 0", "block 1", "sentence embedding"]
    rows = torch.tensor(model.encode(TEXTS))
    assert found.layers[-1].tokens == len(TEXTS)
    assert found.layers[-1]["mean_cosine"] == pytest.approx(float(uc.mean_cosine(rows)), abs=1e-5)
    assert found.layers[-1]["uniformity"] == pytest.approx(float(uc.uniformity(rows)), abs=1e-4)
    assert found.layers[1].tokens == sum(len(text.split()) for text in TEXTS)
    assert found.verdict.sentence.startswith("Tokens: ")
    assert " Embeddings: " in found.verdict.sentence
    assert uc.Diagnosis.from_json(found.to_json()) == found


def test_features_lists_and_single_texts_are_the_same(model: Any) -> None:
    halves = [TEXTS[:48], TEXTS[48:]]
    features = [model.preprocess(half) for half in halves]
    values = [uc.diagnose(model, given).layers[-1]["effective_rank"] for given in (TEXTS, halves, features)]
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)
    assert set(features[0]) == set(model.preprocess(halves[0])), "features are not changed"


def test_pairs_give_alignment(model: Any) -> None:
    found = uc.diagnose(model, TEXTS[:40], pairs=TEXTS[40:80])
    first, second = (torch.tensor(model.encode(part)) for part in (TEXTS[:40], TEXTS[40:80]))
    assert found.layers[-1]["alignment"] == pytest.approx(float(uc.alignment(first, second)), abs=1e-5)


def test_the_default_prompt_is_read(tmp_path: Path) -> None:
    prompted = make(tmp_path, prompts={"query": "is the "}, default_prompt_name="query")
    found = uc.diagnose(prompted, TEXTS)
    rows = torch.tensor(prompted.encode(TEXTS))
    assert found.layers[-1]["mean_cosine"] == pytest.approx(float(uc.mean_cosine(rows)), abs=1e-5)


def test_embeddings_alone_can_be_collapsed(tmp_path: Path) -> None:
    collapsed = make(tmp_path)

    def add_constant(module: Any, given: Any, output: dict[str, Any]) -> dict[str, Any]:
        return output | {"sentence_embedding": output["sentence_embedding"] * 1e-3 + 1 / 4}

    healthy = uc.diagnose(collapsed, TEXTS)
    collapsed[-1].register_forward_hook(add_constant)
    found = uc.diagnose(collapsed, TEXTS)
    assert found.layers[-1]["mean_cosine"] > 0.99
    if not healthy.verdict.collapsed:
        assert found.verdict.onset == "sentence embedding"
    assert "Embeddings: Complete collapse from sentence embedding on" in found.verdict.sentence


def test_a_monitor_measures_the_embeddings(model: Any) -> None:
    logged: dict[str, float] = {}
    rule = uc.Rule("effective_rank", place="embedding", below=1.5)
    monitor = uc.Monitor(TEXTS, every=1, log=lambda step, values: logged.update(values), rules=[rule])
    record = monitor.step(model, 0)
    assert record is not None
    assert record.diagnosis.layers[-1].tokens == len(TEXTS), "texts are held in batches, not one by one"
    assert "collapse/uniformity/sentence_embedding" in logged


@pytest.mark.parametrize("batch", [3, torch.ones(2, 3)])
def test_other_batches_are_an_error(model: Any, batch: Any) -> None:
    with pytest.raises(ValueError, match="texts"):
        uc.diagnose(model, [batch])


def test_texts_one_by_one_are_grouped() -> None:
    assert list(group_texts(["a"] * 33)) == [["a"] * 32, ["a"]]
    assert list(group_texts(["a", {"x": 1}, "b"])) == [["a"], {"x": 1}, ["b"]]
    assert list(group_texts([["a", "b"]])) == [["a", "b"]]


@pytest.mark.parametrize("which", ["tokens", "embeddings"])
def test_causes_and_outlook_are_those_of_what_is_collapsed(which: str) -> None:
    cause = Cause("mixing", "Attention averages tokens until they are alike.")
    verdict = Verdict("complete", "block 1", "high", "Complete collapse.", outlook="It helps.", causes=(cause,))
    healthy = Verdict("none", None, "high", "No collapse.")
    joined = join_verdicts(*((verdict, healthy) if which == "tokens" else (healthy, verdict)))
    assert (joined.kind, joined.outlook, joined.causes) == ("complete", "It helps.", (cause,))
