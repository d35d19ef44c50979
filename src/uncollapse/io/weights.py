"""Weights of a file into a model that was built without them."""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.errors import UsageError, file_errors
from uncollapse.io.arrays import check_growth

WRAPPINGS = ("state_dict", "model_state_dict", "model")  # where training loops put the weights in a larger dictionary
PREFIXES = ("module.", "_orig_mod.", "model.")  # DataParallel, torch.compile, Lightning


def load_into(model: nn.Module, path: Path) -> None:
    """Load a .safetensors file or a torch file into the model; every weight must find its place."""
    weights = weights_of(path, model)
    own = model.state_dict()
    wrong = [key for key in weights if key in own and own[key].shape != weights[key].shape]
    if wrong:
        got, expected = tuple(weights[wrong[0]].shape), tuple(own[wrong[0]].shape)
        raise UsageError(
            f"{path} does not fit {type(model).__name__}: {wrong[0]} has shape {got}, expected {expected}"
            f"{_more(wrong[1:])}. Build the model with the sizes of the checkpoint."
        )
    answer = model.load_state_dict(weights, strict=False)
    faults = [("missing", answer.missing_keys), ("unexpected", answer.unexpected_keys)]
    told = [
        f"{len(keys)} {kind} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})" for kind, keys in faults if keys
    ]
    if told:
        raise UsageError(
            f"{path} does not fit {type(model).__name__}: {' and '.join(told)}. "
            "Build the model from which the checkpoint was saved."
        )


def weights_of(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The weights of a .safetensors file or a torch file by the names that the model has for them."""
    return _without_prefixes(_read(path), model)


def _read(path: Path) -> dict[str, Tensor]:
    content = _safetensors(path) if path.suffix == ".safetensors" else read_torch_file(path)
    for wrapping in WRAPPINGS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapping), Mapping):
            content = content[wrapping]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise UsageError(f"{path} holds no weights by name; save it as torch.save(model.state_dict(), path).")
    return dict(content)


def _safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UsageError(f"{path} is no intact safetensors file: {error}.") from error


def read_torch_file(path: Path) -> Any:
    """What torch.save wrote, tensors and plain containers only."""
    with file_errors(path, "torch file"):
        is_packed = zipfile.is_zipfile(path)  # which raises for some damaged ones
    if is_packed:
        check_growth(path, kind="torch file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} is not a file of tensors alone, and other contents could run code while they are loaded; "
            "save it as torch.save(model.state_dict(), path)."
        ) from error
    except Exception as error:  # a damaged one makes the unpickler raise a dozen kinds
        raise UsageError(f"{path} is no intact torch file.") from error


def _without_prefixes(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    own = model.state_dict()
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in weights) and not any(key.startswith(prefix) for key in own):
            weights = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
    return weights


def _more(keys: list[str]) -> str:
    return f", and {len(keys)} more do not fit" if keys else ""
