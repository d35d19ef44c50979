"""Read arrays and weights from .npy, .npz, .safetensors and torch files, and check declared sizes first."""

import math
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor, nn

from uncollapse.errors import UsageError, file_errors

GROWTH = 16  # a file may unpack to so many times its size, and SPARE bytes more: bags of words are mostly zeros
SPARE = 2**28
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(path: Path, wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read arrays of numbers or booleans from a file. Nothing in the file can run."""
    check_growth(path)
    with file_errors(path, ".npz file of numbers"), zipfile.ZipFile(path) as file:
        there = [name.removesuffix(".npy") for name in file.namelist()]
        arrays = {key: read_member(file, key) for key in wanted if key in there}
    missing = [key for key in wanted if key not in arrays]
    if missing:
        raise UsageError(f"{path} must have {' and '.join(wanted)}. It has: {', '.join(there[:20])}.")
    for key, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise UsageError(f"{path} must have numbers in {key}, got {array.dtype}.")
    return arrays


def check_growth(path: Path, spare: int = SPARE, kind: str = ".npz file") -> None:
    """Raise for an archive that would fill the memory when it is unpacked. spare: bytes that are always allowed."""
    with file_errors(path, kind), zipfile.ZipFile(path) as file:
        unpacked = sum(entry.file_size for entry in file.infolist())
    check_unpacked(path, unpacked, spare)


def check_unpacked(path: Path, unpacked: int, spare: int = SPARE) -> None:
    """Raise if a file declares more bytes than is plausible for its size."""
    size = path.stat().st_size
    if unpacked > GROWTH * size + spare:
        raise UsageError(f"{path} has {size:,} bytes and would unpack to {unpacked:,}: no real file does that.")


def read_member(file: zipfile.ZipFile, key: str) -> NDArray[Any]:
    """Read an array of an archive by name; ValueError if it declares more bytes than it has."""
    info = file.getinfo(f"{key}.npy")
    with file.open(info) as stream:
        read_header(stream, info.file_size)
    with file.open(info) as stream:
        array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
    return array


def read_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, Any]:
    """Read shape, order and dtype at the start of a .npy stream of `size` bytes, and stop at its first number."""
    version = npy.read_magic(file)
    if version not in READERS:
        raise ValueError(f"version {version} of the format")
    shape, by_column, dtype = READERS[version](file)
    if dtype.hasobject or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"{dtype} of shape {shape} in {size} bytes")
    return shape, by_column, dtype


WRAPPINGS = ("state_dict", "model_state_dict", "model")  # keys under which training loops save the weights
PREFIXES = ("module.", "_orig_mod.", "model.")  # DataParallel, torch.compile, Lightning


def load_into(model: nn.Module, path: Path) -> None:
    """Load a .safetensors file or a torch file into the model; every weight must match."""
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
    details = [
        f"{len(keys)} {kind} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})" for kind, keys in faults if keys
    ]
    if details:
        raise UsageError(
            f"{path} does not fit {type(model).__name__}: {' and '.join(details)}. "
            "Build the model from which the checkpoint was saved."
        )


def weights_of(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a .safetensors file or a torch file, by the names that the model has for them."""
    return _without_prefixes(_read(path), model)


def _read(path: Path) -> dict[str, Tensor]:
    content = _safetensors(path) if path.suffix == ".safetensors" else read_torch_file(path)
    for wrapping in WRAPPINGS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapping), Mapping):
            content = content[wrapping]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise UsageError(f"{path} has no weights by name; save it as torch.save(model.state_dict(), path).")
    return dict(content)


def _safetensors(path: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UsageError(f"{path} is not a valid safetensors file: {error}.") from error


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save with only tensors and plain containers."""
    with file_errors(path, "torch file"):
        is_packed = zipfile.is_zipfile(path)  # raises for some damaged files
    if is_packed:
        check_growth(path, kind="torch file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} has more than tensors, and other content could run code while it is loaded; "
            "save it as torch.save(model.state_dict(), path)."
        ) from error
    except Exception as error:  # a damaged file raises many kinds of errors
        raise UsageError(f"{path} is not a valid torch file.") from error


def _without_prefixes(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    own = model.state_dict()
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in weights) and not any(key.startswith(prefix) for key in own):
            weights = {key.removeprefix(prefix): tensor for key, tensor in weights.items()}
    return weights


def _more(keys: list[str]) -> str:
    return f", and {len(keys)} more do not fit" if keys else ""
