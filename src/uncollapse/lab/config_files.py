"""Configurations in YAML and JSON files."""

import json
from pathlib import Path
from typing import Any

from uncollapse.loading.errors import UsageError, library

SUFFIXES = (".yaml", ".yml", ".json")


def read(path: Path) -> dict[str, Any]:
    """The values of a YAML or JSON file by name. What is wrong with it is told with its line."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"A configuration is a file that ends in {', '.join(SUFFIXES)}, got '{path}'.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"The configuration {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The configuration {path} is no text in UTF-8; save it as such.") from error
    values = _json(path, text) if path.suffix.lower() == ".json" else _yaml(path, text)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"{path} must have names with values, such as 'layers: 16', got {_short(values)}.")
    return values


def _json(path: Path, text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"{path} has {twice!r} twice; leave one.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {error.lineno}, is no JSON: {error.msg}.") from error


def _yaml(path: Path, text: str) -> Any:
    yaml = library("yaml", "train")
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)  # it knows the lines; values come from safe_load
        lines: dict[str, int] = {}
        for name, _ in tree.value if isinstance(tree, yaml.MappingNode) else ():
            line = name.start_mark.line + 1
            if (first := lines.setdefault(str(name.value), line)) != line:
                raise UsageError(f"{path} has {name.value!r} in line {first} and again in line {line}; leave one.")
        return {} if tree is None else yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1},"
        raise UsageError(f"{path}{where} is no YAML: {getattr(error, 'problem', None) or error}.") from error


def _short(values: Any) -> str:
    text = repr(values)
    return text if len(text) <= 60 else f"{text[:57]}..."
