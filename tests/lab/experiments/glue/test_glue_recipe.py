"""Fine-tuning on GLUE's tasks, from their files to the record and the paper's table."""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.tiny_text import SENTENCES, tiny_model, tokenizer, write_sst2
from torch import nn
from typer.testing import CliRunner

from uncollapse.cli.app import app
from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.lab.data.text import glue as files
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.glue import config as sentences
from uncollapse.lab.experiments.glue import recipe as glue
from uncollapse.lab.experiments.glue.training import Training

for library in ("accelerate", "sklearn", "scipy"):
    pytest.importorskip(library)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and the model."""
    folder = tmp_path_factory.mktemp("glue")
    tiny_model(folder / "bert", layers=1)
    tiny_model(folder / "albert", kind="albert")
    return write_sst2(folder, SENTENCES)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path / "cache"))


def config(place: Path, **changes: Any) -> glue.Config:
    """Two epochs of six steps, if nothing else is said."""
    usual = {"task": "sst2", "model": str(place / "bert"), "max_length": 64, "epochs": 2, "batch": 8, "lr": 5e-3}
    return glue.Config(**{**usual, "warmup": 0.1, "holdout": 0.0, **changes})


def runtime(place: Path, **changes: Any) -> Runtime:
    return Runtime(place, device="cpu", **changes)


LEARNS = {"epochs": 8, "batch": 4}


def test_learns_what_sentences_say(place: Path) -> None:
    """48 sentences teach it the words; 16 others, half of them kind, ask for them."""
    model, record = glue.train(config(place, **LEARNS), runtime(place))
    assert record["figures"]["dev"] >= 0.8
    losses = [epoch["loss"] for epoch in record["epochs"]]
    assert losses[-1] < 0.5 < losses[0]
    assert record["figures"]["dev"] == pytest.approx(accuracy(model, place))
    json.dumps(record, allow_nan=False)


def accuracy(model: nn.Module, place: Path) -> float:
    """Of dev's file, read and answered line by line."""
    words, right = tokenizer(), 0
    lines = (place / "SST-2" / "dev.tsv").read_text(encoding="utf-8").splitlines()[1:]
    for line in lines:
        text, label = line.split("\t")
        with torch.no_grad():
            logits = model(**words(text, return_tensors="pt")).logits[0].tolist()
        right += logits.index(max(logits)) == int(label)
    return right / len(lines)


def test_a_step_makes_the_loss_of_its_batch_smaller(place: Path) -> None:
    chosen = config(place, lr=1e-3)
    data = sentences.load(chosen, runtime(place), Origin(chosen.model))
    model = glue.build(chosen, Origin(chosen.model), data.task).eval()  # without dropout
    with Training(model, chosen, data) as task:
        (batch, *_) = task.batches(1)
        before = task.loss(model, batch)
        before.backward()
        task.optimizer.step()
        assert task.loss(model, batch).item() < before.item() - 1e-4


class GoneError(Exception):
    """The process is gone."""


@pytest.mark.parametrize(("cure", "steps"), [("contra_norm", 4), ("contra_norm", 6), ("uniform_loss", 8)])
def test_goes_on_where_it_was_interrupted(place: Path, tmp_path: Path, cure: str, steps: int) -> None:
    chosen = config(place, cure=cure, holdout=0.1, seed=3)
    whole, expected = glue.train(chosen, runtime(place))
    seen: list[int] = []

    def vanish(done: int, total: int, figures: Mapping[str, float]) -> None:
        if done == steps + 1:
            raise GoneError

    with pytest.raises(GoneError):
        glue.run(chosen, runtime(place, checkpoints=tmp_path / "run", save_seconds=0.0, progress=vanish))
    rest = runtime(place, checkpoints=tmp_path / "run", progress=lambda done, *_: seen.append(done))
    model, found = glue.train(chosen, rest)
    assert seen[0] == steps + 1
    for part in ("epochs", "figures", "diagnosis", "data", "ended"):
        assert found[part] == expected[part]
    one, two = whole.state_dict(), model.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


CURES: dict[str, dict[str, Any]] = {
    "none": {"cure": "none"},
    "contra_norm": {"cure": "contra_norm"},
    "contra_norm place 2": {"at": "2"},
    "contra_norm before residual": {"at": "attention.output"},
    "contra_norm v2": {"axis": "features"},
    "contra_norm both terms": {"dual": True},
    "contra_norm l2": {"norm": "l2"},
    "contra_norm ": {"padding": "counted"},
    "uniform_loss": {"cure": "uniform_loss"},
    "uniform_loss ": {"cure": "uniform_loss", "uniform_on": "pooled"},
}


def test_every_cure_by_its_settings(place: Path) -> None:
    ends = []
    for row, settings in CURES.items():
        model, record = glue.train(config(place, epochs=1, examples=16, batch=8, scale=0.5, **settings), runtime(place))
        assert glue.variant(record["config"]) == row.strip()
        assert math.isfinite(record["epochs"][-1]["loss"])
        ends.append(model.get_parameter("bert.encoder.layer.0.attention.self.value.weight"))
    for one, two in itertools.combinations(ends, 2):  # each of them trains another model
        assert not torch.allclose(one, two, rtol=0, atol=1e-7)


