"""Files of embeddings -> parts of rows, so that a file may be larger than memory.

Files are opened anew for each part where they are mapped into memory: what has been read is then let go.
"""

import math
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.lib import format as npy
from torch import Tensor

from uncollapse.loading.errors import UsageError

PART = 4096  # rows that are read at a time


@dataclass(frozen=True)
class Rows:
    """The embeddings of a file: how many, how wide, what they are, and how to read them.

    words: the file and the array in it. read: gives arrays (m, d) from the first row to the last, of any m.
    """

    words: str
    count: int
    dim: int
    read: Callable[[], Iterator[Any]]

    def parts(self, size: int = PART) -> Iterator[Tensor]:
        """Tensors (size, d), the last one shorter, in float32, or float64 if the file has that."""
        kept: list[Tensor] = []
        first = 0
        for array in self.read():
            kept.append(_floating(array))
            whole = sum(map(len, kept))
            while whole >= size:
                rows = torch.cat(kept)
                yield self._checked(rows[:size], first)
                kept, first, whole = [rows[size:]], first + size, whole - size
        if rest := [rows for rows in kept if len(rows)]:
            yield self._checked(torch.cat(rest), first)

    def part_count(self, size: int = PART) -> int:
        """How many parts there are."""
        return math.ceil(self.count / size)

    def _checked(self, rows: Tensor, first: int) -> Tensor:
        bad = ~rows.isfinite().all(-1)
        if bool(bad.any()):
            number = first + int(bad.nonzero()[0])
            raise UsageError(f"{self.words}: row {number} holds NaN or infinite numbers; leave such rows out.")
        return rows


def open_rows(path: Path, key: str | None = None) -> Rows:
    """The embeddings in a .npy, .npz, .parquet or .safetensors file.

    Args:
        path: the file.
        key: the array of a .npz or .safetensors file, or the column of a .parquet file, where there are several. A
            parquet file without a column of lists is read with all its floating-point columns as features.
    """
    readers = {".npy": _npy, ".npz": _npz, ".parquet": _parquet, ".safetensors": _safetensors}
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    if path.suffix not in readers:
        raise UsageError(f"{path.name} is of an unknown kind; give one of {', '.join(readers)}.")
    rows = readers[path.suffix](path, key)
    if rows.count == 0 or rows.dim == 0:
        raise UsageError(f"{rows.words} has no embeddings: its shape is ({rows.count}, {rows.dim}).")
    return rows


def _npy(path: Path, key: str | None) -> Rows:
    if key is not None:
        raise UsageError(f"{path.name} holds one array, which has no name; leave out --key.")

    def mapped() -> Any:
        try:
            return numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise UsageError(f"{path} is no intact .npy file of numbers.") from error

    count, dim = _shape(path.name, mapped().shape, mapped().dtype.kind in "fiu")
    return Rows(path.name, count, dim, lambda: (numpy.array(mapped()[span]) for span in _spans(count)))


def _npz(path: Path, key: str | None) -> Rows:
    """An array inside the archive is read as a stream: it is never unpacked as a whole."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            key = chosen(path.name, key, names)
            with archive.open(f"{key}.npy") as file:
                shape, by_column, dtype = _header(file)
    except (zipfile.BadZipFile, ValueError) as error:
        raise error if isinstance(error, UsageError) else UsageError(f"{path} is no intact .npz file.") from error
    words = f"{path.name}, {key}"
    count, dim = _shape(words, shape, dtype.kind in "fiu")
    if by_column:
        raise UsageError(f"{words} is stored column by column and cannot be streamed; save it as a .npy file.")

    def read() -> Iterator[Any]:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            _header(file)
            for span in _spans(count):
                size = (span.stop - span.start) * dim
                yield numpy.frombuffer(file.read(size * dtype.itemsize), dtype).reshape(-1, dim).copy()

    return Rows(words, count, dim, read)


def _header(file: Any) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, order and dtype at the beginning of a .npy stream, which is then at its first number."""
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(file)
    if version not in readers:
        raise ValueError(f"version {version} of the format")
    return readers[version](file)


def _safetensors(path: Path, key: str | None) -> Rows:
    from safetensors import SafetensorError, safe_open

    open_file: Any = safe_open
    try:
        with open_file(path, framework="pt") as file:
            key = chosen(path.name, key, list(file.keys()))
            shape = tuple(file.get_slice(key).get_shape())
            kind = file.get_slice(key).get_dtype()
    except SafetensorError as error:
        raise UsageError(f"{path} is no intact safetensors file.") from error
    words = f"{path.name}, {key}"
    count, dim = _shape(words, shape, kind != "BOOL")

    def read() -> Iterator[Any]:
        for span in _spans(count):
            with open_file(path, framework="pt") as file:
                yield file.get_slice(key)[span].clone()

    return Rows(words, count, dim, read)


def _parquet(path: Path, key: str | None) -> Rows:
    from uncollapse.loading import parquet

    return parquet.rows(path, key)


def _spans(count: int) -> Iterator[slice]:
    return (slice(start, min(start + PART, count)) for start in range(0, count, PART))


def _shape(words: str, shape: tuple[int, ...], numbers: bool) -> tuple[int, int]:
    if len(shape) != 2 or not numbers:
        got = f"shape {shape}" if numbers else "something else"
        raise UsageError(f"{words} must hold numbers of shape (rows, features), got {got}.")
    return shape[0], shape[1]


def chosen(words: str, key: str | None, there: list[str]) -> str:
    """The array that is meant: the one that is named, or the only one."""
    if key is None and len(there) == 1:
        return there[0]
    if key not in there:
        asked = f"has no {key!r}" if key is not None else "holds several arrays"
        raise UsageError(f"{words} {asked}; choose one with --key: {', '.join(there) or 'there are none'}.")
    return key


def _floating(array: Any) -> Tensor:
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(numpy.ascontiguousarray(array))
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
