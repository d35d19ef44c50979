"""Parts of GLUE from the hub's `nyu-mll/glue`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from uncollapse.errors import UsageError, import_optional
from uncollapse.io.hf_models import TIMEOUT
from uncollapse.lab.data.text.glue_files import Examples
from uncollapse.lab.data.text.glue_tasks import Glue

HUB = "nyu-mll/glue"
HIDDEN = -1  # stands there for a label that is not public


def fetch(task: Glue, part: str) -> Examples:
    """A part of a task, from the hub or from what was fetched before."""
    datasets: Any = import_optional("datasets", "text")
    try:
        with _asked_once(datasets):
            table = datasets.load_dataset(HUB, task.name, split=part.replace("dev", "validation"))
    except Exception as error:  # offline: an OSError, one of the library's own, or of its HTTP client
        raise UsageError(
            f"{task.name} cannot be fetched from {HUB} ({type(error).__name__}). Give --data-root the folder of GLUE's "
            "own files, or connect and try again."
        ) from error
    lacking = [name for name in (*task.hub_columns, "label") if name not in table.column_names]
    if lacking:
        raise UsageError(f"{HUB} has no column {', '.join(lacking)} in {task.name}; give --data-root GLUE's own files.")
    first, *second = (list(table[column]) for column in task.hub_columns)
    return Examples(first, second[0] if second else None, _labels(task, part, table))


@contextmanager
def _asked_once(datasets: Any) -> Iterator[None]:
    """If the hub does not answer, only what was fetched before is looked for: no half minute of attempts."""
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


def _labels(task: Glue, part: str, table: Any) -> list[float] | None:
    """Numbers of classes in the order of `task.labels`, scores, or nothing if they are hidden."""
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
