"""The trials of `uc.tune`: a copy of the model with a cure in it, trained and judged by the user's own function."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any

from torch import nn

from uncollapse.attachment.attach import attach
from uncollapse.errors import UsageError
from uncollapse.io.loading import fixed_seed
from uncollapse.tuning import space as spaces
from uncollapse.tuning.attach_space import CURE, Arguments
from uncollapse.tuning.study import ALIKE, Study


class Pruned(Exception):  # noqa: N818 - no error: it ends a trial that is behind
    """Raised by `trial.report` when a trial should be stopped. Let it pass."""


class Trial:
    """What a training is told of its trial.

    number: 0 has no cure. settings: what it tries.
    """

    def __init__(self, number: int, settings: Mapping[str, Any], judge: Callable[[int, float], bool]) -> None:
        self.number, self.settings, self.steps = number, dict(settings), 0
        self._judge = judge

    def report(self, step: int, value: float) -> None:
        """Tell the figure after a step, such as an epoch. Raises `Pruned` if the trial is far behind others."""
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step is a whole number from 0 on, such as the epoch, got {step!r}.")
        self.steps = step
        if self._judge(step, float(value)):
            raise Pruned(f"trial {self.number} was stopped after step {step}")


class Loop:
    """A search while it runs. fresh: gives a model of its own for each trial."""

    def __init__(
        self,
        study: Study,
        arguments: Arguments,
        fresh: Callable[[], nn.Module],
        train: Callable[[nn.Module, Trial], float],
        trials: int,
        seed: int,
    ) -> None:
        self.study, self.arguments, self.fresh, self.train = study, arguments, fresh, train
        self.trials, self.seed = trials, seed
        self._lock = Lock()  # of the study, which is one file
        self._open = study.unfinished()

    def run(self, jobs: int) -> None:
        """All trials that are missing; an error of one of them ends it, and the others as they come to their end."""
        if jobs == 1:
            while (trial := self._next()) is not None:
                with fixed_seed(self.seed):
                    self._try(*trial)
            return
        with ThreadPoolExecutor(jobs) as pool:
            running: set[Future[None]] = set()
            while True:
                while len(running) < jobs and (trial := self._next()) is not None:
                    running.add(pool.submit(self._try, *trial))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()

    def _next(self) -> tuple[Any, dict[str, Any]] | None:
        """A trial of Optuna and what it tries; None if there are enough, or if nothing new is left to try."""
        with self._lock:
            for _ in range(ALIKE):
                trial = self._open.pop(0) if self._open else self._asked()
                if trial is None:
                    return None
                known = {CURE: self.arguments.cures[0]}
                chosen = {} if trial.number == 0 else self.study.suggest(trial, self.arguments.space, known)
                if not self.study.repeats(trial, key := repr(sorted(chosen.items()))):
                    self.study.set(trial, chosen, key)
                    return trial, chosen
            return None

    def _asked(self) -> Any | None:
        tried = self.study.tried
        if sum(not each.idle for each in tried) >= self.trials:
            return None
        default = spaces.kept(self.arguments.space, self.arguments.default())
        return self.study.ask(default if len(tried) == 1 else None)

    def _try(self, trial: Any, chosen: dict[str, Any]) -> None:
        began = time.monotonic()
        model = self.fresh()
        if trial.number:
            attach(model, **self.arguments.of(chosen))
        told = Trial(trial.number, chosen, lambda step, value: self._judge(trial, step, value))
        try:
            value = self.train(model, told)
        except Pruned:
            with self._lock:
                self.study.pruned(trial, steps=told.steps, seconds=time.monotonic() - began)
            return
        except Exception as error:
            error.add_note(f"This was trial {trial.number} of uc.tune: {chosen or 'without a cure'}.")
            raise
        with self._lock:
            figure = _number(value, trial.number)
            self.study.done(trial, figure, steps=told.steps, seconds=time.monotonic() - began)

    def _judge(self, trial: Any, step: int, value: float) -> bool:
        with self._lock:
            return self.study.is_hopeless(trial, step, value)


def _number(value: Any, number: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"train_fn returns its figure, a number; in trial {number} it gave {value!r}.") from error
