"""The trials of `uc.tune`: a copy of the model with a cure in it, trained and judged by the user's own function."""

import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import Any

from torch import nn

from uncollapse.attachment.attach import attach
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io.loading import fixed_seed
from uncollapse.registry import CURES
from uncollapse.tuning import space as spaces
from uncollapse.tuning.space import Between, Dimension, OneOf
from uncollapse.tuning.study import MAX_REPEATS, Study
from uncollapse.tuning.trial_result import attach_line

CURE = "cure"
DEFAULT_SCALE = 0.1


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


@dataclass(frozen=True)
class AttachSpace:
    """What varies in the arguments of `attach`. options: those that do not."""

    space: tuple[Dimension, ...]
    cures: tuple[str, ...]
    options: Mapping[str, Any]

    def default(self) -> dict[str, Any]:
        """What one would take: the first cure, a usual scale, the first of each choice."""
        known: dict[str, Any] = {CURE: self.cures[0]}
        for dimension in self.space:
            if dimension in spaces.active_dimensions(self.space, known) and dimension.field not in known:
                known[dimension.field] = _usual(dimension)
        return known

    def of(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """All of a trial, beside the model."""
        values = {CURE: self.cures[0], **chosen}
        return {**{name: value for name, value in values.items() if value is not None}, **self.options}

    def line(self, chosen: Mapping[str, Any]) -> str:
        """The call of a trial, as a line of code."""
        given = self.of(chosen)
        return attach_line(given.pop(CURE), given)

    def check(self, model: nn.Module) -> None:
        """Raise now if a cure cannot be attached as it would be in some trial."""
        for cure in self.cures:
            known = {**self.default(), CURE: cure}
            usual = {
                each.field: known.get(each.field, _usual(each)) for each in spaces.active_dimensions(self.space, known)
            }
            self._try(model, usual)
            for dimension in spaces.active_dimensions(self.space, known):
                ends = dimension.values if isinstance(dimension, OneOf) else (dimension.low, dimension.high)
                for value in ends if dimension.field != CURE else ():
                    self._try(model, {**usual, dimension.field: value})

    def _try(self, model: nn.Module, chosen: Mapping[str, Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attach(model, **self.of(chosen)).remove()
        except (ValueError, KeyError, TypeError) as error:
            told = error.args[0] if error.args else error
            raise UsageError(f"A trial would do {self.line(chosen)}, which fails: {told}") from error

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """What is searched, as JSON has it."""
        size = sum(parameter.numel() for parameter in model.parameters())
        return {
            "model": f"{type(model).__name__} with {size} parameters",
            "cures": list(self.cures),
            "space": spaces.facts(self.space),
            "options": {name: repr(value) for name, value in self.options.items()},
        }


class TrialLoop:
    """A search while it runs. fresh: gives a model of its own for each trial."""

    def __init__(
        self,
        study: Study,
        arguments: AttachSpace,
        fresh: Callable[[], nn.Module],
        train: Callable[[nn.Module, Trial], float],
        trials: int,
        seed: int,
    ) -> None:
        self.study, self.arguments, self.fresh, self.train = study, arguments, fresh, train
        self.trials, self.seed = trials, seed
        self._lock = Lock()  # of the study, which is one file
        self._open = study.unfinished_trials()

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
            for _ in range(MAX_REPEATS):
                trial = self._open.pop(0) if self._open else self._asked()
                if trial is None:
                    return None
                known = {CURE: self.arguments.cures[0]}
                chosen = {} if trial.number == 0 else self.study.suggest(trial, self.arguments.space, known)
                if not self.study.finish_if_repeat(trial, key := repr(sorted(chosen.items()))):
                    self.study.save_settings(trial, chosen, key)
                    return trial, chosen
            return None

    def _asked(self) -> Any | None:
        tried = self.study.trials
        if sum(not each.idle for each in tried) >= self.trials:
            return None
        default = spaces.study_params(self.arguments.space, self.arguments.default())
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
                self.study.prune(trial, steps=told.steps, seconds=time.monotonic() - began)
            return
        except Exception as error:
            error.add_note(f"This was trial {trial.number} of uc.tune: {chosen or 'without a cure'}.")
            raise
        with self._lock:
            figure = _number(value, trial.number)
            self.study.finish(trial, figure, steps=told.steps, seconds=time.monotonic() - began)

    def _judge(self, trial: Any, step: int, value: float) -> bool:
        with self._lock:
            return self.study.should_prune(trial, step, value)


def _number(value: Any, number: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"train_fn returns its figure, a number; in trial {number} it gave {value!r}.") from error


def attach_dimensions(
    cures: tuple[str, ...], scale: Any, temperature: Any, at: Any, layers: Any
) -> tuple[Dimension, ...]:
    """The dimensions of all arguments. What does not vary is a choice of one."""
    if not cures:
        raise UsageError(f"cures names none; there are: {', '.join(CURES)}.")
    for name in cures:
        if name not in CURES:
            hint = did_you_mean(name, CURES)
            raise UsageError(f"No cure is named {name!r}.{hint} There are: {', '.join(CURES)}.")
    found: list[Dimension] = [OneOf(CURE, cures)]
    for name, given in (("scale", scale), ("temperature", temperature)):
        takers = tuple(cure for cure in cures if name in inspect.signature(CURES[cure].layer).parameters)
        if given is not None and takers:
            found.append(_numbers(name, given, {} if takers == cures else {CURE: takers}))
    for name, given in (("at", at), ("layers", layers)):
        if given is not None:
            found.append(OneOf(name, _choices(given)))
    return tuple(found)


def _numbers(name: str, given: Any, when: Mapping[str, tuple[Any, ...]]) -> Dimension:
    if isinstance(given, int | float):
        return OneOf(name, (float(given),), when)
    numbers = tuple(given)
    if not numbers or not all(isinstance(number, int | float) for number in numbers):
        raise UsageError(f"{name} is a pair of numbers, a list of them, or one, got {given!r}.")
    if isinstance(given, tuple) and len(numbers) == 2:
        low, high = map(float, numbers)
        return Between(name, low, high, log=low > 0, when=when)
    return OneOf(name, tuple(map(float, numbers)), when)


def _choices(given: Any) -> tuple[Any, ...]:
    """Several choices of places or blocks; a list of block numbers is one choice."""
    several = isinstance(given, list | tuple) and not all(isinstance(one, int) for one in given)
    return tuple(given) if several else (given,)


def _usual(dimension: Dimension) -> Any:
    if isinstance(dimension, OneOf):
        return dimension.values[0]
    if dimension.field == "scale" and dimension.contains(DEFAULT_SCALE):
        return DEFAULT_SCALE
    middle = (dimension.low * dimension.high) ** 0.5 if dimension.log else (dimension.low + dimension.high) / 2
    return float(f"{middle:.{spaces.DIGITS}g}")
