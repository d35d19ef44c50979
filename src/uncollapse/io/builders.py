"""Functions of the user by name: "module:function" or "file.py:function"."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from uncollapse.errors import UsageError, did_you_mean


def function(spec: str) -> Callable[[], Any]:
    """The function that a spec names. The current directory is importable, and so is the directory of a file."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UsageError(f"{spec!r} names no function; write module:function or file.py:function.")
    module = _from_file(Path(place)) if place.endswith(".py") else _by_name(place)
    found = getattr(module, name, None)
    if not callable(found):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = did_you_mean(name, there)
        raise UsageError(f"{place} has no function {name!r}.{hint} There are: {', '.join(there) or 'none'}.")
    answer: Callable[[], Any] = found
    return answer


def _by_name(place: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place + ".").startswith(error.name + "."):
            raise  # the module is there, and what it imports is not
        raise UsageError(f"There is no module {place!r} here or among the installed ones.") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    _importable(path.resolve().parent)
    name = path.stem if path.stem not in sys.modules else f"_uncollapse_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look there
    spec.loader.exec_module(module)
    return module


def _importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
