"""Load the tasks of GLUE from files in its own layout or from the hub, and the user's own data in that layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError, did_you_mean, import_optional
from uncollapse.io.files import expand_user
from uncollapse.io.hf_models import PACKAGE, TIMEOUT, in_package
from uncollapse.lab.data.text.glue_files import NAMES, OWN, TASKS, Columns, Examples, GlueTask, own_task, read_split

__all__ = [
    "NAMES",
    "OWN",
    "TASKS",
    "Columns",
    "Examples",
    "GlueTask",
    "check_task",
    "find_task",
    "load_split",
    "own_task",
    "read_split",
]


def check_task(name: str) -> None:
    """Raise unless `name` is a task of GLUE or a folder, which may be in a package."""
    if name not in TASKS and not _folder(name).is_dir():
        hint = did_you_mean(name, TASKS)
        raise UsageError(
            f"task must be a task of GLUE ({', '.join(TASKS)}) or a folder with your own train.tsv and dev.tsv, "
            f"got {name!r}.{hint}"
        )


def find_task(name: str) -> GlueTask:
    """Return a task of GLUE by name, or the task that the training file of a folder describes."""
    check_task(name)
    return TASKS[name] if name in TASKS else own_task(_folder(name))


def _folder(name: str) -> Path:
    return Path(in_package(name)) if name.startswith(PACKAGE) else expand_user(name)


def load_split(task: GlueTask, part: str, root: Path | None) -> Examples:
    """Return a split of a task, from the files below `root`, or from the hub if no folder is given.

    The user's own data are read from their own folder.
    """
    if part not in task.files:
        hint = did_you_mean(part, task.files)
        raise UsageError(f"{task.name} has no split {part!r}.{hint} There are: {', '.join(task.files)}.")
    if task.name == OWN:
        return read_split(task, part, Path(task.folder))
    return fetch_split(task, part) if root is None else read_split(task, part, root)


HUB = "nyu-mll/glue"
HIDDEN = -1  # the hub's label where it is not public


def fetch_split(task: GlueTask, part: str) -> Examples:
    """Return a split of a task from the hub, or from its local cache."""
    datasets: Any = import_optional("datasets", "text")
    try:
        with _offline_if_unreachable(datasets):
            table = datasets.load_dataset(HUB, task.name, split=part.replace("dev", "validation"))
    except Exception as error:  # offline: an OSError, one of the library's own, or of its HTTP client
        raise UsageError(
            f"{task.name} cannot be fetched from {HUB} ({type(error).__name__}). Set --data-root to the folder of "
            "GLUE's own files, or connect and try again."
        ) from error
    lacking = [name for name in (*task.hub_columns, "label") if name not in table.column_names]
    if lacking:
        raise UsageError(f"{HUB} has no column {', '.join(lacking)} in {task.name}; give --data-root GLUE's own files.")
    first, *second = (list(table[column]) for column in task.hub_columns)
    return Examples(first, second[0] if second else None, _hub_labels(task, part, table))


@contextmanager
def _offline_if_unreachable(datasets: Any) -> Iterator[None]:
    """Use only the local cache if the hub does not answer, instead of half a minute of attempts."""
    import huggingface_hub

    offline = datasets.config.HF_HUB_OFFLINE
    api: Any = huggingface_hub.HfApi()
    try:
        api.dataset_info(HUB, timeout=TIMEOUT)
    except Exception:
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _hub_labels(task: GlueTask, part: str, table: Any) -> list[float] | None:
    """Return class indices in the order of `task.labels`, or scores; None if they are hidden."""
    labels = list(table["label"])
    if part.startswith("test") and HIDDEN in labels:
        return None
    names = getattr(table.features["label"], "names", None)
    by_words = not task.scores and not task.labels[0].isdigit()
    least, most = task.bounds if task.scores else (0, len(task.labels) - 1)
    if (by_words and tuple(names or ()) != task.labels) or not all(least <= label <= most for label in labels):
        raise UsageError(
            f"{HUB} has other labels in {task.name} than {', '.join(task.labels) or 'scores'}; give --data-root GLUE's "
            "own files."
        )
    return labels
