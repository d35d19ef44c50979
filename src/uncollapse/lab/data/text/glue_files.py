"""Read sentences and labels from files in GLUE's own layout, and describe the user's own files as a task.

A file has one example per line, tabs between its columns, and no quoting: a quotation mark is part of the sentence. A
CSV reader would join lines at unbalanced quotes and would not report the line of an error, so lines are split here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from uncollapse.errors import NotFiniteError, UsageError, import_optional

LARGEST = 3e38  # about the largest float32


@dataclass(frozen=True)
class Columns:
    """Columns of a file: their names, or their indices if its first line does not name them."""

    sentences: tuple[str | int, ...]
    label: str | int | None = None


@dataclass(frozen=True)
class GlueTask:
    """A task.

    Args:
        name: Name of the task.
        folder: Folder of its files.
        columns: Columns of the files with labels; a test file may lack the label.
        labels: Names of the classes, in the order of their indices; none for scores.
        metrics: Names of the metrics; the first is the paper's.
        files: File of each split, or several of which one must exist.
        unnamed: Columns of files whose first line does not name them.
        bounds: Least and largest score.
        skips: Whether rows of its own files that lack columns are left out.
        hub_columns: Columns of the sentences on the hub.
    """

    name: str
    folder: str
    columns: Columns
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy",)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unnamed: Mapping[str, Columns] = field(default_factory=dict)
    bounds: tuple[float, float] = (-LARGEST, LARGEST)
    skips: bool = False
    hub_columns: tuple[str, ...] = ()

    @property
    def scores(self) -> bool:
        """Return whether it has scores instead of classes."""
        return not self.labels

    @property
    def outputs(self) -> int:
        """Return the number of a model's outputs: one per class, or one score."""
        return len(self.labels) or 1

    @property
    def dev(self) -> tuple[str, ...]:
        """Return its development splits, the main one first."""
        return tuple(part for part in self.files if part.startswith("dev"))


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
SINGLE, PAIR = ("sentence",), ("sentence1", "sentence2")
PLAIN: dict[str, tuple[str, ...]] = {"train": ("train.tsv",), "dev": ("dev.tsv",), "test": ("test.tsv",)}
MNLI = ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
COLA = Columns((3,), 1)
STS = Columns((5, 6), 4)
MRPC = ("#1 String", "#2 String")
QUESTIONS = ("question1", "question2")

TASKS: Mapping[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(
            "cola",
            "CoLA",
            Columns(SINGLE, "label"),
            BINARY,
            ("matthews", "accuracy"),
            PLAIN,
            unnamed={"train.tsv": COLA, "dev.tsv": COLA},
            hub_columns=SINGLE,
        ),
        GlueTask("sst2", "SST-2", Columns(SINGLE, "label"), BINARY, ("accuracy",), PLAIN, hub_columns=SINGLE),
        GlueTask("mrpc", "MRPC", Columns(MRPC, "Quality"), BINARY, ("f1", "accuracy"), PLAIN, hub_columns=PAIR),
        GlueTask("qqp", "QQP", Columns(QUESTIONS, "is_duplicate"), BINARY, ("f1", "accuracy"), PLAIN, skips=True,
             hub_columns=QUESTIONS),
        GlueTask(
            "stsb",
            "STS-B",
            Columns(PAIR, "score"),
            metrics=("spearman", "pearson"),
            files={part: (f"{part}.tsv", f"sts-{part}.csv") for part in PLAIN},
            unnamed={f"sts-{part}.csv": STS for part in PLAIN},
            bounds=(0.0, 5.0),
            hub_columns=PAIR,
        ),
        GlueTask(
            "mnli",
            "MNLI",
            Columns(PAIR, "gold_label"),
            ("entailment", "neutral", "contradiction"),
            files={part: (f"{part}.tsv",) for part in MNLI},
            hub_columns=("premise", "hypothesis"),
        ),
        GlueTask("qnli", "QNLI", Columns(("question", "sentence"), "label"), ENTAILMENT, ("accuracy",), PLAIN,
             hub_columns=("question", "sentence")),
        GlueTask("rte", "RTE", Columns(PAIR, "label"), ENTAILMENT, ("accuracy",), PLAIN, hub_columns=PAIR),
        GlueTask("wnli", "WNLI", Columns(PAIR, "label"), BINARY, ("accuracy",), PLAIN, hub_columns=PAIR),
    )
}  # fmt: skip
OWN = "own"
NAMES = tuple(TASKS)


Row = tuple[int, list[str]]  # the number of a line, and its columns


@dataclass(frozen=True)
class Examples:
    """Sentences or pairs of sentences, with labels where they are public.

    labels: class indices, or scores. skipped: number of damaged rows of a task's own files that were left out.
    """

    first: Sequence[str]
    second: Sequence[str] | None
    labels: Sequence[float] | None
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.first)

    def select(self, numbers: Sequence[int]) -> "Examples":
        """Return the examples of these indices, in this order."""
        second = None if self.second is None else [self.second[n] for n in numbers]
        labels = None if self.labels is None else [self.labels[n] for n in numbers]
        return Examples([self.first[n] for n in numbers], second, labels, self.skipped)


