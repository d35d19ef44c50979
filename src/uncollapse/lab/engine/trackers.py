"""Log the metrics of a run while it trains: to JSON lines, and to TensorBoard, W&B and Trackio through Accelerate."""

import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from uncollapse.errors import UsageError, did_you_mean, import_optional
from uncollapse.io.files import write, write_errors

LINES = "metrics.jsonl"
WANDB_RUN = "wandb-run.txt"  # the W&B id of the run, to resume it
PROJECT = "uncollapse"


class Tracker(Protocol):
    """Logs metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def close(self) -> None:
        """Finish; nothing is logged afterwards."""


class Trackers:
    """Several trackers as one; with none, nothing is logged."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step to all trackers."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Close all trackers, even when one of them fails."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)


def check_names(names: Iterable[str]) -> None:
    """Raise a UsageError unless all names are those of trackers."""
    if unknown := sorted(set(names) - set(TRACKERS)):
        hint = did_you_mean(unknown[0], TRACKERS)
        raise UsageError(f"There is no tracker {unknown[0]!r}.{hint} There are: {', '.join(TRACKERS)}.")


def open_trackers(
    names: Iterable[str], folder: Path | None, run_name: str, config: Mapping[str, Any], step: int = 0
) -> Trackers:
    """Open trackers by name.

    Args:
        names: Any of "jsonl" (one line per call in metrics.jsonl; a value that is not finite is null), "tensorboard",
            "wandb" and "trackio".
        folder: Folder of this run; only needed with names.
        run_name: Name of the run in W&B and Trackio.
        config: Settings of the run, shown next to it.
        step: Step from which the run resumes. What was logged at this step and later is dropped where the tracker can,
            because it is logged again. 0 drops everything of an earlier run.
    """
    wanted = set(names)
    check_names(wanted)
    if not wanted:
        return Trackers()
    if folder is None:
        raise UsageError(f"The trackers {', '.join(sorted(wanted))} need a folder to write to, got None.")
    trackers: list[Tracker] = []
    with write_errors(folder), ExitStack() as opened:  # if the second cannot be opened, the first is closed
        folder.mkdir(parents=True, exist_ok=True)
        for name in (name for name in TRACKERS if name in wanted):
            trackers.append(TRACKERS[name](folder, run_name, config, step))
            opened.callback(trackers[-1].close)
        opened.pop_all()
    return Trackers(trackers)


class _JsonLines:
    """metrics.jsonl. A line that a kill has cut off is removed when the file is opened again."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any], step: int) -> None:
        self._path = path = folder / LINES
        before = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        write(path, "".join(f"{line}\n" for line in before if _is_before(line, step)))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: _to_python(value) if math.isfinite(value) else None for name, value in metrics.items()}
        with write_errors(self._path):
            self._file.write(json.dumps({"step": step} | finite, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with write_errors(self._path):
            self._file.close()


def _is_before(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] < step)
    except (ValueError, KeyError, TypeError):
        return False


def _to_python(value: float) -> float:
    """Return a number of torch or NumPy as one of Python; integers stay integers."""
    return value if isinstance(value, int) else float(value)


class _AccelerateTracker:
    """A started tracker of `accelerate.tracking`."""

    def __init__(self, class_name: str, *arguments: Any, **options: Any) -> None:
        self.tracker: Any = getattr(import_optional("accelerate.tracking", "train"), class_name)(*arguments, **options)
        self.tracker.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.tracker.log({name: _to_python(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self.tracker.finish()


def _open_tensorboard(folder: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Return a tracker that writes an event file to the folder."""
    import_optional("tensorboard", "train")
    made = _AccelerateTracker("TensorBoardTracker", "", str(folder), purge_step=step)
    if config and step == 0:
        text = "\n".join(f"    {name}: {value}" for name, value in config.items())
        made.tracker.tracker.add_text("config", text)
    return made


def _open_wandb(folder: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Return a tracker for W&B, online or offline as its WANDB_ variables say. A resumed run keeps its id."""
    wandb, id_file = _import_library("wandb"), folder / WANDB_RUN
    known = id_file.read_text(encoding="utf-8").strip() if step > 0 and id_file.exists() else None
    options = {"name": run_name, "config": dict(config), "dir": str(folder), "id": known, "resume": "allow"}
    try:
        made = _AccelerateTracker("WandBTracker", os.environ.get("WANDB_PROJECT", PROJECT), **options)
    except wandb.Error as error:
        raise UsageError(
            f"Weights & Biases could not start: {error}. Log in with `wandb login`, or set WANDB_MODE=offline."
        ) from error
    write(id_file, f"{made.tracker.tracker.id}\n")
    return made


def _open_trackio(folder: Path, run_name: str, config: Mapping[str, Any], step: int) -> Tracker:
    """Return a tracker for Trackio, which stores runs by project and name on this machine."""
    _import_library("trackio")
    resume = "allow" if step > 0 else "never"
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    return _AccelerateTracker("TrackioTracker", project, name=run_name, config=dict(config), resume=resume)


def _import_library(name: str) -> Any:
    """Return a library of a tracker. W&B leaves folders named wandb, which Python imports as an empty package."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        module = None
    if not hasattr(module, "init"):
        raise UsageError(f"The tracker {name!r} needs its library: pip install {name}.")
    return module


TRACKERS: Mapping[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "tensorboard": _open_tensorboard,
    "jsonl": _JsonLines,  # opened last: it drops lines, and the others may fail to open
}
