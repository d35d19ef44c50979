"""Runtime of a run, apart from its config: data folder, checkpoints, device, threads, trackers, interrupts."""

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

Progress = Callable[[int, int, Mapping[str, float]], None]  # steps done, total steps, the newest metrics
ShouldPrune = Callable[[int, Mapping[str, float]], bool]  # epochs done, the newest metrics
READERS = 8  # more processes rarely load images faster


class PrunedError(Exception):
    """A run was stopped because its metrics are worse than those of other runs."""


class AlarmError(Exception):
    """A run was stopped because it is likely to fail. facts: step, steps, met, causes and advice."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__(f"Early alarm at step {facts['step']} of {facts['steps']}: {'; '.join(facts['met'])}.")
        self.facts = facts


@dataclass(frozen=True)
class Runtime:
    """Where a run executes. Nothing in here changes its metrics on the same kind of processor.

    data_root: folder of the datasets. checkpoints: folder of this run's checkpoints; None writes none. resume: start
    from them. save_seconds: time between two checkpoints. device: cpu, cuda or mps; None lets Accelerate decide.
    threads: CPU threads; another number changes the last digits of sums. trackers: names of `trackers.TRACKERS`,
    which write to `tracker_folder`. progress: called after each step. save_to: folder for the trained model; None saves
    none. workers: processes that load images ahead of training. on_stage: called with a short description of what
    happens before and after training. should_prune: asked after each evaluation but the last; a run that it stops
    raises PrunedError and has no result. alarm: measure the model after a twentieth of the steps; a run that is likely
    to fail, see `Rule.early`, raises AlarmError and has no result.
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
    alarm: bool = False

    def report_stage(self, words: str) -> None:
        """Report what happens now, where no steps are counted."""
        if self.on_stage is not None:
            self.on_stage(words)

    def without_output(self) -> "Runtime":
        """Return the runtime of a rank other than zero, which neither writes nor reports."""
        quiet = replace(self, progress=None, on_stage=None, should_prune=None)
        return replace(quiet, checkpoints=None, trackers=(), tracker_folder=None, save_to=None)


def spare_cores(threads: int) -> int:
    """Return how many processes can load images on cores that a run with this many threads leaves free."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(READERS, allowed // distributed.local_launch_size() - threads))


@contextmanager
def use_threads(count: int = 1) -> Iterator[None]:
    """Use this many CPU threads inside the context, and the previous number afterwards.

    Models of a few dozen features gain almost nothing from a second thread, and on a busy machine they are many times
    slower with it: threads then wait for each other in every small operation. With one thread, metrics do not depend on
    the number of cores.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SIGNALS = (signal.SIGINT, signal.SIGTERM)  # clusters send SIGTERM before they kill
ECHO = 2.0  # seconds in which a second signal is the first one, passed on by a launcher to its processes


class Interrupts:
    """Inside the context, the first Ctrl-C or SIGTERM only sets `asked`; the second one acts at once.

    Outside the main thread, signals cannot be caught and nothing changes. report: called with a message on the first.
    """

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        self.asked, self._report, self._asked_at = False, report, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._on_signal) for name in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked and distributed.launch_size() > 1 and now - self._asked_at < ECHO:
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked, self._asked_at = True, now
        if self._report is not None:
            self._report("stopping after this step; Ctrl-C again stops at once")
