"""What an experiment is told: a frozen dataclass, made from flags, files and key=value, with an identity of its own."""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.config.field_types import as_text, describe_type, parse, quote, to_json

__all__ = [
    "ConfigField",
    "build",
    "changed_fields",
    "command_line",
    "config_field",
    "config_fields",
    "identity",
    "parse_values",
    "reset_idle",
    "set_fields",
]

DIGITS = 10  # of an identity: a million configurations share one with a chance below one in two


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """A field of a configuration, with all that a flag needs. group: the heading above it in the help."""

    name: str
    annotation: Any
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    group: str | None = None

    @property
    def flag(self) -> str:
        """How it is written on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        bounds = [
            f"{word} {as_text(value)}"
            for word, value in (("from", self.minimum), ("to", self.maximum))
            if value is not None
        ]
        return " ".join([describe_type(self.annotation, self.choices), *bounds])

    def read(self, value: Any) -> Any:
        """The value in the field's type, from text or from what a file has; a UsageError if it is not allowed."""
        try:
            return self._bounded(parse(value, self.annotation, self.choices))
        except ValueError as error:
            hint = did_you_mean(quote(value), self.choices or get_args(self.annotation))
            if not isinstance(value, str) and isinstance(self.default, str):  # YAML has `no` for false
                hint = " In a file, put text that looks like something else in quotes."
            raise UsageError(f"{self.name} is {self.allowed}, got {quote(value)}.{hint}") from error

    def _bounded(self, value: Any) -> Any:
        for number in value if isinstance(value, tuple) else (value,):
            if self.minimum is not None and number is not None and number < self.minimum:
                raise ValueError(number)
            if self.maximum is not None and number is not None and number > self.maximum:
                raise ValueError(number)
        return value


def config_field(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    group: str | None = None,
) -> Any:
    """A field of a configuration: its default, what it does, its choices if these are all, its least and most value.

    group: what it belongs to, in a configuration with many fields; the help has a panel for each.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     layers: int = config_field(2, "Graph convolutions.")
    ...     norm: str = config_field("none", "What follows each layer.", choices=("none", "layer"))
    ...     seed: int = config_field(0, "Of all that is random.")
    >>> build(Config, {"layers": "16"})
    Config(layers=16, norm='none', seed=0)
    >>> command_line("gcn-depth", Config(norm="layer", seed=3))
    'uncollapse train gcn-depth --norm layer --seed 3'
    """
    facts = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "group": group}
    return dataclasses.field(default=default, metadata=facts)


def reset_idle(config: Any, names: Iterable[str]) -> None:
    """Give fields that do nothing their defaults; for the `__post_init__` of a frozen config.

    Two configs that differ only in idle fields describe the same run. With this they are equal and share an identity.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     cure: str = config_field("none", "Name of the cure.")
    ...     scale: float = config_field(1.0, "Scale of the cure.")
    ...
    ...     def __post_init__(self) -> None:
    ...         reset_idle(self, ["scale"] if self.cure == "none" else [])
    >>> Config(scale=0.1), Config("contra_norm", 0.1)
    (Config(cure='none', scale=1.0), Config(cure='contra_norm', scale=0.1))
    """
    idle = set(names)
    set_fields(config, **{field.name: field.default for field in dataclasses.fields(config) if field.name in idle})


def set_fields(config: Any, **values: Any) -> None:
    """Set fields of a frozen config; only for its `__post_init__`, to store equivalent values in one form."""
    for name, value in values.items():
        object.__setattr__(config, name, value)


def config_fields(config_class: type) -> dict[str, ConfigField]:
    """The fields of a configuration by name, in their order."""
    kinds = get_type_hints(config_class)
    found = {}
    for field in dataclasses.fields(config_class):
        facts = dict(field.metadata)
        found[field.name] = ConfigField(field.name, kinds[field.name], field.default, facts.pop("help", ""), **facts)
    return found


def parse_values(config_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of their fields and in their types; a UsageError for what the configuration does not have."""
    known, read_values = config_fields(config_class), {}
    for given, value in values.items():
        name = given.replace("-", "_")
        if name not in known:
            raise UsageError(
                f"There is no setting {quote(given)}.{did_you_mean(name, known)} There are: {', '.join(known)}."
            )
        read_values[name] = known[name].read(value)
    return read_values


def parse_pairs(config_class: type, pairs: Iterable[str]) -> dict[str, Any]:
    """Values by name from text such as "layers=16"."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, such as layers=16, got {quote(pair)}.")
        values |= parse_values(config_class, {name.strip(): value.strip()})
    return values


def build(config_class: type, values: Mapping[str, Any]) -> Any:
    """A configuration from values by name; the others have their defaults.

    Args:
        config_class: a frozen dataclass whose fields all have a default.
        values: in the field's type, or as text: "16", "0.5", "true", "none", "2,4,8". A dash counts as an underscore.
    """
    try:
        return config_class(**parse_values(config_class, values))
    except UsageError:
        raise
    except ValueError as error:  # what the configuration itself checks
        raise UsageError(str(error)) from error


def changed_fields(config: Any) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    return {
        name: getattr(config, name)
        for name, field in config_fields(type(config)).items()
        if getattr(config, name) != field.default
    }


def identity(recipe: str, config: Any) -> str:
    """Ten hexadecimal digits that stand for a recipe with this configuration.

    Only fields that differ from their defaults count, so a new field with a default leaves old results valid.
    """
    known = config_fields(type(config))
    changed = {name: to_json(value, known[name].annotation) for name, value in changed_fields(config).items()}
    text = json.dumps([recipe, changed], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def command_line(recipe: str, config: Any) -> str:
    """The command line that repeats a run; fields with their defaults are left out."""
    known, words = config_fields(type(config)), ["uncollapse", "train", recipe]
    for name, value in changed_fields(config).items():
        flag = known[name].flag
        words += [flag if value else f"--no-{flag[2:]}"] if known[name].annotation is bool else [flag, as_text(value)]
    return shlex.join(words)
