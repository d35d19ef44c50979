"""Search space of a recipe for `uncollapse tune`, and the metric that compares trials."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from uncollapse.errors import UsageError
from uncollapse.lab.config.field_types import union_members
from uncollapse.lab.config.fields import ConfigField, config_fields, parse_values
from uncollapse.tuning.space import Between, Dimension, OneOf, Space, drop_fields

MANY = 10.0  # an interval whose ends differ by this factor or more is searched on a log scale
TO = ".."


@dataclass(frozen=True)
class Search:
    """What may vary, and how trials are compared.

    space: the fields and their values. baseline: settings without a cure, for the first trial. by: the metric of a
    record that chooses; higher is better. by_epoch: the same metric after each epoch, by which trials may be pruned;
    None if there is none. line: returns the code to copy for a configuration; None if there is only the command.
    missing: returns a sentence about what a configuration lacks to be tuned; None if it lacks nothing.
    """

    space: Space
    baseline: Mapping[str, Any]
    by: str = "validation"
    by_epoch: str | None = "validation"
    line: Callable[[Any], str | None] = lambda config: None
    missing: Callable[[Any], str | None] = lambda config: None


@dataclass(frozen=True)
class SearchPlan:
    """A search to run: the start configuration and the dimensions of the search space."""

    search: Search
    config: Any
    space: tuple[Dimension, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if lacking := self.search.missing(self.config):
            raise UsageError(lacking)
        if not self.space:
            raise UsageError(
                "Nothing is left to vary: every setting that could vary is given. Leave one out, or use --vary."
            )

    @property
    def baseline(self) -> Any:
        """Configuration without a cure."""
        return dataclasses.replace(self.config, **self.search.baseline)


def build_search(search: Search, config: Any, given: Iterable[str], vary: Iterable[str] = ()) -> SearchPlan:
    """Return the plan of a search from a configuration.

    given: fields that stay fixed. vary: additional dimensions, such as "scale=0.01..2" for an interval or
    "norm=pair_norm,contra_norm" for choices. Values that the configuration does not allow are left out.
    """
    own = [parse_dimension(text, type(config)) for text in vary]
    names = [dimension.field for dimension in own]
    both = sorted({*given} & {*names})
    if both:
        raise UsageError(f"{both[0]} is both fixed and varied; leave out one of the two.")
    space = (*_replace_dimensions(search.space, own, given),)
    return SearchPlan(search, config, tuple(found for each in space if (found := _restrict(each, config)) is not None))


def parse_dimension(text: str, config: type) -> Dimension:
    """Parse a dimension such as "scale=0.01..2" or "norm=pair_norm,contra_norm"."""
    name, equals, words = text.partition("=")
    name = name.strip().replace("-", "_")
    if not (equals and words.strip()):
        raise UsageError(f"--vary takes FIELD=LOW..HIGH or FIELD=A,B,…, such as scale=0.01..2, got {text!r}.")
    if name not in config_fields(config) or name == "seed":
        if name == "seed":
            raise UsageError("The seed cannot vary: the search would choose a lucky one. Set it with --seed.")
        parse_values(config, {name: words})  # raises with the names that exist
    setting = config_fields(config)[name]
    if TO not in words:
        return OneOf(name, tuple(dict.fromkeys(setting.parse(word.strip()) for word in words.split(","))))
    if float not in union_members(setting.annotation):
        raise UsageError(f"{name} is {setting.allowed}: separate its values by commas, got {words!r}.")
    low, high = (_parse_end(setting, word) for word in words.split(TO, 1))
    return Between(name, low, high, log=low > 0 and high / low >= MANY)


def _parse_end(setting: ConfigField, word: str) -> float:
    value = setting.parse(word.strip())
    if value is None:
        raise UsageError(f"{setting.name} varies between two numbers, got none.")
    return float(value)


def _replace_dimensions(space: Space, own: list[Dimension], given: Iterable[str]) -> list[Dimension]:
    """Return the space without given fields; the user's dimensions come first and keep the recipe's conditions."""
    names = [dimension.field for dimension in own]
    when: dict[str, Mapping[str, tuple[Any, ...]]] = {}
    for dimension in space:  # a field that is active for several choices is active for all of them
        before = when.get(dimension.field, {})
        joined = {key: (*before.get(key, ()), *values) for key, values in dimension.when.items()}
        when[dimension.field] = joined if dimension.when else {}
    conditioned = [dataclasses.replace(dimension, when=when.get(dimension.field, {})) for dimension in own]
    firsts = [dimension for dimension in conditioned if not dimension.when]
    lasts = [dimension for dimension in conditioned if dimension.when]
    return [*firsts, *drop_fields(space, {*given, *names}), *lasts]


def _restrict(dimension: Dimension, config: Any) -> Dimension | None:
    """Return a dimension with the values that the configuration allows; None if fewer than two are left."""
    if isinstance(dimension, Between):
        return dimension
    allowed = tuple(value for value in dimension.values if _is_allowed(config, dimension.field, value))
    return dataclasses.replace(dimension, values=allowed) if len(allowed) > 1 else None


def _is_allowed(config: Any, name: str, value: Any) -> bool:
    try:
        dataclasses.replace(config, **{name: value})
    except (UsageError, ValueError):
        return False
    return True
