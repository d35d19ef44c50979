"""Arrays of .npy and .npz files, numbers only; what a file declares is compared with what it holds before that."""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from numpy.lib import format as npy
from numpy.typing import NDArray

from uncollapse.errors import UsageError, file_errors

GROWTH = 16  # times its size a file may unpack to, and SPARE bytes: bags of words are mostly zeros
SPARE = 2**28
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(path: Path, wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The wanted arrays of a file, which are numbers or truth values. Nothing in it can run."""
    check_growth(path)
    with file_errors(path, ".npz file of numbers"), zipfile.ZipFile(path) as file:
        there = [name.removesuffix(".npy") for name in file.namelist()]
        arrays = {key: member(file, key) for key in wanted if key in there}
    missing = [key for key in wanted if key not in arrays]
    if missing:
        raise UsageError(f"{path} must have {' and '.join(wanted)}. There are: {', '.join(there[:20])}.")
    for key, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise UsageError(f"{path} must have numbers in {key}, got {array.dtype}.")
    return arrays


def check_growth(path: Path, spare: int = SPARE, kind: str = ".npz file") -> None:
    """Raise for an archive that would fill the memory when it is unpacked. spare: bytes that any of them may have."""
    with file_errors(path, kind), zipfile.ZipFile(path) as file:
        unpacked = sum(entry.file_size for entry in file.infolist())
    check_unpacked(path, unpacked, spare)


def check_unpacked(path: Path, unpacked: int, spare: int = SPARE) -> None:
    """Raise if a file stands for more bytes than such files do."""
    size = path.stat().st_size
    if unpacked > GROWTH * size + spare:
        raise UsageError(f"{path} has {size:,} bytes and would unpack to {unpacked:,}: no file of its kind does that.")


def member(file: zipfile.ZipFile, key: str) -> NDArray[Any]:
    """The array of this name in an archive; ValueError if it declares more than there is."""
    info = file.getinfo(f"{key}.npy")
    with file.open(info) as stream:
        header(stream, info.file_size)
    with file.open(info) as stream:
        array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
    return array


def header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, order and dtype at the beginning of a .npy stream of `size` bytes, which is then at its first number."""
    version = npy.read_magic(file)
    if version not in READERS:
        raise ValueError(f"version {version} of the format")
    shape, by_column, dtype = READERS[version](file)
    if dtype.hasobject or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"{dtype} of shape {shape} in {size} bytes")
    return shape, by_column, dtype
