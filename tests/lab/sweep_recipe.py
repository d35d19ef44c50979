"""The recipe of `tiny_sweep`, or another tiny one, registered while a test runs, here and in processes it starts."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from uncollapse.lab.recipe import RECIPES


@contextmanager
def registered(patch: pytest.MonkeyPatch, name: str = "tiny_sweep") -> Iterator[ModuleType]:
    folder = str(Path(__file__).parent)
    patch.syspath_prepend(folder)
    patch.setenv("PYTHONPATH", os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])]))
    patch.setattr(RECIPES, "_entries", dict(RECIPES._entries))
    yield importlib.import_module(name)
    del sys.modules[name]
