"""GLUE from the hub: real tables of the datasets library with the hub's columns, without the hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from uncollapse.errors import UsageError
from uncollapse.lab.data.text import glue
from uncollapse.lab.data.text.glue import TASKS

datasets: Any = pytest.importorskip("datasets")
ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")
# as the hub has them: columns of sentences, names of the classes in the order of their numbers
CONFIGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cola": (("sentence",), ("unacceptable", "acceptable")),
    "sst2": (("sentence",), ("negative", "positive")),
    "mrpc": (PAIR, ("not_equivalent", "equivalent")),
    "qqp": (("question1", "question2"), ("not_duplicate", "duplicate")),
    "stsb": (PAIR, ()),
    "mnli": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "qnli": (("question", "sentence"), ENTAILMENT),
    "rte": (PAIR, ENTAILMENT),
    "wnli": (PAIR, ("not_entailment", "entailment")),
}


def table(columns: tuple[str, ...], classes: tuple[str, ...], labels: list[float]) -> Any:
    """A table of the hub: two sentences a column, labels, numbers."""
    kind = datasets.ClassLabel(names=list(classes)) if classes else datasets.Value("float32")
    features = {name: datasets.Value("string") for name in columns} | {"label": kind, "idx": datasets.Value("int32")}
    values = {name: [f"{name} {n}" for n in range(len(labels))] for name in columns}
    values |= {"label": labels, "idx": list(range(len(labels)))}
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str, str]]]:
    """Let `load_dataset` give a table, or raise; returns the calls that it gets."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def give(what: Any) -> list[tuple[str, str, str]]:
        calls: list[tuple[str, str, str]] = []

        def load_dataset(path: str, name: str, split: str) -> Any:
            calls.append((path, name, split))
            if isinstance(what, Exception):
                raise what
            return what

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return give


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_a_task(hub: Any, name: str) -> None:
    columns, classes = CONFIGS[name]
    labels = [1, 0] if classes else [4.25, 0.0]
    calls = hub(table(columns, classes, labels))
    task = TASKS[name]
    for part in ("train", *task.dev):
        found = glue.load_split(task, part, None)
        assert list(found.first) == [f"{columns[0]} 0", f"{columns[0]} 1"]
        assert found.second == ([f"{columns[1]} 0", f"{columns[1]} 1"] if len(columns) > 1 else None)
        assert found.labels == labels
    hub(table(columns, classes, [-1, -1]))
    assert glue.load_split(task, list(task.files)[-1], None).labels is None
    dev = ["validation_matched", "validation_mismatched"] if name == "mnli" else ["validation"]
    assert calls == [("nyu-mll/glue", name, split) for split in ("train", *dev)]


def test_the_order_of_the_classes_is_that_of_files() -> None:
    for name in ("mnli", "qnli", "rte"):
        assert TASKS[name].labels == CONFIGS[name][1]
    assert set(CONFIGS) == set(TASKS)


def test_public_labels_of_a_test_part_are_kept(hub: Any) -> None:
    hub(table(PAIR, CONFIGS["mrpc"][1], [0, 1]))
    assert glue.load_split(TASKS["mrpc"], "test", None).labels == [0, 1]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: table(PAIR, ENTAILMENT[::-1], [0, 1]), "other labels in rte than entailment, not_entailment"),
        (lambda: table(PAIR, ENTAILMENT, [0, -1]), "other labels in rte"),
        (lambda: table(PAIR, (), [0.0, 1.0]), "other labels in rte"),
        (lambda: table(("premise", "hypothesis"), ENTAILMENT, [0, 1]), "no column sentence1, sentence2 in rte"),
    ],
)
def test_tables_that_changed(hub: Any, made: Callable[[], Any], words: str) -> None:
    hub(made())
    with pytest.raises(UsageError, match=f"{words}.*--data-root"):
        glue.load_split(TASKS["rte"], "train", None)


class OfItsHttpClient(Exception):  # noqa: N818 - such libraries have errors that are no OSError
    """What comes through when a connection breaks."""


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no route"),
        FileNotFoundError("not on the hub"),
        ValueError("not in the cache"),
        datasets.exceptions.DatasetNotFoundError("gone"),
        datasets.exceptions.DatasetGenerationError("torn"),
        OfItsHttpClient("reset"),
    ],
)
def test_what_cannot_be_fetched(hub: Any, error: Exception) -> None:
    hub(error)
    with pytest.raises(UsageError, match=f"rte.*{type(error).__name__}"):
        glue.load_split(TASKS["rte"], "train", None)


def test_without_a_connection_it_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(UsageError, match="fetched") as caught:  # the real load_dataset, which then is offline
        glue.load_split(TASKS["rte"], "train", None)
    assert "Offline" in str(caught.value.__cause__)
    assert datasets.config.HF_HUB_OFFLINE is False


def test_own_data_are_not_asked_of_the_hub(hub: Any, tmp_path: Path) -> None:
    calls = hub(table(PAIR, ENTAILMENT, [0, 1]))
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na\tx\nb\ty\n")
    assert glue.load_split(glue.find_task(str(tmp_path)), "train", None).first == ["a", "b"]
    assert calls == []
