"""Load a model by name: a folder, a name on the hub, timm:NAME, or a function that builds it.

Models of sentence-transformers are loaded whole, so that their embeddings are measured as well.
"""

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

from uncollapse.backbones.random_weights import reset_cures
from uncollapse.errors import UsageError, did_you_mean, import_optional, similar_file
from uncollapse.io import DTYPES, hf_models, tensor_files, timm_models
from uncollapse.io.files import CURE_FILE, expand_user, read_config
from uncollapse.io.hf_models import Origin, quiet_loading
from uncollapse.io.loading import fixed_seed
from uncollapse.io.untrusted_models import bounded_size

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
LoadCure = Callable[[nn.Module, Path], object]
MODULES = "modules.json"
TRUSTED = ("sentence_transformers.", "uncollapse.")  # packages whose modules are loaded


@dataclass(frozen=True)
class LoadedModel:
    """A model, its name in reports, and where its tokenizer or image processor is, if that is known.

    filled: names of weights that are missing in the files and are therefore random. note: what else to know about it.
    """

    model: nn.Module
    name: str
    origin: str | None = None
    filled: tuple[str, ...] = ()
    note: str = ""


def load_model(
    what: str,
    *,
    checkpoint: Path | None = None,
    random_weights: bool = False,
    dtype: str | None = None,
    load_cure: LoadCure | None = None,
) -> LoadedModel:
    """Load the model that `what` names.

    Args:
        what: A HuggingFace folder, .gguf file or name on the hub; "timm:NAME" or a folder that timm loads;
            "module:function" or "file.py:function".
        checkpoint: Weights to load into the model, which is built without its own.
        random_weights: Build the architecture with random weights.
        dtype: Of the weights; "auto" keeps the stored one. The default of HuggingFace models is float32.
        load_cure: `uncollapse.load_cure`, called for a folder with a saved cure. Without it such a folder is refused:
            a model without its cure is another model.
    """
    if checkpoint is not None and random_weights:
        raise UsageError("--checkpoint and --random-weights exclude each other; choose one.")
    if checkpoint is not None and not checkpoint.is_file():
        raise UsageError(f"There is no checkpoint {checkpoint}.{similar_file(checkpoint)}")
    if dtype is not None and dtype not in DTYPES:
        hint = did_you_mean(dtype, DTYPES)
        raise UsageError(f"There is no dtype {dtype!r}; choose one of {', '.join(DTYPES)}.{hint}")
    if random_weights and _names_function(what):
        raise UsageError(f"{what} chooses its own weights; leave out --random-weights.")
    torch_dtype = None if dtype == "auto" else getattr(torch, dtype or "float32")
    loaded = _load(what, random_weights or checkpoint is not None, torch_dtype, load_cure)
    if checkpoint is not None:
        tensor_files.load_into(loaded.model, checkpoint)
    if dtype not in (None, "auto"):
        loaded.model.to(torch_dtype)
    return replace(loaded, name=f"{loaded.name} (random weights)") if random_weights else loaded


def _load(what: str, random_weights: bool, dtype: torch.dtype | None, load_cure: LoadCure | None) -> LoadedModel:
    path = expand_user(what)
    if what.startswith("timm:"):
        name = what.removeprefix("timm:")
        return LoadedModel(timm_models.load_timm_model(name, random_weights=random_weights), name)
    if path.is_file() and path.suffix in WEIGHT_SUFFIXES:
        raise UsageError(
            f"{what} has weights but no model; name the function that builds the model: "
            f"uncollapse diagnose module:function --checkpoint {what}"
        )
    if _names_function(what) or (path.suffix == ".py" and not path.is_dir()):
        return _build(what)
    if path.is_dir() and timm_models.is_folder(path):
        model = timm_models.load_timm_folder(path, random_weights=random_weights)
        cures: list[str] = []
        loaded = LoadedModel(model, _folder_name(path))
    else:
        loaded, cures = _load_hf(what, _folder_name(path) if path.exists() else what, random_weights, dtype)
        model = loaded.model
    if (path / CURE_FILE).is_file():
        _load_saved_cure(model, path, random_weights, load_cure)
    elif cures:
        raise UsageError(
            f"{what} has weights of a cure, such as {cures[0]}, but no {CURE_FILE} that says where it goes; without "
            "it this is another model. Write it next to the model with uc.save_cure, or attach the cure in a function "
            "and name module:function."
        )
    return loaded


