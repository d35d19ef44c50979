"""What a search may vary: numbers between two ends, and choices, some of them only beside others."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uncollapse.errors import UsageError

DIGITS = 3  # of a number that is tried: so that it can be copied, and is the one that was tried
When = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Between:
    """A number between two ends. log: equal factors count alike. when: values that other fields must have."""

    field: str
    low: float
    high: float
    log: bool = True
    when: When = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise UsageError(f"{self.field} needs two ends, the lower one first, got {self.low} and {self.high}.")
        if self.log and self.low <= 0:
            raise UsageError(f"{self.field} is searched by factors, from above 0 on, got {self.low}.")

    @property
    def name(self) -> str:
        """What the study calls it."""
        return _named(self.field, self.when)

    def suggest(self, trial: Any) -> float:
        """A value for a trial of Optuna."""
        return float(f"{trial.suggest_float(self.name, self.low, self.high, log=self.log):.{DIGITS}g}")

    def contains(self, value: Any) -> bool:
        """Whether a value is one that it could suggest."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def study_value(self, value: Any) -> Any:
        """A value as the study keeps it."""
        return float(value)

    def describe(self) -> str:
        """In words, for people."""
        return f"{self.name}: {self.low:g} to {self.high:g}{', by factors' if self.log else ''}"


@dataclass(frozen=True)
class OneOf:
    """One of a few values. when: values that other fields must have."""

    field: str
    values: tuple[Any, ...]
    when: When = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.values or len(set(map(_label, self.values))) < len(self.values):
            raise UsageError(f"{self.field} needs values that differ to choose from, got {list(self.values)!r}.")

    @property
    def name(self) -> str:
        """What the study calls it."""
        return _named(self.field, self.when)

    def suggest(self, trial: Any) -> Any:
        """A value for a trial of Optuna."""
        known = {_label(value): value for value in self.values}
        return known[trial.suggest_categorical(self.name, list(known))]

    def contains(self, value: Any) -> bool:
        """Whether a value is one that it could suggest."""
        return _label(value) in map(_label, self.values)

    def study_value(self, value: Any) -> Any:
        """A value as the study keeps it."""
        return _label(value)

    def describe(self) -> str:
        """In words, for people."""
        return f"{self.name}: {', '.join(map(str, map(_label, self.values)))}"


Dimension = Between | OneOf
Space = Sequence[Dimension]


def suggest(trial: Any, space: Space, known: Mapping[str, Any]) -> dict[str, Any]:
    """Values of all fields that count in a trial. known: those of the other fields, which may decide what counts."""
    chosen: dict[str, Any] = {}
    for dimension in space:
        if _counts(dimension, {**known, **chosen}):
            chosen[dimension.field] = dimension.suggest(trial)
    return chosen


def study_params(space: Space, known: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a study would have kept, had it suggested these values; None if it cannot suggest them."""
    own = active_dimensions(space, known)
    if not all(dimension.contains(known.get(dimension.field)) for dimension in own):
        return None
    return {dimension.name: dimension.study_value(known[dimension.field]) for dimension in own}


def active_dimensions(space: Space, known: Mapping[str, Any]) -> list[Dimension]:
    """The dimensions that count beside the values of all fields."""
    return [dimension for dimension in space if _counts(dimension, known)]


def drop_fields(space: Space, given: Iterable[str]) -> tuple[Dimension, ...]:
    """The space that is left once some fields are given."""
    fixed = set(given)
    return tuple(dimension for dimension in space if dimension.field not in fixed)


def facts(space: Space) -> list[dict[str, Any]]:
    """For JSON; another space has other facts."""
    return [_plain({"name": dimension.name, **dataclasses.asdict(dimension)}) for dimension in space]


def _counts(dimension: Dimension, known: Mapping[str, Any]) -> bool:
    return all(known.get(name) in allowed for name, allowed in dimension.when.items())


def _named(name: str, when: When) -> str:
    """Fields that vary in another range beside another choice are told apart by that choice."""
    beside = ", ".join(str(value) for allowed in when.values() for value in allowed)
    return f"{name} ({beside})" if beside else name


def _label(value: Any) -> Any:
    """A value that a study can keep, which has JSON: text for lists and the like."""
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else _label(value)
