"""The results of runs: one JSON file each, which says what was run and what came of it."""

import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uncollapse.errors import UsageError
from uncollapse.io.files import write
from uncollapse.lab.config.fields import build, identity

if TYPE_CHECKING:  # recipes may use what uses results
    from uncollapse.lab.recipe import Recipe

UNSAFE = re.compile(r"[/\\\x00-\x1f\x7f]|^\.")
LONGEST = 180  # bytes of a name, so that a hash and an ending have room in the 255 that file systems allow


def run_name(recipe: "Recipe", config: Any) -> str:
    """What the files of a run are called: `<name>--<hash>`, without what would lead to another folder."""
    name = UNSAFE.sub("_", recipe.name_of(config)).encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore")
    return f"{name}--{identity(recipe.name, config)}"


class Results:
    """A folder of results: `folder/<recipe>/<name>--<hash>.json`. Several processes may use it at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, recipe: "Recipe", config: Any) -> Path:
        """Where the result of a config is, or will be."""
        return self.folder / recipe.name / f"{run_name(recipe, config)}.json"

    def find(self, recipe: "Recipe", config: Any) -> dict[str, Any] | None:
        """The record of a config; None if it has not been run.

        A file that is no record is set aside as `….json.broken`, with a warning. One that was run with other settings
        than the config's, because a default has changed since, is a UsageError.
        """
        path = self.path(recipe, config)
        record = _read(path, recipe)
        if record is not None:
            _check_same(path, record["config"], _plain(dataclasses.asdict(config)))
        return record

    def save(self, recipe: "Recipe", config: Any, record: Mapping[str, Any]) -> Path:
        """Write a record, in place of an earlier one. NaN and infinity become null, which all readers of JSON know."""
        facts = ((key, json.dumps(value, allow_nan=False, ensure_ascii=False)) for key, value in _plain(record).items())
        text = "{\n" + ",\n".join(f" {json.dumps(key)}: {value}" for key, value in facts) + "\n}"  # a line for each key
        path = self.path(recipe, config)
        try:
            return write(path, text + "\n")
        except OSError as error:
            raise UsageError(f"The result {error} The same command then goes on from its last checkpoint.") from error

    def all(self, recipe: "Recipe") -> list[dict[str, Any]]:
        """The records of all configs of a recipe that were run, in the order of their files' names.

        A file that is no record, or of another config than its name says, is left where it is, with a warning.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file; results are in a folder.")
        paths = sorted((self.folder / recipe.name).glob("*--*.json"))
        read = ((path, _read(path, recipe, aside=False)) for path in paths)
        return [record for path, record in read if record is not None and _is_named(path, record, recipe)]


def _read(path: Path, recipe: "Recipe", aside: bool = True) -> dict[str, Any] | None:
    """The record in a file; None if there is no file, or if it is no record, which may be set aside then."""
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        wrong = _fault(record, recipe.name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"The result {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # torn, or no text
        wrong = str(error)
    if wrong:
        if aside:
            _set_aside(path, wrong)
        else:
            warnings.warn(f"{path} is no result and does not count: {wrong}.", stacklevel=3)
        return None
    return record | {"config": _defaults(recipe.config) | record["config"]}


def _fault(record: Any, recipe: str) -> str | None:
    """What keeps the content of a file from being a record; None if nothing does."""
    if not isinstance(record, dict):
        return "it is no JSON object"
    lacking = [key for key in ("config", "figures") if not isinstance(record.get(key), dict)]
    if lacking:
        return f"it has no {' and no '.join(lacking)}"
    if record.get("recipe") != recipe:
        return f"it is of the recipe {record.get('recipe')!r}, not {recipe!r}"
    if not isinstance(record.get("seed"), int) or record["seed"] != record["config"].get("seed"):
        return "its seed is not that of its config"
    nested = [name for name, value in record["config"].items() if not _is_value(value)]
    return f"its setting {nested[0]} is no value" if nested else None


def _is_value(value: Any) -> bool:
    """Whether a setting can have it: a plain value, or a list of those."""
    several = value if isinstance(value, list) else [value]
    return not any(isinstance(one, dict | list) for one in several)


def _is_named(path: Path, record: Mapping[str, Any], recipe: "Recipe") -> bool:
    """Whether the hash in a file's name is that of its config: not in a copy that was edited."""
    known = {name: record["config"][name] for name in _defaults(recipe.config)}
    try:
        same = path.stem.endswith(f"--{identity(recipe.name, build(recipe.config, known))}")
    except UsageError:  # a value that is no longer allowed
        same = False
    if not same:
        warnings.warn(
            f"{path} does not count: its settings are not those that its name stands for. It was edited or copied, or "
            "a default of the recipe has changed since.",
            stacklevel=3,
        )
    return same


def _set_aside(path: Path, why: str) -> None:
    aside = path.with_name(f"{path.name}.broken")
    try:
        os.replace(path, aside)
        done = f"It was renamed to {aside.name} and counts as not run."
    except OSError as error:  # another process was first, or the folder is not ours: it is no result all the same
        done = f"It counts as not run, and could not be renamed ({error.strerror})."
    warnings.warn(f"{path} is no result: {why}. {done}", stacklevel=2)


def _check_same(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """The hash in the name covers only what differs from the defaults, so a changed default shows here alone."""
    for name in sorted(stored.keys() | wanted.keys()):
        if name not in wanted:
            told = f"has the setting {name}, which the recipe no longer has"
        elif stored[name] != wanted[name]:
            told = f"was run with {name} = {stored[name]!r}, and {wanted[name]!r} is asked for: its default has changed"
        else:
            continue
        raise UsageError(f"{path} {told}. Move that file elsewhere to run it anew, or use another results folder.")


def _defaults(config: type) -> dict[str, Any]:
    """What a field that came after a record was written had then: its default."""
    defaults: dict[str, Any] = _plain(dataclasses.asdict(config()))
    return defaults


def _plain(value: Any) -> Any:
    """A value as JSON gives it back: lists for tuples, null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
