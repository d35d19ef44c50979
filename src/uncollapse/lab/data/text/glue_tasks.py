"""Description of the tasks of GLUE (https://gluebenchmark.com): files, columns, classes and metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
