"""Read models by name and data by file. Each library is imported only when it is needed."""

import importlib
from typing import TYPE_CHECKING, Any

from uncollapse.errors import UsageError

if TYPE_CHECKING:
    from uncollapse.io.batches import Data, DataRequest, built_in_sentences, load_data, runs_alone
    from uncollapse.io.models import LoadedModel, load_model

__all__ = [
    "DTYPES",
    "GRAPHS",
    "Data",
    "DataRequest",
    "LoadedModel",
    "UsageError",
    "built_in_sentences",
    "load_data",
    "load_model",
    "runs_alone",
]

DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")
GRAPHS = {"karate": "Zachary's karate club", "cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
_MODULES = {
    "Data": "batches",
    "DataRequest": "batches",
    "load_data": "batches",
    "LoadedModel": "models",
    "load_model": "models",
    "built_in_sentences": "batches",
    "runs_alone": "batches",
}


def __getattr__(name: str) -> Any:
    """Import one of the names above when it is first used: the command line starts without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
