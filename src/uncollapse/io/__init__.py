"""Models by name and data by file, for the command line; each library is imported only when it is needed."""

import importlib
from typing import TYPE_CHECKING, Any

from uncollapse.errors import UsageError

if TYPE_CHECKING:
    from uncollapse.io.batches import Data, Wanted, data_for
    from uncollapse.io.models import Loaded, load
    from uncollapse.io.text_batches import built_in_sentences

__all__ = ["Data", "Loaded", "UsageError", "Wanted", "built_in_sentences", "data_for", "load"]

_MODULES = {
    "Data": "batches",
    "Wanted": "batches",
    "data_for": "batches",
    "Loaded": "models",
    "load": "models",
    "built_in_sentences": "text_batches",
}


def __getattr__(name: str) -> Any:
    """One of the names above, imported when it is asked for: errors are told without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
