"""What a run is told besides its config: where it runs, not what it finds."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from uncollapse import distributed

Progress = Callable[[int, int, Mapping[str, float]], None]  # steps done, steps in all, the newest figures
Judge = Callable[[int, Mapping[str, float]], bool]  # epochs done, the newest figures: should the run be stopped?
READERS = 8  # processes beyond which reading ahead rarely gains anything


class PrunedError(Exception):
    """A run was stopped since its figures are behind those of others."""


@dataclass(frozen=True)
class Session:
    """Nothing in here changes the figures of a run on the same kind of processor.

    data_root: folder that has the data sets. checkpoints: folder of this run's checkpoints; None writes none. resume:
    go on from them. save_seconds: time between two checkpoints. device: None lets Accelerate decide; cpu, cuda, mps.
    threads: of the processor; with another number sums differ in their last digits. trackers: "jsonl", "tensorboard",
    "wandb", which write to `tracked`. progress: called after each step. keep: folder for the trained model; None keeps
    none. workers: processes that read images ahead of the training. stage: called with what is done before and after
    the training, in a few words. judge: asked after each evaluation but the last; a run that it stops ends with
    PrunedError and has no result.
    """

    data_root: Path | None = None
    checkpoints: Path | None = None
    resume: bool = True
    save_seconds: float = 60.0
    device: str | None = None
    threads: int = 1
    trackers: tuple[str, ...] = ()
    tracked: Path | None = None
    progress: Progress | None = None
    keep: Path | None = None
    workers: int = 0
    stage: Callable[[str], None] | None = None
    judge: Judge | None = None

    def doing(self, words: str) -> None:
        """Tell what is done now, where no steps are counted."""
        if self.stage is not None:
            self.stage(words)

    def silent(self) -> "Session":
        """For a process that only works along, while the first of several writes and tells."""
        told = replace(self, progress=None, stage=None, judge=None)
        return replace(told, checkpoints=None, trackers=(), tracked=None, keep=None)


def spare_cores(threads: int) -> int:
    """Processes that can read images on cores which a run with so many threads leaves free."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(READERS, allowed // distributed.local_launch_size() - threads))
