"""Kept models: they come back as they were, and a folder is there as a whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tests.lab.tiny_text import SENTENCES, tiny_model, write_sst2

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.lab.data.graph import datasets
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.bert_depth import recipe as bert_depth
from uncollapse.lab.experiments.gcn import config as gcn_config
from uncollapse.lab.experiments.gcn import recipe as gcn_recipe
from uncollapse.lab.experiments.glue import recipe as glue
from uncollapse.lab.experiments.vit import digits
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.saved_models import atomic_folder

for library in ("accelerate", "sklearn", "scipy"):
    pytest.importorskip(library)
SHORT: dict[str, Any] = {"max_length": 32, "epochs": 1, "lr": 1e-3}
TEXTS = ["a film of the year", "dull", "i hated every scene of it"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path / "cache"))


def logits(model: torch.nn.Module, words: transformers.PreTrainedTokenizerBase) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**words(TEXTS, padding=True, return_tensors="pt")).logits
    return found


def same(model: torch.nn.Module, other: torch.nn.Module, words: transformers.PreTrainedTokenizerBase) -> bool:
    """The same answers: where weights lie in memory may change their last digits."""
    return torch.allclose(logits(model, words), logits(other, words), rtol=1e-5, atol=1e-6)


def runtime(tmp_path: Path) -> Runtime:
    return Runtime(write_sst2(tmp_path / "data", SENTENCES), device="cpu", save_to=tmp_path / "run" / "model")


@pytest.mark.parametrize("kind", ["bert", "albert"])
@pytest.mark.parametrize("cure", ["contra_norm", "none"])
def test_a_text_model_comes_back_with_transformers_and_load_cure(tmp_path: Path, kind: str, cure: str) -> None:
    place = tiny_model(tmp_path / kind, kind)
    config = glue.Config(task="sst2", model=str(place), cure=cure, scale=0.5, padding="counted", **SHORT)
    model, _ = glue.train(config, runtime(tmp_path))
    folder = tmp_path / "run" / "model"
    words = transformers.AutoTokenizer.from_pretrained(folder)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert same(again, model, words) == (cure == "none")
    if cure != "none":
        uc.load_cure(again, folder)
    assert same(again, model, words)
    assert same(saved_models.load_text_model(folder)[0], model, words)
    assert glue.Config(**json.loads((folder / "settings.json").read_text())) == config


@pytest.mark.parametrize("at", ["7", "attention.residual"])
def test_l2_norms_come_back_with_load_text_alone(tmp_path: Path, at: str) -> None:
    place = tiny_model(tmp_path / "bert")
    config = glue.Config(task="sst2", model=str(place), norm="l2", at=at, scale=0.5, **SHORT)
    with pytest.warns(UserWarning, match="L2 norms"):
        model, _ = glue.train(config, runtime(tmp_path))
    again, words = saved_models.load_text_model(tmp_path / "run" / "model")
    assert same(again, model, words)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    uc.load_cure(plain, tmp_path / "run" / "model")
    assert not same(plain, model, words)


def test_a_deep_encoder_comes_back(tmp_path: Path) -> None:
    place = tiny_model(tmp_path / "bert")
    config = bert_depth.Config(model=str(place), depth=3, width=16, examples=0, **SHORT)
    model, _ = bert_depth.train(config, runtime(tmp_path))
    again, words = saved_models.load_text_model(tmp_path / "run" / "model")
    assert again.config.num_hidden_layers == 3
    assert same(again, model, words)


def test_a_head_of_scores_and_names_of_classes_come_back(tmp_path: Path) -> None:
    for labels in ((), ("bad", "fair", "good")):
        model = saved_models.load_classifier(
            saved_models.Origin(str(tiny_model(tmp_path / "bert"))), len(labels) or 1
        ).eval()
        words = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
        saved_models.save_text_model(Runtime(save_to=tmp_path / "kept"), model, words, glue.Config(cure="none"), labels)
        again, words = saved_models.load_text_model(tmp_path / "kept")
        assert same(again, model, words)
        if labels:
            assert again.config.id2label == {0: "bad", 1: "fair", 2: "good"}
            assert again.config.label2id["good"] == 2


@pytest.mark.parametrize("norm", ["contra_norm", "pair_norm"])
def test_a_graph_network_comes_back(tmp_path: Path, norm: str) -> None:
    pytest.importorskip("torch_geometric")
    config = gcn_config.Config(layers=4, hidden=8, epochs=2, norm=norm)  # its layers share one LayerNorm
    model, record = gcn_recipe.train(config, Runtime(device="cpu", save_to=tmp_path / "model"))
    kept = json.loads((tmp_path / "model" / "config.json").read_text())
    assert kept == json.loads(json.dumps(record["config"]))
    graph = datasets.load_graph("csbm")
    again = gcn_config.build(gcn_config.Config(**kept), graph).eval()
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "model" / "model.safetensors"))
    with torch.no_grad():
        assert torch.equal(again(graph.x, graph.edge_index), model(graph.x, graph.edge_index))


def test_a_vision_transformer_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    config = digits.Config(depth=1, dim=16, heads=2, epochs=1, batch=400)
    model, _ = digits.train(config, Runtime(device="cpu", save_to=tmp_path / "model"))
    again = digits.build(digits.Config(**json.loads((tmp_path / "model" / "config.json").read_text())))
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "model" / "model.safetensors"))
    images = digits.digits()["test"][0][:20]
    with torch.no_grad():
        assert torch.equal(again.eval()(images), model(images))


def test_nothing_is_kept_unasked(tmp_path: Path) -> None:
    saved_models.save_weights(Runtime(), torch.nn.Linear(2, 2), glue.Config())
    saved_models.save_text_model(Runtime(), torch.nn.Linear(2, 2), None, glue.Config())
    assert list(tmp_path.iterdir()) == []


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "run" / "model") as folder:
            (folder / "settings.json").write_text(text)
            assert contents(tmp_path / "run" / "model") == ({} if text == "old" else {"settings.json": "old"})
    assert contents(tmp_path) == {"run/model/settings.json": "new"}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("error", "told", "words"),
    [
        (KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
        (OSError(28, "No space left"), UsageError, "No space left. Make room"),
    ],
)
def test_what_fails_leaves_the_old_model_and_nothing_else(
    tmp_path: Path, error: BaseException, told: type[BaseException], words: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "settings.json").write_text("old")

    def fail() -> None:
        with atomic_folder(tmp_path / "model") as folder:
            (folder / "settings.json").write_text("half")
            raise error

    with pytest.raises(told, match=words):
        fail()
    assert contents(tmp_path) == {"model/settings.json": "old"}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_rename_that_fails_brings_the_old_model_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "settings.json").write_text("old")
    rename, calls = os.rename, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(UsageError, match="Permission denied"), atomic_folder(tmp_path / "model") as folder:
        (folder / "settings.json").write_text("new")
    assert contents(tmp_path) == {"model/settings.json": "old"}


def test_what_a_kill_left_goes_with_the_next_model(tmp_path: Path) -> None:
    (tmp_path / f".model.{32 * 'a'}.part").mkdir()
    (tmp_path / f".model.{32 * 'b'}.old").mkdir()
    (tmp_path / f".model.b.{32 * 'c'}.part").mkdir()  # of the model in the folder model.b
    (tmp_path / "step-000000001").mkdir()
    with atomic_folder(tmp_path / "model"):
        pass
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f".model.b.{32 * 'c'}.part", "model", "step-000000001"]


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (tmp_path / "file").write_text("some")
    with pytest.raises(UsageError, match="other files"), atomic_folder(tmp_path / "thesis"):
        pass
    with (
        pytest.raises(UsageError, match="a file"),
        atomic_folder(tmp_path / "file"),
    ):
        pass
    assert contents(tmp_path) == {"thesis/chapter.txt": "years of work", "file": "some"}


def test_a_folder_without_a_kept_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"settings\.json"):
        saved_models.load_text_model(tmp_path)
