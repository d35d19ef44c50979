"""What a run is told besides its config: where it runs, not what it finds."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

from uncollapse import distributed

Progress = Callable[[int, int, Mapping[str, float]], None]  # steps done, steps in all, the newest figures
ShouldPrune = Callable[[int, Mapping[str, float]], bool]  # epochs done, the newest figures: should the run be stopped?
READERS = 8  # processes beyond which reading ahead rarely gains anything


class PrunedError(Exception):
    """A run was stopped since its figures are behind those of others."""


@dataclass(frozen=True)
class Runtime:
    """Nothing in here changes the figures of a run on the same kind of processor.

    data_root: folder of the data sets. checkpoints: folder of this run's checkpoints; None writes none. resume: start
    from them. save_seconds: time between two checkpoints. device: cpu, cuda or mps; None lets Accelerate decide.
    threads: CPU threads; another number changes the last digits of sums. trackers: names of `trackers.TRACKERS`,
    which write to `tracker_folder`. progress: called after each step. save_to: folder for the trained model; None saves
    none. workers: processes that load images ahead of training. on_stage: called with a short description of what
    happens before and after training. should_prune: asked after each evaluation but the last; a run that it stops
    raises PrunedError and has no result.
    """

    data_root: Path | None = None
    checkpoints: Path | None = None
    resume: bool = True
    save_seconds: float = 60.0
    device: str | None = None
    threads: int = 1
    trackers: tuple[str, ...] = ()
    tracker_folder: Path | None = None
    progress: Progress | None = None
    save_to: Path | None = None
    workers: int = 0
    on_stage: Callable[[str], None] | None = None
    should_prune: ShouldPrune | None = None

    def report_stage(self, words: str) -> None:
        """Tell what is done now, where no steps are counted."""
        if self.on_stage is not None:
            self.on_stage(words)

    def without_output(self) -> "Runtime":
        """For a process that only works along, while the first of several writes and tells."""
        told = replace(self, progress=None, on_stage=None, should_prune=None)
        return replace(told, checkpoints=None, trackers=(), tracker_folder=None, save_to=None)


def spare_cores(threads: int) -> int:
    """Processes that can read images on cores which a run with so many threads leaves free."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(READERS, allowed // distributed.local_launch_size() - threads))


@contextmanager
def use_threads(count: int = 1) -> Iterator[None]:
    """So many threads within, as many as before afterwards.

    Models of a few dozen features gain next to nothing from a second thread, and are many times slower with it when
    the machine is busy: threads then wait for each other in every small operation. And the figures no longer depend on
    the number of cores.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SIGNALS = (signal.SIGINT, signal.SIGTERM)  # a cluster sends the second one before it kills
ECHO = 2.0  # seconds in which a second signal is the first one again, which a launcher passes on to all its processes


class Interrupts:
    """Within, the first Ctrl-C or SIGTERM only sets `asked`; the second one acts at once.

    Outside the main thread signals cannot be caught: nothing changes there. tell: hears that it was asked.
    """

    def __init__(self, tell: Callable[[str], None] | None = None) -> None:
        self.asked, self._tell, self._heard_at = False, tell, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._heard) for name in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and distributed.launch_size() > 1 and now - self._heard_at < ECHO:
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked, self._heard_at = True, now
        if self._tell is not None:
            self._tell("stopping after this step; Ctrl-C again stops at once")
