"""Load models of sentence-transformers from folders, so that their embeddings are measured as well."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from uncollapse.errors import UsageError, import_optional
from uncollapse.io.files import expand_user, read_config
from uncollapse.io.hf_models import Origin, loading
from uncollapse.io.loading import fixed_seed
from uncollapse.io.untrusted_models import bounded_size

MODULES = "modules.json"
TRUSTED = ("sentence_transformers.", "uncollapse.")  # packages whose modules are loaded


def find_modules(origin: Origin) -> Path | None:
    """Return the file that lists the modules of a sentence-transformers model; None if this is not one."""
    folder = expand_user(origin.place)
    if folder.is_dir():
        return folder / MODULES if (folder / MODULES).exists() else None
    hub: Any = import_optional("huggingface_hub", "hf")
    try:
        return Path(hub.hf_hub_download(origin.place, MODULES, local_files_only=_is_local(origin)))
    except Exception:  # it has none, or the hub cannot be reached and the cache does not have it
        return None


def _is_local(origin: Origin) -> bool:
    return bool(origin.options.get("local_files_only", Path(origin.place).is_dir()))


def load_sentence_model(origin: Origin, modules: Path, dtype: torch.dtype | None) -> nn.Module | None:
    """Return the SentenceTransformer; None if the library is not installed.

    modules: the file that lists its modules. dtype: None keeps that of the files. UsageError if a module of the model
    is not of a known package.
    """
    _check_modules(origin, modules)
    if importlib.util.find_spec("sentence_transformers") is None:
        return None
    with loading(origin), fixed_seed(), bounded_size(origin.place):
        library: Any = import_optional("sentence_transformers", "st")
        options = {"device": "cpu", "trust_remote_code": False, "local_files_only": _is_local(origin)}
        model: nn.Module = library.SentenceTransformer(origin.place, model_kwargs={"dtype": dtype or "auto"}, **options)
    return model.eval()


def _check_modules(origin: Origin, path: Path) -> None:
    """Raise UsageError if modules.json names a class outside of the known packages: loading it would run its code."""
    found = read_config(path)
    kinds = (
        [entry.get("type") if isinstance(entry, dict) else None for entry in found] if isinstance(found, list) else []
    )
    if not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise UsageError(f"{path} is not a list of modules, each with a type; save the model again.")
    for kind in kinds:
        if not str(kind).startswith(TRUSTED):
            raise UsageError(
                f"{origin.place} needs its own code ({kind}), which is not run; build the model in a function and name "
                "module:function."
            )
