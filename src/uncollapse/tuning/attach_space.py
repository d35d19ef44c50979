"""What varies in the arguments of `attach`: from what `uc.tune` is given to a space, and from a trial to a call."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from uncollapse.attachment.attach import attach
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.registry import CURES
from uncollapse.tuning import space as spaces
from uncollapse.tuning.space import Between, Dimension, OneOf
from uncollapse.tuning.trial_result import attach_line

CURE = "cure"
DEFAULT_SCALE = 0.1


@dataclass(frozen=True)
class Arguments:
    """What varies in the arguments of `attach`. options: those that do not."""

    space: tuple[Dimension, ...]
    cures: tuple[str, ...]
    options: Mapping[str, Any]

    def default(self) -> dict[str, Any]:
        """What one would take: the first cure, a usual scale, the first of each choice."""
        known: dict[str, Any] = {CURE: self.cures[0]}
        for dimension in self.space:
            if dimension in spaces.counting(self.space, known) and dimension.field not in known:
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
            usual = {each.field: known.get(each.field, _usual(each)) for each in spaces.counting(self.space, known)}
            self._try(model, usual)
            for dimension in spaces.counting(self.space, known):
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


def space_of(cures: tuple[str, ...], scale: Any, temperature: Any, at: Any, layers: Any) -> tuple[Dimension, ...]:
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
    if dimension.field == "scale" and dimension.holds(DEFAULT_SCALE):
        return DEFAULT_SCALE
    middle = (dimension.low * dimension.high) ** 0.5 if dimension.log else (dimension.low + dimension.high) / 2
    return float(f"{middle:.{spaces.DIGITS}g}")
