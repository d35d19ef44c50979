"""One training loop for all recipes, on Accelerate: devices, precision, checkpoints, resume, progress, trackers.

A run that was killed and resumes from a checkpoint ends with the same metrics, to the bit on one CPU thread: batches
depend only on the seed and the epoch, and a checkpoint has everything else, including the random state.

Several processes, started by a launcher, share each batch and average their gradients. They always do the same step:
what only one of them knows, such as a signal or the time, is sent to all before anything depends on it.
"""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any, TypeVar

from uncollapse import distributed
from uncollapse.diagnosis.target import Plan
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.engine import sharding
from uncollapse.lab.engine.checkpoints import Checkpoint, Checkpoints
from uncollapse.lab.engine.runtime import AlarmError, Interrupts, PrunedError, Runtime
from uncollapse.lab.engine.seeding import get_random_state, set_random_state, use_seed
from uncollapse.lab.engine.snapshot import TrainingState, restore, take_snapshot
from uncollapse.lab.engine.step import Stepper
from uncollapse.lab.engine.task import History, Skippable, Task, TrainingOptions
from uncollapse.lab.engine.trackers import open_trackers
from uncollapse.monitoring.monitor import CollapseWarning, Monitor
from uncollapse.monitoring.rules import WINDOW


def fit(
    task: Task,
    settings: TrainingOptions,
    runtime: Runtime | None = None,
    identity: str = "",
    facts: Mapping[str, Any] | None = None,
) -> History:
    """Train `task.model`, which then has the selected weights and is in evaluation mode.

    `identity` identifies the experiment: a checkpoint of another one is refused. `facts` are logged by the trackers.
    Ctrl-C and SIGTERM write a checkpoint and raise KeyboardInterrupt. Several processes must all call it with the same
    task; rank zero writes. If one of them fails, it raises its error and the others raise PeerError.
    """
    runtime = runtime or Runtime()
    distributed.join_group(runtime.device)
    if not distributed.is_rank_zero():
        runtime = runtime.without_output()
    seed = use_seed(settings.seed, distributed.rank())
    with seed, Interrupts(runtime.report_stage) as interrupts, distributed.peer_errors():
        loop = _Loop(task, settings, runtime, identity, facts or {})
        try:
            return loop.run(interrupts)
        finally:
            loop.close()