def read_split(task: GlueTask, part: str, root: Path) -> Examples:
    """Read a split of a task from its file below `root`. A test split may have no labels."""
    path = path_of(task, part, root)
    lines = read_rows(path)
    is_test = part.startswith("test")
    if path.name in task.unnamed:
        columns = task.unnamed[path.name]
    else:
        columns = _find_columns(task, path, lines[0][1], optional=is_test)
        lines = lines[1:]
    lines, skipped = _complete_rows(task, path, columns, lines)
    if not lines:
        raise UsageError(f"{path} has no examples, only {'damaged rows' if skipped else 'the names of its columns'}.")
    first, *second = ([row[int(at)].strip() for _, row in lines] for at in columns.sentences)
    labels = None if columns.label is None else _read_labels(task, path, int(columns.label), lines)
    return Examples(first, second[0] if second else None, labels, skipped)


def path_of(task: GlueTask, part: str, root: Path) -> Path:
    """Return the file of a split: in `root/<Folder>` or `root/glue/<Folder>`, the user's own data in `root`."""
    is_own = task.name == OWN
    folders = [root] if is_own else [root / task.folder, root / "glue" / task.folder]
    places = [folder / name for folder in folders for name in task.files[part]]
    found = next((place for place in places if place.is_file()), None)
    if found is not None:
        return found
    if not root.is_dir():
        raise UsageError(f"There is no folder {root}; set --data-root to the one that has the data.")
    wanted = "--data-root to the folder with the tasks' folders in GLUE's own layout, or leave it out to use the hub."
    if is_own:
        wanted = "--task to the folder that has your train.tsv and dev.tsv."
    whose = "" if is_own else f" of {task.name}"
    raise UsageError(
        f"There is no {' or '.join(task.files[part])}{whose} in {' or '.join(map(str, folders))}. Set {wanted}"
    )


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, without empty lines at its end; at least one."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").rstrip("\r\n").split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not valid UTF-8: {error.reason} at byte {error.start}. Save it as UTF-8."
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    if lines == [""]:
        raise UsageError(f"{path} is empty; download it again.")
    return [(number, line.rstrip("\r").split("\t")) for number, line in enumerate(lines, 1)]


def _find_columns(task: GlueTask, path: Path, names: list[str], *, optional: bool) -> Columns:
    """Return the indices of a task's columns in a file that names them in its first line."""
    names = [name.strip() for name in names]
    wanted = [str(name) for name in task.columns.sentences]
    label = str(task.columns.label)
    if label in names or not optional:
        wanted.append(label)
    for how, wrong in (
        ("name", [name for name in wanted if name not in names]),
        ("name once only", [name for name in wanted if names.count(name) > 1]),
    ):
        if wrong:
            raise UsageError(
                f"{path}, line 1, should {how} the columns {', '.join(map(repr, wrong))} of {task.name}, with tabs "
                f"between them; it has {', '.join(map(repr, names[:12]))}."
            )
    found = [names.index(name) for name in wanted]
    count = len(task.columns.sentences)
    return Columns(tuple(found[:count]), found[count] if len(found) > count else None)


def _complete_rows(task: GlueTask, path: Path, columns: Columns, lines: list[Row]) -> tuple[list[Row], int]:
    """Return the rows that have all their columns, and the number of damaged ones that were skipped."""
    needed = (*columns.sentences, *(() if columns.label is None else (columns.label,)))
    least = 1 + max(int(column) for column in needed)
    kept = []
    for number, row in lines:
        if len(row) >= least and (task.skips or all(row[int(at)].strip() for at in columns.sentences)):
            kept.append((number, row))
        elif not task.skips:
            what = f"{len(row)} columns, {least} are needed" if len(row) < least else "an empty sentence"
            raise UsageError(f"{path}, line {number}, has {what}: {_start(row)!r}. Fix or remove the line.")
    return kept, len(lines) - len(kept)


def _read_labels(task: GlueTask, path: Path, column: int, lines: list[Row]) -> list[float]:
    numbers = {name: number for number, name in enumerate(task.labels)}
    least, most = task.bounds
    found: list[float] = []
    for number, row in lines:
        word = row[column].strip()
        value = _number(word) if task.scores else numbers.get(word)
        if value is None or (task.scores and not least <= value <= most):
            raise UsageError(f"{path}, line {number}: {_describe_allowed(task)}, got {word!r}.")
        found.append(value)
    return found