def test_albert(place: Path) -> None:
    chosen = config(place, model=str(place / "albert"), at="4", identity=False, epochs=1, examples=16)
    record = glue.run(chosen, runtime(place))
    assert record == glue.run(replace(chosen, at="attention.residual"), runtime(place)) | {
        name: record[name] for name in ("config", "seconds", "date")
    }


def test_the_record_of_a_run(place: Path) -> None:
    record = glue.run(config(place, holdout=0.25, cure="none"), runtime(place))
    assert {name: record["data"][name] for name in ("name", "metric", "train", "validation", "dev", "skipped")} == {
        **{"name": "SST-2", "metric": "accuracy", "train": 36, "validation": 12, "dev": 16, "skipped": 0}
    }
    before, after = (record["diagnosis"][when]["layers"] for when in ("before", "after"))
    assert [layer["name"] for layer in before] == [layer["name"] for layer in after]
    assert before != after
    assert all("mean_cosine" in layer for layer in (*before, *after))
    assert record["figures"]["validation"] == record["epochs"][-1]["validation"]


def test_without_a_share_held_out_nothing_is_said_of_validation(place: Path) -> None:
    record = glue.run(config(place, epochs=1, batch=16), runtime(place))
    assert "validation" not in record["data"]
    assert not any(name.startswith("validation") for name in (*record["figures"], *record["epochs"][0]))


def write(folder: Path, name: str, columns: str, rows: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join([columns, *rows]) + "\n", encoding="utf-8")


def test_scores_of_pairs(place: Path, tmp_path: Path) -> None:
    texts = [text for text, _ in SENTENCES]
    rows = [f"{n}\t{texts[n]}\t{texts[n + 2]}\t{score}" for n, score in enumerate((0, 1.25, 2.5, 4, 5))]
    for name in ("train.tsv", "dev.tsv"):
        write(tmp_path / "STS-B", name, "index\tsentence1\tsentence2\tscore", rows)
    model, record = glue.train(config(place, task="stsb", epochs=12, batch=5), runtime(tmp_path))
    figures = record["figures"]
    assert set(figures) == {"epoch", "dev", "dev_pearson", "always"}
    assert all(-1 <= figures[name] <= 1 for name in ("dev", "dev_pearson"))
    assert model.get_parameter("classifier.weight").shape[0] == 1
    losses = [epoch["loss"] for epoch in record["epochs"]]
    assert losses[0] > 4  # of the square: the scores are as they are
    assert losses[-1] < losses[0]


def test_both_development_sets_of_mnli(place: Path, tmp_path: Path) -> None:
    names = ("entailment", "neutral", "contradiction")
    rows = [f"{n}\t{text}\tit is a film\t{names[n % 3]}" for n, (text, _) in enumerate(SENTENCES[:12])]
    parts = {"train": rows, "dev_matched": rows[:6], "dev_mismatched": rows[3:4]}
    for name, part in parts.items():
        write(tmp_path / "MNLI", f"{name}.tsv", "index\tsentence1\tsentence2\tgold_label", part)
    record = glue.run(config(place, task="mnli", batch=6), runtime(tmp_path))
    assert set(record["figures"]) == {"epoch", "dev", "dev_mismatched", "always"}
    assert record["figures"]["dev_mismatched"] in (0.0, 1.0)  # of its one row
    assert record["data"]["dev_mismatched"] == 1


def test_too_long_for_the_model_before_any_training(place: Path) -> None:
    with pytest.raises(UsageError, match="64"):
        glue.run(config(place, max_length=128), runtime(place))


def test_by_the_command_line(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--task", "sst2", "--model", str(place / "bert"), "--data-root", str(place), "--max-length", "64"]
    flags += ["--epochs", "1", "--cure", "contra_norm", "--at", "3", "--scale", "0.2", "--device", "cpu", "--json"]
    done = CliRunner().invoke(app, ["train", "glue", *flags])
    assert done.exit_code == 0, done.output
    (record,) = json.loads(done.stdout)
    assert record["config"]["at"] == "3"
    assert 0 <= record["figures"]["dev"] <= 1
    (file,) = (tmp_path / "results" / "glue").glob("*.json")
    assert json.loads(file.read_text(encoding="utf-8"))["figures"] == record["figures"]
    missing = CliRunner().invoke(app, ["train", "glue", *flags, "--task", "rte"])
    assert missing.exit_code != 0
    assert "There is no train.tsv of rte" in " ".join(missing.output.split())


def test_the_quick_settings_know_all_their_words() -> None:
    """The sentences, the vocabulary and the sizes of the encoder come with the package."""
    task = files.find_task(glue.RECIPE.quick["task"])
    tokenizer = load_tokenizer(Origin(glue.RECIPE.quick["model"]))
    parts = {name: files.load_split(task, name, None) for name in ("train", "dev")}
    assert task.labels == ("kitchen", "weather")
    assert (len(parts["train"]), len(parts["dev"])) == (84, 28)
    assert not set(parts["train"].first) & set(parts["dev"].first)
    for part in parts.values():
        assert not any(tokenizer.unk_token_id in ids for ids in tokenizer(list(part.first))["input_ids"])


def test_what_is_missing_is_said_before_a_run(tmp_path: Path) -> None:
    config = glue.Config(task="rte", model=glue.RECIPE.quick["model"])
    assert "train.tsv" in glue.RECIPE.missing_data(config, Runtime(tmp_path))
    assert glue.RECIPE.missing_data(glue.Config(**glue.RECIPE.quick), Runtime()) == ""
