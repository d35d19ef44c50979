"""Read configurations from YAML and JSON files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.config.field_types import quote

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
