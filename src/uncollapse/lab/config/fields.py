"""Experiment configuration: frozen dataclasses that are built from flags, files and key=value, and their identity."""

import dataclasses
import functools
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from uncollapse.errors import UsageError, did_you_mean, import_optional
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
            raise UsageError(f"{self.name} must be {self.allowed}, got {quote(value)}.{hint}") from error


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


def config_fields(config_class: type) -> Mapping[str, ConfigField]:
    """Return the fields of a configuration by name, in their order."""
    return _read_fields(config_class)


@functools.cache  # tables and sweeps ask for them once per result
def _read_fields(config_class: type) -> Mapping[str, ConfigField]:
    annotations = get_type_hints(config_class)
    found = {}
    for field in dataclasses.fields(config_class):
        facts = dict(field.metadata)
        found[field.name] = ConfigField(
            field.name, annotations[field.name], field.default, facts.pop("help", ""), **facts
        )
    return MappingProxyType(found)


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


SUFFIXES = (".yaml", ".yml", ".json")
LARGEST = 2**16  # bytes; a larger file is not a configuration
DEEPEST = 16  # nested lists; a setting is a plain value or a list of plain values


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the values of a YAML or JSON file by name. Errors name the line."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"A configuration file ends in {', '.join(SUFFIXES)}, got '{path}'.")
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"The configuration {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The configuration {path} is not valid UTF-8; save it as UTF-8.") from error
    if len(content) > LARGEST:
        raise UsageError(f"{path} has more than {LARGEST:,} bytes and is not a configuration. Is it the right file?")
    try:
        values = _json(path, text) if path.suffix.lower() == ".json" else _yaml(path, text)
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply; settings are names with plain values.") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"{path} must have names with values, such as 'layers: 16', got {quote(values, 60)}.")
    return values


def _json(path: Path, text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if repeated := next((name for name, count in counts.items() if count > 1), None):
            raise UsageError(f"{path} has {repeated!r} twice; remove one.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {error.lineno}, is not valid JSON: {error.msg}.") from error
    except UsageError:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise UsageError(f"{path} has a number that is too long.") from error


def _yaml(path: Path, text: str) -> Any:
    yaml = import_optional("yaml", "train")
    try:
        _check_nesting(path, yaml, text)
        tree = yaml.compose(text, Loader=yaml.SafeLoader)  # has line numbers; values come from safe_load
        lines: dict[str, int] = {}
        for name, _ in tree.value if isinstance(tree, yaml.MappingNode) else ():
            line = name.start_mark.line + 1
            if (first := lines.setdefault(str(name.value), line)) != line:
                raise UsageError(f"{path} has {name.value!r} in line {first} and again in line {line}; remove one.")
        return {} if tree is None else yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1},"
        raise UsageError(f"{path}{where} is not valid YAML: {getattr(error, 'problem', None) or error}.") from error
    except UsageError:
        raise
    except (ValueError, OverflowError, AttributeError) as error:  # an invalid date or number
        raise UsageError(f"{path} has a value that cannot be read: {error}. Put text in quotes.") from error


def _check_nesting(path: Path, yaml: Any, text: str) -> None:
    """Reject aliases, with which a few lines expand to billions of values, and deeply nested lists."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            line = event.start_mark.line + 1
            raise UsageError(f"{path}, line {line}, refers to another value (*{event.anchor}); write the value itself.")
        if depth > DEEPEST:
            raise RecursionError
