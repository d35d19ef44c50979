"""One training loop for all recipes, on Accelerate: devices, precision, checkpoints, resume, progress, trackers.

A run that was killed and goes on from a checkpoint ends with the same figures, to the bit on one CPU thread: batches
depend on the seed and the epoch only, and a checkpoint holds everything else, the random state too.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.inputs import NotFiniteError
from uncollapse.lab.checkpoints import Checkpoints
from uncollapse.lab.interrupts import Interrupts
from uncollapse.lab.pace import Pace
from uncollapse.lab.seeding import aside, random_state, seeded, set_random_state
from uncollapse.lab.sessions import Session
from uncollapse.lab.snapshots import Progressed, restore, snapshot
from uncollapse.lab.tasks import History, Settings, Skippable, Task
from uncollapse.lab.trackers import open_trackers
from uncollapse.loading.errors import UsageError, library


def fit(
    task: Task,
    settings: Settings,
    session: Session | None = None,
    identity: str = "",
    facts: Mapping[str, Any] | None = None,
) -> History:
    """Train `task.model`, which then has the weights that were chosen and is in evaluation mode.

    `identity` names the experiment: a checkpoint of another one is refused. `facts` are told to the trackers. Ctrl-C
    and SIGTERM write a checkpoint and raise KeyboardInterrupt.
    """
    session = session or Session()
    with seeded(settings.seed), Interrupts(session.doing) as interrupts:
        loop = _Loop(task, settings, session, identity, facts or {})
        try:
            return loop.run(interrupts)
        finally:
            loop.close()


class _Loop:
    """A run while it runs."""

    def __init__(
        self, task: Task, settings: Settings, session: Session, identity: str, facts: Mapping[str, Any]
    ) -> None:
        self.task, self.settings, self.session = task, settings, session
        self.accelerator = _accelerator(session.device, settings.precision)
        self.own_forward = "forward" in vars(task.model)  # Accelerate puts a wrapper there for half precision
        self.model, self.optimiser = self.accelerator.prepare(task.model, task.optimiser)
        self.rates = [group["lr"] for group in self.optimiser.param_groups]
        self.average = _average(task.model, settings.ema)
        self.at, self.pace = Progressed(), Pace(task.unit)
        folder = session.checkpoints
        self.checkpoints = None if folder is None else Checkpoints(folder, identity)
        if settings.select is not None and task.evaluate is None:
            raise UsageError(f"select={settings.select!r} needs a task that evaluates.")
        if self.checkpoints is not None and not session.resume:
            self.checkpoints.clear()  # else those of later steps would count when it is resumed next
        elif self.checkpoints is not None:
            restore(self.checkpoints.load(), self.at, task.model, self.optimiser, self.average, self.accelerator.scaler)
        tracked = session.tracked or folder
        name = identity if tracked is None else tracked.name
        self.trackers = open_trackers(session.trackers, tracked, name, facts, step=self.at.step)
        self.started = self.saved = time.monotonic()

    def run(self, interrupts: Interrupts) -> History:
        while self.at.epoch < self.settings.epochs and self.at.ended is None:
            with closing(self._steps()) as steps:
                for _ in steps:
                    self._look_up(interrupts)
            self._end_epoch()
            self._look_up(interrupts)
        if self.checkpoints is not None:  # what is judged after the training may take long, and may be interrupted
            self._save()
        ended = self.at.ended or "the last epoch"
        kept = self._keep()
        return History(self.at.epochs, kept, ended, self._seconds(), self.pace.figures())

    def close(self) -> None:
        self.trackers.close()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if not self.own_forward:
            vars(self.task.model).pop("forward", None)  # bound to this very model, also in copies of it
        self.accelerator.free_memory()

    def _steps(self) -> Generator[None, None, None]:
        """The steps of the epoch that are left."""
        epoch, size = self.at.epoch + 1, self.settings.accumulate
        batches, stream = self._stream(epoch)
        count = math.ceil(len(batches) / size) if isinstance(batches, Sized) else 0
        self.task.model.train()
        with closing(stream) if isinstance(stream, Generator) else nullcontext():  # else processes would go on reading
            while group := self.pace.waited(lambda: list(islice(stream, size))):
                self.at.batch += len(group)
                if full := [batch for batch in group if not _is_empty(batch)]:
                    loss = self._step(full)
                    self.pace.did(full)
                    self.at.step += 1
                    self.at.losses.append(loss)
                    self._tell(epoch, count * self.settings.epochs, loss)
                yield
        if self.at.batch and not self.at.losses:
            raise UsageError(f"None of the {self.at.batch} batches of epoch {epoch} has anything in it to learn from.")

    def _tell(self, epoch: int, steps: int, loss: float) -> None:
        """How far it is: in steps, or in epochs where it is not known how many steps there are."""
        if self.session.progress is not None:
            done, total = (self.at.step, steps) if steps else (epoch, self.settings.epochs)
            self.session.progress(done, total, {"epoch": epoch, "loss": loss} | self.pace.now() | self.at.newest())

    def _stream(self, epoch: int) -> tuple[Iterable[Any], Iterator[Any]]:
        """The batches of an epoch, and those of them that are left.

        Making batches may draw random numbers, for an order or an augmentation. So when a run goes on within an epoch,
        the batches that are skipped are made with the random state of the epoch's start, and it then goes on with that
        of the checkpoint. Batches that know how to begin later are not made to be skipped.
        """
        here = random_state()
        if self.at.batch and self.at.epoch_start is not None:
            set_random_state(*self.at.epoch_start)
        else:
            self.at.epoch_start = here
        batches = self.task.batches(epoch)
        if self.at.batch and isinstance(batches, Skippable):
            stream = iter(batches.after(self.at.batch))
            set_random_state(*here)
        else:
            stream = iter(batches)
            deque(islice(stream, self.at.batch), maxlen=0)
            if self.at.batch:
                set_random_state(*here)
        return batches, stream

    def _step(self, group: list[Any]) -> float:
        """One step of the optimiser on the mean loss of a few batches."""
        utils: Any = library("accelerate.utils", "train")
        for parameters, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            parameters["lr"] = rate if self.task.schedule is None else rate * self.task.schedule(self.at.step)
        self.optimiser.zero_grad()
        losses = []
        for batch in group:
            with self.accelerator.autocast():
                loss = self.task.loss(self.model, utils.send_to_device(batch, self.accelerator.device))
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise NotFiniteError(
                    f"The loss became {losses[-1]} in epoch {self.at.epoch + 1}, step {self.at.step + 1}. "
                    "Try a smaller learning rate, a smaller scale, or clipping of the gradient."
                )
            self.accelerator.backward(loss / len(group))
        if self.settings.clip is not None:
            self.accelerator.clip_grad_norm_(self.task.model.parameters(), self.settings.clip)
        self.optimiser.step()
        if self.average is not None:
            self.average.update_parameters(self.task.model)
        return sum(losses) / len(losses)

    def _look_up(self, interrupts: Interrupts) -> None:
        """Between two steps: stop if asked to, and write a checkpoint when it is time."""
        due = time.monotonic() - self.saved >= self.session.save_seconds
        if self.checkpoints is not None and (due or interrupts.asked):
            self._save()
        if interrupts.asked:
            epoch, within = self.at.epoch + (self.at.batch > 0), self.at.batch > 0
            raise KeyboardInterrupt(f"{'in' if within else 'after'} epoch {epoch} of {self.settings.epochs}")

    def _save(self) -> None:
        assert self.checkpoints is not None
        self.at.seconds, self.started = self._seconds(), time.monotonic()
        parts = snapshot(self.at, self.task.model, self.optimiser, self.average, self.accelerator.scaler)
        self.checkpoints.save(self.at.step, *parts)
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
            figures |= {name: float(value) for name, value in self._evaluate(self.task.evaluate).items()}
            self._choose(figures)
        at.epochs.append(figures)
        self.trackers.log(at.step, figures)

    def _evaluate(self, evaluate: Callable[[nn.Module], Mapping[str, float]]) -> Mapping[str, float]:
        """Figures of the weights that would be kept now; no random number of the training is used up."""
        model = self.task.model if self.average is None else self.average.module
        model.eval()
        with torch.no_grad(), aside(), self.accelerator.autocast():
            return evaluate(model)

    def _choose(self, figures: Mapping[str, float]) -> None:
        at, settings = self.at, self.settings
        if settings.select is None:
            return
        if settings.select not in figures:
            raise UsageError(f"No figure is named {settings.select!r}; there are: {', '.join(figures)}.")
        value = figures[settings.select]
        before = math.nan if at.best is None else at.best[1]
        first = math.isnan(before) and (at.best is None or not math.isnan(value))
        if first or (value > before if settings.better == "higher" else value < before):
            at.best, at.waited, at.chosen = (at.epoch, value), 0, self._weights()
        else:
            at.waited += 1
        if settings.patience is not None and at.waited >= settings.patience:
            at.ended = f"no better {settings.select} in {settings.patience} evaluations"

    def _weights(self) -> dict[str, Tensor]:
        """A copy of the weights that would be kept now."""
        model = self.task.model if self.average is None else self.average.module
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def _keep(self) -> int:
        """Give the model the weights that were chosen; the answer is their epoch."""
        self.task.model.load_state_dict(self.at.chosen or self._weights())
        self.task.model.eval()
        return self.at.epoch if self.at.best is None else self.at.best[0]


def _is_empty(batch: Any) -> bool:
    """Whether nothing is in a batch, such as one of pictures that cannot be read."""
    return isinstance(batch, Sized) and not isinstance(batch, Tensor) and not len(batch)


def _accelerator(device: str | None, precision: str) -> Any:
    state: Any = library("accelerate.state", "train").AcceleratorState
    state._reset_state(reset_partial_state=True)  # else the precision of an earlier run in this process stays
    made: Any = library("accelerate", "train").Accelerator(mixed_precision=precision, cpu=device == "cpu")
    if device is not None and ":" in device:
        raise UsageError(
            f"Name the kind of device alone, without its number, got {device!r}; CUDA_VISIBLE_DEVICES chooses."
        )
    if device is not None and made.device.type != device:
        raise UsageError(f"The device {device!r} is not here; Accelerate found {made.device.type!r}.")
    if made.num_processes > 1:
        raise UsageError(f"A run is one process, got {made.num_processes}; start it without a launcher.")
    return made


def _average(model: nn.Module, decay: float | None) -> Any:
    """The model of averaged weights."""
    if decay is None:
        return None
    tools: Any = torch.optim.swa_utils
    return tools.AveragedModel(model, multi_avg_fn=tools.get_ema_multi_avg_fn(decay), use_buffers=True)
