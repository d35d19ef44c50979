"""The tasks of GLUE (https://gluebenchmark.com), from files in its own layout or from the hub's `nyu-mll/glue`.

A file has one example a line, tabs between its columns, and no quoting: a quotation mark is a part of the sentence.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uncollapse.loading.errors import UsageError, library

HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Examples:
    """Sentences or pairs of them, with labels where they are public.

    labels: numbers of classes, or scores. skipped: damaged rows that were left out, where a task's own files have them.
    """

    first: Sequence[str]
    second: Sequence[str] | None
    labels: Sequence[float] | None
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.first)

    def chosen(self, numbers: Sequence[int]) -> "Examples":
        """Some of them, in this order."""
        second = None if self.second is None else [self.second[n] for n in numbers]
        labels = None if self.labels is None else [self.labels[n] for n in numbers]
        return Examples([self.first[n] for n in numbers], second, labels, self.skipped)


@dataclass(frozen=True)
class Columns:
    """Where a file has what: names of columns, or their numbers if the file has no first line with names.

    most: the columns of a row are no more than this many; the rest of the line belongs to nobody.
    """

    sentences: tuple[str | int, ...]
    label: str | int | None = None


@dataclass(frozen=True)
class Glue:
    """A task.

    folder: of its files. columns: of the files with labels. unlabelled: of the test file, if others. labels: names of
    the classes, in the order of their numbers; none for scores. metrics: figures, of which the first is the paper's.
    files: the file of each part, or several of which one must be there. unnamed: columns of files without a first line
    of names. answers: what the GLUE server calls the predictions of each test part.
    """

    name: str
    folder: str
    columns: Columns
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unnamed: Mapping[str, Columns] = field(default_factory=dict)
    unlabelled: Columns | None = None
    skips: bool = False
    answers: Mapping[str, str] = field(default_factory=dict)
    hub_columns: tuple[str, ...] = ()

    @property
    def scores(self) -> bool:
        """Whether it has scores instead of classes."""
        return not self.labels

    @property
    def dev(self) -> tuple[str, ...]:
        """Its development parts, the main one first."""
        return tuple(part for part in self.files if part.startswith("dev"))


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")
PLAIN: dict[str, tuple[str, ...]] = {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
MNLI = ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
COLA = Columns((3,), 1)
STS = Columns((5, 6), 4)
MRPC = ("#1 String", "#2 String")
QUESTIONS = ("question1", "question2")

TASKS: Mapping[str, Glue] = {
    task.name: task
    for task in (
        Glue(
            "cola",
            "CoLA",
            Columns(("sentence",), "label"),
            BINARY,
            ("matthews", "accuracy"),
            PLAIN,
            unnamed={"train.tsv": COLA, "dev.tsv": COLA},
            unlabelled=Columns(("sentence",)),
            answers={"test": "CoLA"},
            hub_columns=("sentence",),
        ),
        Glue("sst2", "SST-2", Columns(("sentence",), "label"), BINARY, ("accuracy",), PLAIN,
             answers={"test": "SST-2"}, hub_columns=("sentence",)),
        Glue("mrpc", "MRPC", Columns(MRPC, "Quality"), BINARY, ("f1", "accuracy"), PLAIN,
             answers={"test": "MRPC"}, hub_columns=PAIR),
        Glue("qqp", "QQP", Columns(QUESTIONS, "is_duplicate"), BINARY, ("f1", "accuracy"), PLAIN, skips=True,
             answers={"test": "QQP"}, hub_columns=QUESTIONS),
        Glue(
            "stsb",
            "STS-B",
            Columns(PAIR, "score"),
            metrics=("spearman", "pearson"),
            files={part: (f"{part}.tsv", f"sts-{part}.csv") for part in PLAIN},
            unnamed={f"sts-{part}.csv": STS for part in PLAIN},
            answers={"test": "STS-B"},
            hub_columns=PAIR,
        ),
        Glue(
            "mnli",
            "MNLI",
            Columns(PAIR, "gold_label"),
            ("entailment", "neutral", "contradiction"),
            files={part: (f"{part}.tsv",) for part in MNLI},
            answers={"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"},
            hub_columns=("premise", "hypothesis"),
        ),
        Glue("qnli", "QNLI", Columns(("question", "sentence"), "label"), ENTAILMENT, ("accuracy",), PLAIN,
             answers={"test": "QNLI"}, hub_columns=("question", "sentence")),
        Glue("rte", "RTE", Columns(PAIR, "label"), ENTAILMENT, ("accuracy",), PLAIN,
             answers={"test": "RTE"}, hub_columns=PAIR),
        Glue("wnli", "WNLI", Columns(PAIR, "label"), BINARY, ("accuracy",), PLAIN,
             answers={"test": "WNLI"}, hub_columns=PAIR),
    )
}  # fmt: skip
NAMES = tuple(TASKS)


def load(task: Glue, part: str, root: Path | None) -> Examples:
    """A part of a task: from the files below `root`, or from the hub if no folder is given."""
    if part not in task.files:
        raise UsageError(f"{task.name} has no part {part!r}; there are: {', '.join(task.files)}.")
    return _from_hub(task, part) if root is None else read(task, part, root)


def read(task: Glue, part: str, root: Path) -> Examples:
    """A part of a task from its file in `root/<Folder>` or `root/glue/<Folder>`."""
    path = _path(task, part, root)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    rows = [(number, line.rstrip("\r").split("\t")) for number, line in enumerate(lines, 1) if line.strip()]
    columns, rows = _columns(task, part, path, rows)
    if not rows:
        raise UsageError(f"{path} has no examples.")
    return _examples(task, path, columns, rows)


def _path(task: Glue, part: str, root: Path) -> Path:
    folders = [root / task.folder, root / "glue" / task.folder]
    places = [folder / name for folder in folders for name in task.files[part]]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UsageError(
            f"There is no {' or '.join(task.files[part])} of {task.name} in {' or '.join(map(str, folders))}. Give "
            "--data-root the folder that has the tasks' folders as GLUE's own files come, or leave it out to fetch "
            "them from the hub."
        )
    return found


def _columns(
    task: Glue, part: str, path: Path, rows: list[tuple[int, list[str]]]
) -> tuple[dict[str, tuple[int, ...]], list[tuple[int, list[str]]]]:
    """The numbers of the columns, and the rows without the one that names them."""
    unnamed = task.unnamed.get(path.name)
    if unnamed is not None:
        label = () if unnamed.label is None else (unnamed.label,)
        return {"sentences": _numbers(unnamed.sentences), "label": _numbers(label)}, rows
    if not rows:
        return {"sentences": (), "label": ()}, rows
    names = rows[0][1]
    is_test = part.startswith("test")
    wanted = task.unlabelled if is_test and task.unlabelled is not None else task.columns
    lacking = [name for name in wanted.sentences if name not in names]
    if wanted.label is not None and wanted.label not in names and not is_test:
        lacking.append(wanted.label)
    if lacking:
        raise UsageError(
            f"{path}, line 1, should name the columns {', '.join(map(repr, lacking))} of {task.name}; it has "
            f"{', '.join(map(repr, names[:12]))}."
        )
    has_label = wanted.label in names
    found = {
        "sentences": tuple(names.index(str(name)) for name in wanted.sentences),
        "label": (names.index(str(wanted.label)),) if has_label else (),
    }
    return found, rows[1:]


def _numbers(columns: Sequence[str | int]) -> tuple[int, ...]:
    return tuple(int(column) for column in columns)


def _examples(
    task: Glue, path: Path, columns: Mapping[str, tuple[int, ...]], rows: Sequence[tuple[int, list[str]]]
) -> Examples:
    sentences: list[list[str]] = [[] for _ in columns["sentences"]]
    labels: list[float] = []
    skipped, least = 0, 1 + max((*columns["sentences"], *columns["label"]))
    label_of = _score if task.scores else _class
    for number, row in rows:
        if len(row) < least or not all(row[column].strip() for column in columns["sentences"]):
            if task.skips:  # QQP's own files have such rows
                skipped += 1
                continue
            what = f"{len(row)} columns, {least} are needed" if len(row) < least else "an empty sentence"
            raise UsageError(f"{path}, line {number}, has {what}: {_start(row)}")
        for column, into in zip(columns["sentences"], sentences, strict=True):
            into.append(row[column].strip())
        labels.extend(label_of(task, row[column].strip(), path, number) for column in columns["label"])
    if not sentences[0]:
        raise UsageError(f"{path} has no whole example.")
    second = sentences[1] if len(sentences) > 1 else None
    return Examples(sentences[0], second, labels if columns["label"] else None, skipped)


def _class(task: Glue, word: str, path: Path, number: int) -> float:
    if word not in task.labels:
        raise UsageError(f"{path}, line {number}: the label is one of {', '.join(task.labels)}, got {word!r}.")
    return task.labels.index(word)


def _score(task: Glue, word: str, path: Path, number: int) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 5:
        raise UsageError(f"{path}, line {number}: the score is a number from 0 to 5, got {word!r}.")
    return value


def _start(row: list[str]) -> str:
    text = " | ".join(row)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _from_hub(task: Glue, part: str) -> Examples:
    datasets: Any = library("datasets", "text")
    name = part.replace("dev", "validation")
    try:
        table = datasets.load_dataset(HUB, task.name, split=name)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{task.name} cannot be fetched from {HUB}: {type(error).__name__}. Give --data-root the folder of GLUE's "
            "own files, or connect and try again."
        ) from error
    columns = [list(table[column]) for column in task.hub_columns]
    labels = [float(label) for label in table["label"]]
    hidden = part.startswith("test")  # the hub has −1 there
    return Examples(columns[0], columns[1] if len(columns) > 1 else None, None if hidden else labels)
