"""Figures of a run written down while it runs: as lines of JSON, for TensorBoard, for Weights & Biases."""

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
WANDB_RUN = "wandb-run.txt"  # the id by which W&B knows the run, to go on with it


class Tracker(Protocol):
    """Takes down figures."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take down the figures of a step."""

    def close(self) -> None:
        """Nothing follows."""


class Trackers:
    """Several trackers as one; without any, nothing is written."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Give the figures of a step to all."""
        for tracker in self._trackers:
            tracker.log(step, figures)

    def close(self) -> None:
        """Close all, also when one of them fails."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)


def open_trackers(
    names: Iterable[str], folder: Path | None, run_name: str, config: Mapping[str, Any], step: int = 0
) -> Trackers:
    """Trackers by name, which write into a folder.

    Args:
        names: of "jsonl" (a line for each call in metrics.jsonl, where a value that is not finite is null),
            "tensorboard" and "wandb".
        folder: of this run; only needed if there are names.
        run_name: as W&B shows it.
        config: settings of the run, shown beside it.
        step: the run goes on from here: what was taken down of this step and later ones is dropped, because it is
            logged again. 0: everything of an earlier run.
    """
    chosen = set(names)
    if unknown := sorted(chosen - set(TRACKERS)):
        hint = did_you_mean(unknown[0], TRACKERS)
        raise UsageError(f"No tracker is named {unknown[0]!r}.{hint} There are: {', '.join(TRACKERS)}.")
    if not chosen:
        return Trackers()
    if folder is None:
        raise UsageError(f"A folder is needed to write to for {', '.join(sorted(chosen))}, and there is none.")
    trackers: list[Tracker] = []
    with write_errors(folder), ExitStack() as opened:  # if the second cannot be opened, the first is closed
        folder.mkdir(parents=True, exist_ok=True)
        for name in (name for name in TRACKERS if name in chosen):
            trackers.append(TRACKERS[name](folder, run_name, config, step))
            opened.callback(trackers[-1].close)
        opened.pop_all()
    return Trackers(trackers)


class _Lines:
    """metrics.jsonl. A line that a kill has cut off goes when the file is opened again."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any], step: int) -> None:
        self._path = path = folder / LINES
        before = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        write(path, "".join(f"{line}\n" for line in before if _is_before(line, step)))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        finite = {name: _plain(value) if math.isfinite(value) else None for name, value in figures.items()}
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


def _plain(value: float) -> float:
    """A number of torch or numpy as one of Python; whole ones stay whole."""
    return value if isinstance(value, int) else float(value)


class _TensorBoard:
    """An event file in the folder."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any], step: int) -> None:
        import_optional("tensorboard", "train")
        writer = import_optional("torch.utils.tensorboard", "train").SummaryWriter
        self._writer: Any = writer(log_dir=str(folder), purge_step=step)
        if config and step == 0:
            self._writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in config.items()))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # else a kill takes the last two minutes with it

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run at Weights & Biases, or on this machine: WANDB_MODE and the other variables of its user decide."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any], step: int) -> None:
        wandb, kept = _wandb(), folder / WANDB_RUN
        known = kept.read_text(encoding="utf-8").strip() if step > 0 and kept.exists() else None
        project = os.environ.get("WANDB_PROJECT", "uncollapse")
        try:
            self._run = wandb.init(
                project=project, name=run_name, config=dict(config), dir=str(folder), id=known, resume="allow"
            )
        except wandb.Error as error:
            raise UsageError(
                f"Weights & Biases could not start: {error}. Log in with `wandb login`, or set WANDB_MODE=offline."
            ) from error
        write(kept, f"{self._run.id}\n")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb() -> Any:
    """The library. It leaves folders named wandb behind, which Python takes for an empty library where it is not."""
    try:
        wandb = importlib.import_module("wandb")
    except ModuleNotFoundError:
        wandb = None
    if not hasattr(wandb, "init"):
        raise UsageError('The tracker "wandb" needs the library of Weights & Biases: pip install wandb.')
    return wandb


TRACKERS: Mapping[str, Callable[[Path, str, Mapping[str, Any], int], Tracker]] = {
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
    "jsonl": _Lines,  # the last to be opened: it drops lines, and the others may have to refuse
}
