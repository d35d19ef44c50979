"""The tasks of GLUE, from files in its own layout or from the hub, and the user's own data in that layout."""

from pathlib import Path

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io.files import expand_user
from uncollapse.lab.data.text import glue_hub
from uncollapse.lab.data.text.glue_files import Examples, read
from uncollapse.lab.data.text.glue_own import own
from uncollapse.lab.data.text.glue_tasks import NAMES, OWN, TASKS, Columns, Glue

__all__ = ["NAMES", "OWN", "TASKS", "Columns", "Examples", "Glue", "check", "find", "load", "own", "read"]


def check(name: str) -> None:
    """Raise unless it names a task of GLUE or a folder."""
    if name not in TASKS and not expand_user(name).is_dir():
        hint = did_you_mean(name, TASKS)
        raise UsageError(
            f"task is a task of GLUE ({', '.join(TASKS)}) or a folder with your own train.tsv and dev.tsv, "
            f"got {name!r}.{hint}"
        )


def find(name: str) -> Glue:
    """A task of GLUE by its name, or what the training file in a folder makes of it."""
    check(name)
    return TASKS[name] if name in TASKS else own(expand_user(name))


def load(task: Glue, part: str, root: Path | None) -> Examples:
    """A part of a task: from the files below `root`, or from the hub if no folder is given.

    The user's own data are read from their own folder.
    """
    if part not in task.files:
        hint = did_you_mean(part, task.files)
        raise UsageError(f"{task.name} has no part {part!r}.{hint} There are: {', '.join(task.files)}.")
    if task.name == OWN:
        return read(task, part, Path(task.folder))
    return glue_hub.fetch(task, part) if root is None else read(task, part, root)
