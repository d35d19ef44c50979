"""A model by what the user calls it: a folder, a name on the hub, timm:NAME, or a function that builds it."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from uncollapse.attachment import save
from uncollapse.backbones.random_weights import reset_cures
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io import DTYPES, tensor_files, timm_models
from uncollapse.io.files import expand_user
from uncollapse.io.hf_models import PACKAGE
from uncollapse.io.loading import fixed_seed

WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class LoadedModel:
    """A model, its name in reports, and where its tokenizer or image processor is, if that is known.

    filled: names of weights that the files lack and that are random therefore.
    """

    model: nn.Module
    name: str
    origin: str | None = None
    filled: tuple[str, ...] = ()


def load_model(
    what: str,
    *,
    checkpoint: Path | None = None,
    random_weights: bool = False,
    dtype: str | None = None,
) -> LoadedModel:
    """The model that `what` names.

    Args:
        what: a HuggingFace folder, .gguf file or name on the hub; "timm:NAME" or a folder that timm loads;
            "module:function" or "file.py:function".
        checkpoint: weights to load into the model, which is built without others.
        random_weights: build the architecture with random weights.
        dtype: of the weights; "auto" keeps the stored one. HuggingFace models are float32 without it.
    """
    if checkpoint is not None and random_weights:
        raise UsageError("--checkpoint and --random-weights exclude each other; choose one.")
    if checkpoint is not None and not checkpoint.is_file():
        raise UsageError(f"There is no checkpoint {checkpoint}.")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(
            f"There is no dtype {dtype!r}; choose one of {', '.join(DTYPES)}.{did_you_mean(dtype, DTYPES)}"
        )
    if random_weights and _names_function(what):
        raise UsageError(f"{what} chooses its weights itself; leave out --random-weights.")
    wanted = None if dtype == "auto" else getattr(torch, dtype or "float32")
    loaded = _loaded(what, bare=random_weights or checkpoint is not None, dtype=wanted)
    if checkpoint is not None:
        tensor_files.load_into(loaded.model, checkpoint)
    if dtype not in (None, "auto"):
        loaded.model.to(wanted)
    return replace(loaded, name=f"{loaded.name} (random weights)") if random_weights else loaded


def _loaded(what: str, *, bare: bool, dtype: torch.dtype | None) -> LoadedModel:
    path = expand_user(what)
    if what.startswith("timm:"):
        name = what.removeprefix("timm:")
        return LoadedModel(timm_models.load_timm_model(name, random_weights=bare), name)
    if path.is_file() and path.suffix in WEIGHT_FILES:
        raise UsageError(
            f"{what} holds weights without their model; name the function that builds it: "
            f"uncollapse diagnose module:function --checkpoint {what}"
        )
    if _names_function(what):
        return _built(what)
    if path.is_dir() and timm_models.is_folder(path):
        model = timm_models.load_timm_folder(path, random_weights=bare)
        if (path / save.DESCRIPTION).is_file():
            _load_cure(model, path, random_weights=bare)
        return LoadedModel(model, _folder_name(path))
    return _huggingface(what, path, bare, dtype)


def _names_function(what: str) -> bool:
    return ":" in what and not what.startswith(("timm:", PACKAGE)) and not expand_user(what).exists()


def _built(what: str) -> LoadedModel:
    with fixed_seed():
        model = import_function(what)()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{what} must return a torch.nn.Module, got {type(model).__name__}.")
    origin = getattr(model, "name_or_path", None)  # HuggingFace models know where they came from
    return LoadedModel(model, what, origin if isinstance(origin, str) and origin else None)


def _huggingface(what: str, path: Path, bare: bool, dtype: torch.dtype | None) -> LoadedModel:
    from uncollapse.io import hf_models

    model, filled, cures = hf_models.load_hf_model(hf_models.Origin(what), random_weights=bare, dtype=dtype)
    if (path / save.DESCRIPTION).is_file():
        _load_cure(model, path, random_weights=bare)
    elif cures:
        raise UsageError(
            f"{what} holds weights of a cure, such as {cures[0]}, and no {save.DESCRIPTION} that tells where it "
            "goes: without it this is another model. Write it beside the model with uc.save_cure, or attach the cure "
            "in a function and name module:function."
        )
    name = _folder_name(path) if path.exists() else what
    return LoadedModel(model, name, what, tuple(filled))


def _load_cure(model: nn.Module, folder: Path, *, random_weights: bool) -> None:
    """Attach the cures that were saved beside a model: without them it is another one."""
    try:
        save.load_cure(model, folder)
    except (ValueError, OSError) as error:
        raise UsageError(f"The cure beside the model cannot be loaded: {error}") from error
    if random_weights:
        reset_cures(model)


def _folder_name(path: Path) -> str:
    """The last part of a path that says something: "runs/bert/checkpoint-500" is "bert/checkpoint-500"."""
    parts = path.resolve().with_suffix("").parts if path.suffix == ".gguf" else path.resolve().parts
    vague = re.fullmatch(r"model|final|last|best|checkpoint.*|weights|\d+", parts[-1])
    return "/".join(parts[-2:]) if vague and len(parts) > 2 else parts[-1]


def import_function(spec: str) -> Callable[[], Any]:
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
