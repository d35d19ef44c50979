"""The search space: numbers in a range and choices, some of which are active only with other choices."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uncollapse.errors import UsageError

DIGITS = 3  # of suggested numbers: what is printed and copied is exactly what was tried
When = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Between:
    """A number in a range. log: search on a logarithmic scale. when: values of other fields for which it is active."""

    field: str
    low: float
    high: float
    log: bool = True
    when: When = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise UsageError(f"{self.field} needs a range with the lower number first, got {self.low} and {self.high}.")
        if self.log and self.low <= 0:
            raise UsageError(f"{self.field} is searched on a logarithmic scale and must be positive, got {self.low}.")

    @property
    def name(self) -> str:
        """Return the name of the parameter in the study."""
        return _param_name(self.field, self.when)

    def suggest(self, trial: Any) -> float:
        """Return a value for an Optuna trial."""
        return float(f"{trial.suggest_float(self.name, self.low, self.high, log=self.log):.{DIGITS}g}")

    def contains(self, value: Any) -> bool:
        """Return whether this value could be suggested."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def study_value(self, value: Any) -> Any:
        """Return a value as the study stores it."""
        return float(value)

    def describe(self) -> str:
        """Return a description for people."""
        return f"{self.name}: {self.low:g} to {self.high:g}{', log scale' if self.log else ''}"


@dataclass(frozen=True)
class OneOf:
    """One of several values. when: values of other fields for which it is active."""

    field: str
    values: tuple[Any, ...]
    when: When = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.values or len(set(map(_label, self.values))) < len(self.values):
            raise UsageError(f"{self.field} needs different values to choose from, got {list(self.values)!r}.")

    @property
    def name(self) -> str:
        """Return the name of the parameter in the study."""
        return _param_name(self.field, self.when)

    def suggest(self, trial: Any) -> Any:
        """Return a value for an Optuna trial."""
        known = {_label(value): value for value in self.values}
        return known[trial.suggest_categorical(self.name, list(known))]

    def contains(self, value: Any) -> bool:
        """Return whether this value could be suggested."""
        return _label(value) in map(_label, self.values)

    def study_value(self, value: Any) -> Any:
        """Return a value as the study stores it."""
        return _label(value)

    def describe(self) -> str:
        """Return a description for people."""
        return f"{self.name}: {', '.join(map(str, map(_label, self.values)))}"


Dimension = Between | OneOf
Space = Sequence[Dimension]


def suggest(trial: Any, space: Space, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of all fields that are active in a trial. known: the other fields, which may decide that."""
    chosen: dict[str, Any] = {}
    for dimension in space:
        if _is_active(dimension, {**known, **chosen}):
            chosen[dimension.field] = dimension.suggest(trial)
    return chosen


def study_params(space: Space, known: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters under which a study stores these values; None if it cannot suggest them."""
    own = active_dimensions(space, known)
    if not all(dimension.contains(known.get(dimension.field)) for dimension in own):
        return None
    return {dimension.name: dimension.study_value(known[dimension.field]) for dimension in own}


def active_dimensions(space: Space, known: Mapping[str, Any]) -> list[Dimension]:
    """Return the dimensions that are active with these values of all fields."""
    return [dimension for dimension in space if _is_active(dimension, known)]


def drop_fields(space: Space, given: Iterable[str]) -> tuple[Dimension, ...]:
    """Return the space without the fields that are given."""
    fixed = set(given)
    return tuple(dimension for dimension in space if dimension.field not in fixed)


def facts(space: Space) -> list[dict[str, Any]]:
    """Return a description for JSON, by which two spaces can be compared."""
    return [_to_json({"name": dimension.name, **dataclasses.asdict(dimension)}) for dimension in space]


def _is_active(dimension: Dimension, known: Mapping[str, Any]) -> bool:
    return all(known.get(name) in allowed for name, allowed in dimension.when.items())


def _param_name(name: str, when: When) -> str:
    """Return the name of a field, with the choices for which it is active, as its range may depend on them."""
    choices = ", ".join(str(value) for allowed in when.values() for value in allowed)
    return f"{name} ({choices})" if choices else name


def _label(value: Any) -> Any:
    """Return a value that a study can store as JSON: text for lists and other objects."""
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, list | tuple) else _label(value)