def _load_hf(what: str, name: str, random_weights: bool, dtype: torch.dtype | None) -> tuple[LoadedModel, list[str]]:
    """Load a model of transformers or of sentence-transformers; return it and the weights of cures without a place."""
    origin, note = Origin(what), ""
    modules = None if random_weights else find_modules(origin)
    if modules is not None:
        model = load_sentence_model(origin, modules, dtype)
        if model is not None:
            return LoadedModel(model, name, what), []
        note = f'{name} makes sentence embeddings; to measure them too: pip install "uncollapse[st]".'
    model, filled, cures = hf_models.load_hf_model(origin, random_weights=random_weights, dtype=dtype)
    return LoadedModel(model, name, what, tuple(filled), note), cures


def _names_function(what: str) -> bool:
    return ":" in what and not what.startswith(("timm:", hf_models.PACKAGE)) and not expand_user(what).exists()


def _build(what: str) -> LoadedModel:
    with fixed_seed():
        model = import_function(what)()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{what} must return a torch.nn.Module, got {type(model).__name__}.")
    origin = getattr(model, "name_or_path", None)  # HuggingFace models know where they came from
    return LoadedModel(model, what, origin if isinstance(origin, str) and origin else None)


def _load_saved_cure(model: nn.Module, folder: Path, random_weights: bool, load_cure: LoadCure | None) -> None:
    """Attach the cures that were saved next to a model."""
    if load_cure is None:
        raise UsageError(f"{folder} has a saved cure ({CURE_FILE}); pass load_cure=uncollapse.load_cure to attach it.")
    try:
        load_cure(model, folder)
    except (ValueError, OSError) as error:
        raise UsageError(f"The cure saved with the model cannot be loaded: {error}") from error
    if random_weights:
        reset_cures(model)


def _folder_name(path: Path) -> str:
    """Return the end of a path that identifies it: "runs/bert/checkpoint-500" is "bert/checkpoint-500"."""
    parts = path.resolve().with_suffix("").parts if path.suffix == ".gguf" else path.resolve().parts
    vague = re.fullmatch(r"model|final|last|best|checkpoint.*|weights|\d+", parts[-1])
    return "/".join(parts[-2:]) if vague and len(parts) > 2 else parts[-1]


def import_function(spec: str) -> Callable[[], Any]:
    """Import a function of the user: "module:function" or "file.py:function".

    The current directory is importable, and so is the directory of a file.
    """
    place, _, name = spec.rpartition(":")
    if not place and name.endswith(".py") and not Path(name).is_file():
        raise UsageError(f"There is no file {name}.{similar_file(Path(name))}")
    if not place or not name:
        raise UsageError(f"{spec!r} does not name a function; write module:function or file.py:function.")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = did_you_mean(name, names)
        raise UsageError(f"{place} has no function {name!r}.{hint} It has: {', '.join(names) or 'none'}.")
    function: Callable[[], Any] = found
    return function


def _import_module(place: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place + ".").startswith(error.name + "."):
            raise  # the module exists, but something that it imports does not
        raise UsageError(f"There is no module {place!r}, neither here nor installed.") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"There is no file {path}.{similar_file(path)}")
    _make_importable(path.resolve().parent)
    name = path.stem if path.stem not in sys.modules else f"_uncollapse_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look there
    spec.loader.exec_module(module)
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


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
    with quiet_loading(origin), fixed_seed(), bounded_size(origin.place):
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
