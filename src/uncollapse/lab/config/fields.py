"""Experiment configuration: frozen dataclasses that are built from flags, files and key=value, and their identity."""

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_type_hints

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.config.field_types import as_text, describe_type, parse, quote, to_json

DIGITS = 10  # of an identity: among a million configurations, two share one with a probability below one half


@dataclasses.dataclass(frozen=True)
class ConfigField:
    """A field of a configuration, with everything that a flag needs. group: its heading in the help text."""

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
        """Its name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def allowed(self) -> str:
        """The values that it accepts, in words."""
        lower = [] if self.minimum is None else [f"from {as_text(self.minimum)}"]
        upper = [] if self.maximum is None else [f"to {as_text(self.maximum)}"]
        return " ".join([describe_type(self.annotation, self.choices), *lower, *upper])

    def parse(self, value: Any) -> Any:
        """Return the value in the field's type, from text or from a file; UsageError if it is not allowed."""
        try:
            return parse(value, self.annotation, self.choices, self.minimum, self.maximum)
        except ValueError as error:
            hint = did_you_mean(quote(value), self.choices or get_args(self.annotation))
            if not isinstance(value, str) and isinstance(self.default, str):  # YAML reads `no` as false
                hint = " In a file, put text that looks like another type in quotes."
            raise UsageError(f"{self.name} is {self.allowed}, got {quote(value)}.{hint}") from error


def config_field(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    group: str | None = None,
) -> Any:
    """Return a dataclass field of a configuration.

    Args:
        default: Its default; every field of a configuration has one.
        help: What it does, for the help text.
        choices: All allowed values; None allows every value of the annotated type.
        minimum: Smallest allowed number.
        maximum: Largest allowed number.
        group: Heading in the help text, for a configuration with many fields.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     layers: int = config_field(2, "Number of graph convolutions.", minimum=1)
        ...     norm: str = config_field("none", "Normalization after each layer.", choices=("none", "layer"))
        ...     seed: int = config_field(0, "Random seed.")
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
    """Return the fields of a configuration by name, in their order."""
    annotations = get_type_hints(config_class)
    found = {}
    for field in dataclasses.fields(config_class):
        facts = dict(field.metadata)
        found[field.name] = ConfigField(
            field.name, annotations[field.name], field.default, facts.pop("help", ""), **facts
        )
    return found


def parse_values(config_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by field name and in the fields' types; UsageError for an unknown field or a bad value."""
    known, parsed = config_fields(config_class), {}
    for given, value in values.items():
        name = given.replace("-", "_")
        if name not in known:
            raise UsageError(
                f"There is no setting {quote(given)}.{did_you_mean(name, known)} There are: {', '.join(known)}."
            )
        parsed[name] = known[name].parse(value)
    return parsed


def parse_pairs(config_class: type, pairs: Iterable[str]) -> dict[str, Any]:
    """Return values by field name from text such as "layers=16"."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set takes key=value, such as layers=16, got {quote(pair)}.")
        values |= parse_values(config_class, {name.strip(): value.strip()})
    return values


def build(config_class: type, values: Mapping[str, Any]) -> Any:
    """Build a configuration from values by name; the other fields have their defaults.

    Args:
        config_class: A frozen dataclass whose fields all have a default.
        values: In the fields' types, or as text: "16", "0.5", "true", "none", "2,4,8". A dash in a name is read as an
            underscore.
    """
    try:
        return config_class(**parse_values(config_class, values))
    except UsageError:
        raise
    except ValueError as error:  # from the configuration's own checks
        raise UsageError(str(error)) from error


def changed_fields(config: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    return {
        name: getattr(config, name)
        for name, field in config_fields(type(config)).items()
        if getattr(config, name) != field.default
    }


def identity(recipe: str, config: Any) -> str:
    """Return ten hexadecimal digits that identify a recipe with this configuration.

    Only fields that differ from their defaults count, so a new field with a default leaves old results valid.
    """
    known = config_fields(type(config))
    changed = {name: to_json(value, known[name].annotation) for name, value in changed_fields(config).items()}
    text = json.dumps([recipe, changed], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def command_line(recipe: str, config: Any) -> str:
    """Return the command that repeats a run; fields at their defaults are left out."""
    known, words = config_fields(type(config)), ["uncollapse", "train", recipe]
    for name, value in changed_fields(config).items():
        flag = known[name].flag
        words += [flag if value else f"--no-{flag[2:]}"] if known[name].annotation is bool else [flag, as_text(value)]
    return shlex.join(words)
