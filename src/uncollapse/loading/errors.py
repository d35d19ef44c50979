"""What goes wrong when something is loaded, in a sentence that says what to do."""

import importlib
from types import ModuleType


class UsageError(ValueError):
    """What was asked for cannot be had. The sentence says what to ask for instead; the command then exits with 2."""


def library(name: str, extra: str) -> ModuleType:
    """Import an optional library, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        raise UsageError(f'{name} is needed for this: pip install "uncollapse[{extra}]".') from error