def _describe_allowed(task: GlueTask) -> str:
    if task.scores:
        least, most = task.bounds
        return f"the score must be a {'finite number' if most == LARGEST else f'number from {least:g} to {most:g}'}"
    more = ", …" if len(task.labels) > 12 else ""
    whose = ", as in the training file" if task.name == OWN else ""
    return f"the label must be one of {', '.join(task.labels[:12])}{more}{whose}"


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _start(row: list[str]) -> str:
    text = " | ".join(row)
    return text if len(text) <= 80 else f"{text[:79]}…"


MOST_CLASSES = 100  # more are probably scores, or texts, in the wrong column


def own_task(root: Path) -> GlueTask:
    """Return the task in `train.tsv`, `dev.tsv` and, without labels, `test.tsv` of a folder.

    The first line of each names its columns: `sentence`, or `sentence1` and `sentence2`, and `label` for classes or
    `score` for numbers. Other columns are ignored. The classes are those of the training file, in sorted order.
    """
    path = path_of(GlueTask(OWN, str(root), Columns(SINGLE), files=PLAIN), "train", root)
    (_, names), *lines = read_rows(path)
    names = [name.strip() for name in names]
    sentences = [columns for columns in (SINGLE, PAIR) if set(columns) <= set(names)]
    targets = [name for name in ("label", "score") if name in names]
    if len(sentences) != 1 or len(targets) != 1:
        raise UsageError(
            f"{path}, line 1, should name the columns sentence, or sentence1 and sentence2, and label (classes) or "
            f"score (numbers), with tabs between them; it has {', '.join(map(repr, names[:12]))}."
        )
    columns = Columns(sentences[0], targets[0])
    if targets == ["score"]:
        return GlueTask(OWN, str(root), columns, (), ("spearman", "pearson"), PLAIN)
    labels = _own_classes(path, names.index("label"), lines)
    return GlueTask(OWN, str(root), columns, labels, ("accuracy", "macro_f1"), PLAIN)


def _own_classes(path: Path, column: int, lines: list[Row]) -> tuple[str, ...]:
    words = {row[column].strip(): number for number, row in reversed(lines) if len(row) > column}
    if "" in words:
        raise UsageError(f"{path}, line {words['']}, has no label; add one or remove the line.")
    if len(words) > MOST_CLASSES:
        raise UsageError(
            f"{path} has {len(words)} different labels, at most {MOST_CLASSES} are allowed; name the column score if "
            "they are numbers."
        )
    if lines and len(words) < 2:
        raise UsageError(f"{path} has only the label {', '.join(map(repr, words))}; at least two classes are needed.")
    return tuple(sorted(words)) or ("",)  # the reader reports a file without lines


def _accuracy(truth: Any, answers: Any) -> float:
    return float(import_optional("sklearn.metrics", "text").accuracy_score(truth, answers))


def _f1(truth: Any, answers: Any) -> float:
    return float(import_optional("sklearn.metrics", "text").f1_score(truth, answers, zero_division=0.0))


def _macro_f1(truth: Any, answers: Any) -> float:
    """Return the mean over the classes that occur in the labels or in the predictions."""
    score = import_optional("sklearn.metrics", "text").f1_score(truth, answers, average="macro", zero_division=0.0)
    return float(score)


def _matthews(truth: Any, answers: Any) -> float:
    """Return Matthews' correlation; 0 where one side has a single class, by definition."""
    if len(np.unique(truth)) < 2 or len(np.unique(answers)) < 2:
        return 0.0
    return float(import_optional("sklearn.metrics", "text").matthews_corrcoef(truth, answers))


def _spearman(truth: Any, answers: Any) -> float:
    return _correlation("spearmanr", truth, answers)


def _pearson(truth: Any, answers: Any) -> float:
    return _correlation("pearsonr", truth, answers)


def _correlation(name: str, truth: Any, answers: Any) -> float:
    """Return a correlation; 0 where one side is constant, as Matthews' correlation is."""
    if len(truth) < 2 or np.ptp(truth) == 0 or np.ptp(answers) == 0:
        return 0.0
    return float(getattr(import_optional("scipy.stats", "text"), name)(truth, answers).statistic)


METRICS: Mapping[str, Callable[[Any, Any], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "macro_f1": _macro_f1,
    "matthews": _matthews,
    "spearman": _spearman,
    "pearson": _pearson,
}


def compute_metrics(names: Sequence[str], truth: Sequence[float], answers: Sequence[float]) -> dict[str, float]:
    """Return metrics of predictions compared with the labels; both are class indices, or scores.

    >>> compute_metrics(("f1", "accuracy"), [1, 1, 0, 0], [1, 0, 0, 0])
    {'f1': 0.6666666666666666, 'accuracy': 0.75}
    """
    pair = np.asarray(truth), np.asarray(answers)
    bad = int((~np.isfinite(pair[1])).sum())
    if bad:
        raise NotFiniteError(f"The model's outputs are not finite: {bad} of {len(answers)} are NaN or infinite.")
    return {name: METRICS[name](*pair) for name in names}
