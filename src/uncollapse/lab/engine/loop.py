"""One training loop for all recipes, on Accelerate: devices, precision, checkpoints, resume, progress, trackers.

A run that was killed and goes on from a checkpoint ends with the same figures, to the bit on one CPU thread: batches
depend on the seed and the epoch only, and a checkpoint holds everything else, the random state too.

Several processes, started by a launcher, share each batch and average their gradients. They always do the same step:
what one of them alone knows, such as a signal or the clock, is told to all before anything follows from it.
"""

import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

from uncollapse import distributed
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.engine import sharding
from uncollapse.lab.engine.checkpoints import Checkpoint, Checkpoints
from uncollapse.lab.engine.runtime import Interrupts, PrunedError, Runtime
from uncollapse.lab.engine.seeding import get_random_state, set_random_state, use_seed
from uncollapse.lab.engine.snapshot import TrainingState, restore, take_snapshot
from uncollapse.lab.engine.step import Stepper
from uncollapse.lab.engine.task import History, Skippable, Task, TrainingOptions
from uncollapse.lab.engine.throughput import Throughput
from uncollapse.lab.engine.trackers import open_trackers


def fit(
    task: Task,
    settings: TrainingOptions,
    runtime: Runtime | None = None,
    identity: str = "",
    facts: Mapping[str, Any] | None = None,
) -> History:
    """Train `task.model`, which then has the weights that were chosen and is in evaluation mode.

    `identity` names the experiment: a checkpoint of another one is refused. `facts` are told to the trackers. Ctrl-C
    and SIGTERM write a checkpoint and raise KeyboardInterrupt. Several processes must all call it, with the same task;
    the first one writes. If one of them fails, it raises its error and the others an PeerError.
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
    """A run while it runs."""

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
        saved = distributed.on_rank_zero(self._begun, "Reading the checkpoint")
        restore(saved, self.at, *self.stepper.state)
        tracked = runtime.tracker_folder or folder
        name = identity if tracked is None else tracked.name
        self.trackers = open_trackers(runtime.trackers, tracked, name, facts, step=self.at.unlogged)
        self.started = self.saved = time.monotonic()

    def _begun(self) -> Checkpoint | None:
        """What it goes on from."""
        if self.checkpoints is None:
            return None
        if not self.runtime.resume:
            self.checkpoints.clear()  # else those of later steps would count when it is resumed next
            return None
        return self.checkpoints.load()

    def run(self, interrupts: Interrupts) -> History:
        while self.at.epoch < self.settings.epochs and self.at.ended is None:
            with closing(self._steps()) as steps:
                for _ in steps:
                    self._look_up(interrupts)
            self._end_epoch()
            self._look_up(interrupts)
            self._be_judged()
        if self.saves:  # what is judged after the training may take long, and may be interrupted
            self._save()
        ended = self.at.ended or "the last epoch"
        kept = self._keep()
        return History(self.at.epochs, kept, ended, self._seconds(), self.pace.figures())

    def close(self) -> None:
        self.trackers.close()
        self.stepper.close()

    def _steps(self) -> Generator[None, None, None]:
        """The steps of the epoch that are left."""
        epoch, size = self.at.epoch + 1, self.settings.accumulate
        batches, stream = self._stream(epoch)
        count = math.ceil(len(batches) / size) if isinstance(batches, Sized) else 0
        self.task.model.train()
        with closing(stream) if isinstance(stream, Generator) else nullcontext():  # else processes would go on reading
            while group := self.pace.waited(lambda: list(islice(stream, size))):
                self.at.batch += len(group)
                if portions := sharding.weigh_shards(group, self.task):
                    loss = self.stepper.step(portions, self.at)
                    self.pace.did([portion.whole for portion in portions])
                    self.at.step += 1
                    self.at.losses.append(loss)
                    self._tell(epoch, count * self.settings.epochs, loss)
                yield
        if self.at.batch and not self.at.losses:
            raise UsageError(f"None of the {self.at.batch} batches of epoch {epoch} has anything in it to learn from.")

    def _tell(self, epoch: int, steps: int, loss: float) -> None:
        """How far it is: in steps, or in epochs where it is not known how many steps there are."""
        if self.runtime.progress is not None:
            done, total = (self.at.step, steps) if steps else (epoch, self.settings.epochs)
            self.runtime.progress(done, total, {"epoch": epoch, "loss": loss} | self.pace.now() | self.at.newest())

    def _stream(self, epoch: int) -> tuple[Iterable[Any], Iterator[Any]]:
        """The batches of an epoch, and those of them that are left.

        Making batches may draw random numbers, for an order or an augmentation. So when a run goes on within an epoch,
        the batches that are skipped are made with the random state of the epoch's start, and it then goes on with that
        of the checkpoint. Batches that know how to begin later are not made to be skipped.
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

    def _look_up(self, interrupts: Interrupts) -> None:
        """Between two steps: stop if a process was asked to, and write a checkpoint when the first says it is time."""
        late = distributed.is_rank_zero() and time.monotonic() - self.saved >= self.runtime.save_seconds
        asked, due = map(bool, distributed.sum_over_ranks([interrupts.asked, late]))
        if self.saves and (due or asked):
            self._save()
        if asked:
            epoch, within = self.at.epoch + (self.at.batch > 0), self.at.batch > 0
            raise KeyboardInterrupt(f"{'in' if within else 'after'} epoch {epoch} of {self.settings.epochs}")

    def _save(self) -> None:
        """Write a checkpoint; the others wait for the first process, so that none leaves while it writes."""
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
        figures: dict[str, float] = {"epoch": at.epoch}
        if at.losses:
            figures["loss"] = sum(at.losses) / len(at.losses)
        at.losses = []
        if self.task.evaluate and (at.epoch % settings.evaluate_every == 0 or at.epoch == settings.epochs):
            figures |= {name: float(value) for name, value in self.stepper.figures(self.task.evaluate).items()}
            self._choose(figures)
        at.epochs.append(figures)
        self.trackers.log(at.step, figures)

    def _be_judged(self) -> None:
        """Ask whether it is worth going on, when there are new figures and something is left to do."""
        judge, at = self.runtime.should_prune, self.at
        due = len(at.epochs[-1]) > 2 and at.epoch < self.settings.epochs and at.ended is None
        if due and distributed.on_rank_zero(lambda: judge is not None and judge(at.epoch, at.epochs[-1])):
            raise PrunedError(f"stopped after epoch {at.epoch} of {self.settings.epochs}")

    def _choose(self, figures: Mapping[str, float]) -> None:
        at, settings = self.at, self.settings
        if settings.select is None:
            return
        if settings.select not in figures:
            hint = did_you_mean(settings.select, figures)
            raise UsageError(f"No figure is named {settings.select!r}.{hint} There are: {', '.join(figures)}.")
        value = figures[settings.select]
        before = math.nan if at.best is None else at.best[1]
        first = math.isnan(before) and (at.best is None or not math.isnan(value))
        if first or (value > before if settings.better == "higher" else value < before):
            at.best, at.waited, at.chosen = (at.epoch, value), 0, self.stepper.weights()
        else:
            at.waited += 1
        if settings.patience is not None and at.waited >= settings.patience:
            at.ended = f"no better {settings.select} in {settings.patience} evaluations"

    def _keep(self) -> int:
        """Give the model the weights that were chosen; the answer is their epoch."""
        self.task.model.load_state_dict(self.at.chosen or self.stepper.weights())
        sharding.sync_buffers(self.task.model)
        self.task.model.eval()
        return self.at.epoch if self.at.best is None else self.at.best[0]


def _check_same(task: Task, identity: str) -> None:
    """Raise if several processes cannot share a task, or do not train the same one."""
    if distributed.world_size() > 1 and task.sharding == "none":
        raise UsageError(f"{distributed.world_size()} processes cannot share a batch of this task; start one process.")
    if len(found := set(distributed.gather_objects(identity))) > 1:
        raise UsageError(
            "The processes do not train the same: their settings, data or weights at the start differ "
            f"({', '.join(sorted(found))}). All machines need the same files."
        )