class _Loop:
    """State of a running training."""

    def __init__(
        self, task: Task, settings: TrainingOptions, runtime: Runtime, identity: str, facts: Mapping[str, Any]
    ) -> None:
        self.task, self.settings, self.runtime = task, settings, runtime
        _check_same(task, identity)
        self.stepper = Stepper(task, settings, runtime.device)
        self.at, self.pace = TrainingState(), Throughput(task.unit)
        folder = runtime.checkpoints
        self.checkpoints = None if folder is None else Checkpoints(folder, identity)
        if settings.select is not None and task.evaluate is None:
            raise UsageError(f"select={settings.select!r} needs a task that evaluates.")
        self.saves = distributed.on_rank_zero(lambda: self.checkpoints is not None)
        saved = distributed.on_rank_zero(self._load_checkpoint, "Reading the checkpoint")
        restore(saved, self.at, *self.stepper.state)
        tracked = runtime.tracker_folder or folder
        name = identity if tracked is None else tracked.name
        self.trackers = open_trackers(runtime.trackers, tracked, name, facts, step=self.at.unlogged)
        self.started = self.saved = time.monotonic()

    def _load_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint to resume from."""
        if self.checkpoints is None:
            return None
        if not self.runtime.resume:
            self.checkpoints.clear()  # else those of later steps would be used at the next resumption
            return None
        return self.checkpoints.load()

    def run(self, interrupts: Interrupts) -> History:
        while self.at.epoch < self.settings.epochs and self.at.ended is None:
            with closing(self._steps()) as steps:
                for _ in steps:
                    self._check_signals(interrupts)
            self._end_epoch()
            self._check_signals(interrupts)
            self._prune()
        if self.saves:  # the evaluation after training may take long, and may be interrupted
            self._save()
        ended = self.at.ended or "the last epoch"
        selected = self._load_selected()
        return History(self.at.epochs, selected, ended, self._seconds(), self.pace.summary())

    def close(self) -> None:
        self.trackers.close()
        self.stepper.close()

    def _steps(self) -> Generator[None, None, None]:
        """Take the remaining steps of the epoch."""
        epoch, size = self.at.epoch + 1, self.settings.accumulate
        batches, stream = self._stream(epoch)
        count = math.ceil(len(batches) / size) if isinstance(batches, Sized) else 0
        self.task.model.train()
        with (
            closing(stream) if isinstance(stream, Generator) else nullcontext()
        ):  # else worker processes would keep reading
            while group := self.pace.time_fetch(lambda: list(islice(stream, size))):
                self.at.batch += len(group)
                if portions := sharding.weigh_shards(group, self.task):
                    loss = self.stepper.step(portions, self.at)
                    self.pace.end_step([portion.whole for portion in portions])
                    self.at.step += 1
                    self.at.losses.append(loss)
                    self._report(epoch, count * self.settings.epochs, loss)
                    self._check_alarm(group[0], count * self.settings.epochs)
                yield
        if self.at.batch and not self.at.losses:
            raise UsageError(f"All {self.at.batch} batches of epoch {epoch} are empty.")

    def _check_alarm(self, batch: Any, steps: int) -> None:
        """Raise AlarmError after a twentieth of the steps if the run is likely to fail; their number must be known."""
        if not self.runtime.alarm or steps < WINDOW[1] or self.at.step != steps // WINDOW[1]:
            return
        monitor = Monitor.early([batch], steps=steps, plan=Plan(embed=False), causes=True)
        with warnings.catch_warnings(action="ignore", category=CollapseWarning):  # the error says it
            record = monitor.step(self.task.model, self.at.step)
        if monitor.should_stop and record is not None and record.diagnosis is not None:
            verdict = record.diagnosis.verdict
            found = {"causes": [cause.name for cause in verdict.causes], "advice": [tip.code for tip in verdict.advice]}
            raise AlarmError({"step": self.at.step, "steps": steps, "met": list(record.met), **found})

    def _report(self, epoch: int, steps: int, loss: float) -> None:
        """Report progress: in steps, or in epochs where the number of steps is unknown."""
        if self.runtime.progress is not None:
            done, total = (self.at.step, steps) if steps else (epoch, self.settings.epochs)
            self.runtime.progress(done, total, {"epoch": epoch, "loss": loss} | self.pace.current() | self.at.newest())

    def _stream(self, epoch: int) -> tuple[Iterable[Any], Iterator[Any]]:
        """Return the batches of an epoch, and an iterator over the remaining ones.

        Building batches may draw random numbers, for an order or an augmentation. When a run resumes within an epoch,
        the skipped batches are therefore built with the random state of the epoch's start, and the rest with that of
        the checkpoint. `Skippable` batches are skipped without building them.
        """
        here = get_random_state()
        if self.at.batch and self.at.epoch_start is not None:
            set_random_state(*self.at.epoch_start)
        else:
            self.at.epoch_start = here
        batches = self.task.batches(epoch)
        own = sharding.shard_batches(batches)
        if self.at.batch and isinstance(own, Skippable):
            stream = iter(own.after(self.at.batch))
            set_random_state(*here)
        else:
            stream = iter(own)
            deque(islice(stream, self.at.batch), maxlen=0)
            if self.at.batch:
                set_random_state(*here)
        return batches, stream

    def _check_signals(self, interrupts: Interrupts) -> None:
        """Between two steps: stop if any rank got a signal, and write a checkpoint when rank zero says it is time."""
        late = distributed.is_rank_zero() and time.monotonic() - self.saved >= self.runtime.save_seconds
        asked, due = map(bool, distributed.sum_over_ranks([interrupts.asked, late]))
        if self.saves and (due or asked):
            self._save()
        if asked:
            epoch, within = self.at.epoch + (self.at.batch > 0), self.at.batch > 0
            raise KeyboardInterrupt(f"{'in' if within else 'after'} epoch {epoch} of {self.settings.epochs}")

    def _save(self) -> None:
        """Write a checkpoint on rank zero; the other ranks wait until it is written."""
        self.at.seconds, self.started = self._seconds(), time.monotonic()
        parts = take_snapshot(self.at, *self.stepper.state)

        def write() -> None:
            assert self.checkpoints is not None
            self.checkpoints.save(self.at.step, *parts)

        distributed.on_rank_zero(write, "Writing a checkpoint")
        self.saved = time.monotonic()

    def _seconds(self) -> float:
        return self.at.seconds + time.monotonic() - self.started

    def _end_epoch(self) -> None:
        at, settings = self.at, self.settings
        at.epoch, at.batch = at.epoch + 1, 0
        metrics: dict[str, float] = {"epoch": at.epoch}
        if at.losses:
            metrics["loss"] = sum(at.losses) / len(at.losses)
        at.losses = []
        if self.task.evaluate and (at.epoch % settings.evaluate_every == 0 or at.epoch == settings.epochs):
            metrics |= {name: float(value) for name, value in self.stepper.evaluate(self.task.evaluate).items()}
            self._select(metrics)
        at.epochs.append(metrics)
        self.trackers.log(at.step, metrics)

    def _prune(self) -> None:
        """Stop the run if `should_prune` says so; asked when there are new metrics and epochs are left."""
        should_prune, at = self.runtime.should_prune, self.at
        due = len(at.epochs[-1]) > 2 and at.epoch < self.settings.epochs and at.ended is None
        if due and distributed.on_rank_zero(lambda: should_prune is not None and should_prune(at.epoch, at.epochs[-1])):
            raise PrunedError(f"stopped after epoch {at.epoch} of {self.settings.epochs}")

    def _select(self, metrics: Mapping[str, float]) -> None:
        at, settings = self.at, self.settings
        if settings.select is None:
            return
        if settings.select not in metrics:
            hint = did_you_mean(settings.select, metrics)
            raise UsageError(f"There is no metric {settings.select!r}.{hint} There are: {', '.join(metrics)}.")
        value = metrics[settings.select]
        before = math.nan if at.best is None else at.best[1]
        first = math.isnan(before) and (at.best is None or not math.isnan(value))
        if first or (value > before if settings.better == "higher" else value < before):
            at.best, at.waited, at.chosen = (at.epoch, value), 0, self.stepper.weights()
        else:
            at.waited += 1
        if settings.patience is not None and at.waited >= settings.patience:
            at.ended = f"no better {settings.select} in {settings.patience} evaluations"

    def _load_selected(self) -> int:
        """Load the selected weights into the model; return their epoch."""
        self.task.model.load_state_dict(self.at.chosen or self.stepper.weights())
        sharding.sync_buffers(self.task.model)
        self.task.model.eval()
        return self.at.epoch if self.at.best is None else self.at.best[0]


def _check_same(task: Task, identity: str) -> None:
    """Raise if the processes cannot share the task, or do not train the same one."""
    if distributed.world_size() > 1 and task.sharding == "none":
        raise UsageError(f"{distributed.world_size()} processes cannot share a batch of this task; start one process.")
    if len(found := set(distributed.gather_objects(identity))) > 1:
        raise UsageError(
            "The processes do not train the same task: their settings, data or initial weights differ "
            f"({', '.join(sorted(found))}). All machines need the same files."
        )


Value = TypeVar("Value")
RECENT = 20  # steps that count for the current speed


class Throughput:
    """Times the steps of a training since it started or resumed.

    Time between a step and the next fetch, such as an evaluation or a checkpoint, does not count.

    Args:
        unit: What `len` of a batch counts, such as "images"; None counts nothing.
        clock: Returns seconds.
    """

    def __init__(self, unit: str | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.unit, self._clock = unit, clock
        self._steps: deque[tuple[float, int]] = deque(
            maxlen=RECENT
        )  # seconds of a step including its waiting, and its size
        self._begun, self._count, self._waited, self._worked = False, 0, 0.0, 0.0
        self._last, self._mark = 0.0, clock()  # duration and end of the last fetch

    def time_fetch(self, fetch: Callable[[], Value]) -> Value:
        """Return what `fetch` returns; its time counts as waiting for data."""
        began = self._clock()
        fetched = fetch()
        self._mark = self._clock()
        self._last = self._mark - began
        self._waited += self._last
        return fetched

    def end_step(self, group: list[Any]) -> None:
        """Record the end of a step with the batches that were fetched last."""
        worked = self._clock() - self._mark
        size = 0 if self.unit is None else sum(len(batch) for batch in group)
        self._worked, self._count = self._worked + worked, self._count + size
        if self._begun:  # the first step is a warm-up
            self._steps.append((self._last + worked, size))
        self._begun = True

    def current(self) -> dict[str, float]:
        """Return the speed of the last steps, for a progress bar."""
        if self.unit is None or not self._steps:
            return {}
        seconds, size = (sum(values) for values in zip(*self._steps, strict=True))
        return {f"{self.unit}/s": size / max(seconds, 1e-9)}

    def summary(self) -> dict[str, float]:
        """Return the overall speed, and the share of the time spent waiting."""
        seconds = self._waited + self._worked
        if self.unit is None or not self._count or not seconds:
            return {}
        return {f"{self.unit}_per_second": self._count / seconds, "waiting": self._waited / seconds}
