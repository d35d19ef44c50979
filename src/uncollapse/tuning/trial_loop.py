"""The trial loop of `uc.tune`: attach a cure to a copy of the model, then let the user's function train it."""

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


class Pruned(Exception):  # noqa: N818 - not an error: it ends a trial early
    """Raised by `trial.report` when a trial should be stopped. Do not catch it."""


class Trial:
    """The trial that `train_fn` runs.

    number: 0 has no cure. settings: arguments of `attach` that this trial tries.
    """

    def __init__(self, number: int, settings: Mapping[str, Any], should_prune: Callable[[int, float], bool]) -> None:
        self.number, self.settings, self.steps = number, dict(settings), 0
        self._should_prune = should_prune

    def report(self, step: int, value: float) -> None:
        """Report the metric after a step, such as an epoch. Raises `Pruned` if the trial is far worse than others."""
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a non-negative integer, such as the epoch, got {step!r}.")
        self.steps = step
        if self._should_prune(step, float(value)):
            raise Pruned(f"trial {self.number} was stopped after step {step}")


@dataclass(frozen=True)
class AttachSpace:
    """The arguments of `attach` that vary. options: those that do not."""

    space: tuple[Dimension, ...]
    cures: tuple[str, ...]
    options: Mapping[str, Any]

    def default(self) -> dict[str, Any]:
        """Return default settings: the first cure, the default scale, the first of each choice."""
        known: dict[str, Any] = {CURE: self.cures[0]}
        for dimension in self.space:
            if dimension in spaces.active_dimensions(self.space, known) and dimension.field not in known:
                known[dimension.field] = _default_value(dimension)
        return known

    def arguments(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of `attach` for a trial, besides the model."""
        values = {CURE: self.cures[0], **settings}
        return {**{name: value for name, value in values.items() if value is not None}, **self.options}

    def line(self, settings: Mapping[str, Any]) -> str:
        """Return the call of `attach` for a trial as a line of code."""
        given = self.arguments(settings)
        return attach_line(given.pop(CURE), given)

    def check(self, model: nn.Module) -> None:
        """Raise now if a cure cannot be attached with some of the settings."""
        for cure in self.cures:
            known = {**self.default(), CURE: cure}
            default = {
                each.field: known.get(each.field, _default_value(each))
                for each in spaces.active_dimensions(self.space, known)
            }
            self._try(model, default)
            for dimension in spaces.active_dimensions(self.space, known):
                ends = dimension.values if isinstance(dimension, OneOf) else (dimension.low, dimension.high)
                for value in ends if dimension.field != CURE else ():
                    self._try(model, {**default, dimension.field: value})

    def _try(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attach(model, **self.arguments(settings)).remove()
        except (ValueError, KeyError, TypeError) as error:
            message = error.args[0] if error.args else error
            raise UsageError(f"A trial would call {self.line(settings)}, which fails: {message}") from error

    def facts(self, model: nn.Module) -> dict[str, Any]:
        """Return what is searched, as JSON values."""
        size = sum(parameter.numel() for parameter in model.parameters())
        return {
            "model": f"{type(model).__name__} with {size} parameters",
            "cures": list(self.cures),
            "space": spaces.facts(self.space),
            "options": {name: repr(value) for name, value in self.options.items()},
        }


class TrialLoop:
    """A running search. fresh: returns a new copy of the model for each trial."""

    def __init__(
        self,
        study: Study,
        space: AttachSpace,
        fresh: Callable[[], nn.Module],
        train: Callable[[nn.Module, Trial], float],
        trials: int,
        seed: int,
    ) -> None:
        self.study, self.space, self.fresh, self.train = study, space, fresh, train
        self.trials, self.seed = trials, seed
        self._lock = Lock()  # guards the study
        self._unfinished = study.unfinished_trials()

    def run(self, jobs: int) -> None:
        """Run all missing trials. After an error in one of them, those that are running finish and no more start."""
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
        """Return an Optuna trial and its settings; None if there are enough trials or the space is exhausted."""
        with self._lock:
            for _ in range(MAX_REPEATS):
                trial = self._unfinished.pop(0) if self._unfinished else self._ask()
                if trial is None:
                    return None
                known = {CURE: self.space.cures[0]}
                settings = {} if trial.number == 0 else self.study.suggest(trial, self.space.space, known)
                if not self.study.finish_if_repeat(trial, key := repr(sorted(settings.items()))):
                    self.study.save_settings(trial, settings, key)
                    return trial, settings
            return None

    def _ask(self) -> Any | None:
        trials = self.study.trials
        if sum(not trial.idle for trial in trials) >= self.trials:
            return None
        default = spaces.study_params(self.space.space, self.space.default())
        return self.study.ask(default if len(trials) == 1 else None)

    def _try(self, trial: Any, settings: dict[str, Any]) -> None:
        began = time.monotonic()
        model = self.fresh()
        if trial.number:
            attach(model, **self.space.arguments(settings))
        handle = Trial(trial.number, settings, lambda step, value: self._should_prune(trial, step, value))
        try:
            value = self.train(model, handle)
        except Pruned:
            with self._lock:
                self.study.prune(trial, steps=handle.steps, seconds=time.monotonic() - began)
            return
        except Exception as error:
            error.add_note(f"This was trial {trial.number} of uc.tune: {settings or 'without a cure'}.")
            raise
        with self._lock:
            metric = _to_float(value, trial.number)
            self.study.finish(trial, metric, steps=handle.steps, seconds=time.monotonic() - began)

    def _should_prune(self, trial: Any, step: int, value: float) -> bool:
        with self._lock:
            return self.study.should_prune(trial, step, value)


def _to_float(value: Any, number: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"train_fn must return its metric as a number; in trial {number} it returned {value!r}."
        ) from error


def attach_dimensions(
    cures: tuple[str, ...], scale: Any, temperature: Any, at: Any, layers: Any
) -> tuple[Dimension, ...]:
    """Return the dimensions of all arguments. An argument that does not vary is a choice of one."""
    if not cures:
        raise UsageError(f"cures is empty. Choose from: {', '.join(CURES)}.")
    for name in cures:
        if name not in CURES:
            hint = did_you_mean(name, CURES)
            raise UsageError(f"No cure is named {name!r}.{hint} There are: {', '.join(CURES)}.")
    dimensions: list[Dimension] = [OneOf(CURE, cures)]
    for name, given in (("scale", scale), ("temperature", temperature)):
        takers = tuple(cure for cure in cures if name in inspect.signature(CURES[cure].layer).parameters)
        if given is not None and takers:
            dimensions.append(_number_dimension(name, given, {} if takers == cures else {CURE: takers}))
    for name, given in (("at", at), ("layers", layers)):
        if given is not None:
            dimensions.append(OneOf(name, _choices(given)))
    return tuple(dimensions)


def _number_dimension(name: str, given: Any, when: Mapping[str, tuple[Any, ...]]) -> Dimension:
    if isinstance(given, int | float):
        return OneOf(name, (float(given),), when)
    numbers = tuple(given)
    if not numbers or not all(isinstance(number, int | float) for number in numbers):
        raise UsageError(f"{name} must be a number, a pair of numbers or a list of numbers, got {given!r}.")
    if isinstance(given, tuple) and len(numbers) == 2:
        low, high = map(float, numbers)
        return Between(name, low, high, log=low > 0, when=when)
    return OneOf(name, tuple(map(float, numbers)), when)


def _choices(given: Any) -> tuple[Any, ...]:
    """Return the choices of places or blocks. A list of block numbers is one choice."""
    several = isinstance(given, list | tuple) and not all(isinstance(one, int) for one in given)
    return tuple(given) if several else (given,)


def _default_value(dimension: Dimension) -> Any:
    if isinstance(dimension, OneOf):
        return dimension.values[0]
    if dimension.field == "scale" and dimension.contains(DEFAULT_SCALE):
        return DEFAULT_SCALE
    middle = (dimension.low * dimension.high) ** 0.5 if dimension.log else (dimension.low + dimension.high) / 2
    return float(f"{middle:.{spaces.DIGITS}g}")
