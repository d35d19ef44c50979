"""Files of embeddings -> parts of rows, so that a file may be larger than memory.

Files are read piece by piece, and opened anew for each piece where they are mapped into memory: what has been read is
then let go.
"""

import math
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean, file_errors
from uncollapse.io import arrays

PART = 4096  # rows that are read at a time, at most
NUMBERS = 1 << 22  # numbers that are read at a time, at most: wide rows come in smaller parts
FEATURES = 2**17  # at most
WILD = "*?["  # what makes a pattern of a name


@dataclass(frozen=True)
class Rows:
    """The embeddings of one file or several: how many, how wide, what they are, and how to read them.

    words: the file and the array in it. read: gives arrays (m, d), of any m, from one row to before another. paths,
    size: the files, and the bytes in them that have to be read. first: the number of the first row.
    """

    words: str
    count: int
    dim: int
    read: Callable[[int, int], Iterator[Any]]
    paths: tuple[Path, ...]
    size: int
    first: int = 0

    def parts(self, size: int | None = None) -> Iterator[Tensor]:
        """Tensors (size, d), the last one shorter, in float32, or float64 if the file has that."""
        size, kept, first, before = size or part_size(self.dim), [], self.first, self._stamps()
        for array in self.read(self.first, self.first + self.count):
            kept.append(_floating(array))
            while (whole := sum(map(len, kept))) >= size:
                rows = kept[0] if len(kept) == 1 else torch.cat(kept)
                yield self._checked(rows[:size], first)
                kept, first = [rows[size:]] if whole > size else [], first + size
        if rest := [rows for rows in kept if len(rows)]:
            yield self._checked(torch.cat(rest), first)
        if before != self._stamps():
            raise UsageError(f"{self.words} was changed while it was read. Measure it again when nobody writes to it.")

    def part_count(self, size: int | None = None) -> int:
        """How many parts there are."""
        return math.ceil(self.count / (size or part_size(self.dim)))

    def share(self, number: int, of: int) -> "Rows":
        """One of `of` shares in a row that are about the same size, by its number from 0; it may be empty."""
        start, end = (self.count * place // of for place in (number, number + 1))
        size = self.size * (end - start) // self.count
        return replace(self, count=end - start, first=self.first + start, size=size)

    def _stamps(self) -> list[tuple[int, int, int]]:
        """What changes when somebody writes to the files, or puts others in their place."""
        facts = [path.stat() if path.exists() else None for path in self.paths]
        return [(0, 0, 0) if each is None else (each.st_ino, each.st_size, each.st_mtime_ns) for each in facts]

    def _checked(self, rows: Tensor, first: int) -> Tensor:
        if bool(rows.sum().isfinite()):  # one pass: a sum is finite only if all its terms are
            return rows
        bad = ~rows.isfinite().all(-1)
        if bool(bad.any()):  # otherwise only the sum overflowed
            number = first + int(bad.nonzero()[0])
            raise UsageError(f"{self.words}: row {number} holds NaN or infinite numbers; leave such rows out.")
        return rows


def part_size(dim: int) -> int:
    """How many rows are read at a time."""
    return max(1, min(PART, NUMBERS // dim))


def open_rows(path: Path, key: str | None = None) -> Rows:
    """The embeddings in a .npy, .npz, .parquet or .safetensors file, or in all files of a folder or a pattern.

    Args:
        path: the file; or a folder of files of one kind, or a pattern such as `parts/*.parquet`, which are read in the
            order of their names.
        key: the array of a .npz or .safetensors file, or the column of a .parquet file, where there are several. A
            parquet file without a column of lists is read with all its floating-point columns as features.
    """
    found = [_of_file(file, key) for file in _files(path)]
    if len(found) == 1:
        return found[0]
    if other := [rows for rows in found if rows.dim != found[0].dim]:
        raise UsageError(
            f"The files of {path} must have the same number of features, got {found[0].dim} in {found[0].words} "
            f"and {other[0].dim} in {other[0].words}."
        )
    words = f"{path.name or path}, {len(found)} files"
    paths = tuple(file for rows in found for file in rows.paths)
    count, size = sum(rows.count for rows in found), sum(rows.size for rows in found)
    return Rows(words, count, found[0].dim, lambda first, last: _joined(found, first, last), paths, size)


def _files(path: Path) -> list[Path]:
    if path.is_file() or not (path.is_dir() or any(letter in path.name for letter in WILD)):
        return [path]
    there = path.iterdir() if path.is_dir() else path.parent.glob(path.name)
    files = sorted(file for file in there if file.suffix in READERS and file.name[0] not in "._")
    if not files:
        raise UsageError(f"There is no {', '.join(READERS)} file in {path}.")
    if len({file.suffix for file in files}) > 1:
        raise UsageError(f"The files of {path} must be of one kind, got {files[0].name} and others; give a pattern.")
    return files


def _of_file(path: Path, key: str | None) -> Rows:
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
    if path.suffix not in READERS:
        raise UsageError(f"{path.name} is of an unknown kind; give one of {', '.join(READERS)}.")
    rows = READERS[path.suffix](path, key)
    if rows.count < 1 or rows.dim < 1:
        raise UsageError(f"{rows.words} has no embeddings: its shape is ({rows.count}, {rows.dim}).")
    if rows.dim > FEATURES:
        raise UsageError(f"{rows.words} has {rows.dim:,} features; embeddings have {FEATURES:,} at most.")
    return rows


def _joined(found: list[Rows], first: int, last: int) -> Iterator[Any]:
    """Arrays of several files, as if their rows were those of one."""
    for rows in found:
        if first < rows.count and last > 0:
            yield from rows.read(max(0, first), min(rows.count, last))
        first, last = first - rows.count, last - rows.count


def _npy(path: Path, key: str | None) -> Rows:
    if key is not None:
        raise UsageError(f"{path.name} holds one array, which has no name; leave out --key.")
    size, kind = path.stat().st_size, ".npy file of numbers"
    with file_errors(path, kind), path.open("rb") as file:
        shape, by_column, dtype = arrays.header(file, size)
        begin = file.tell()
    count, dim = _shape(path.name, shape, dtype.kind in "fiu")

    def read(first: int, last: int) -> Iterator[Any]:
        """Plain reads: pages of a file that is mapped into memory would count as this program's."""
        with file_errors(path, kind), path.open("rb", buffering=0) as file:
            file.seek(begin + first * dim * dtype.itemsize)
            for span in _spans(first, last, dim):
                yield numpy.fromfile(file, dtype, (span.stop - span.start) * dim).reshape(span.stop - span.start, dim)

    def mapped(first: int, last: int) -> Iterator[Any]:
        for span in _spans(first, last, dim):
            with file_errors(path, kind):
                yield numpy.array(numpy.load(path, mmap_mode="r", allow_pickle=False)[span])

    return Rows(path.name, count, dim, mapped if by_column else read, (path,), size)


def _npz(path: Path, key: str | None) -> Rows:
    """An array inside the archive is read as a stream: it is never unpacked as a whole."""
    with file_errors(path, ".npz file"), zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        key = chosen(path.name, key, names)
        held, size = archive.getinfo(f"{key}.npy").file_size, archive.getinfo(f"{key}.npy").compress_size
        with archive.open(f"{key}.npy") as file:
            shape, by_column, dtype = arrays.header(file, held)
    words = f"{path.name}, {key}"
    count, dim = _shape(words, shape, dtype.kind in "fiu")
    if by_column:
        raise UsageError(f"{words} is stored column by column and cannot be streamed; save it as a .npy file.")

    def read(first: int, last: int) -> Iterator[Any]:
        with file_errors(path, ".npz file"), zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            arrays.header(file, held)
            file.seek(first * dim * dtype.itemsize, 1)
            for span in _spans(first, last, dim):
                numbers = (span.stop - span.start) * dim
                yield numpy.frombuffer(file.read(numbers * dtype.itemsize), dtype, numbers).reshape(-1, dim).copy()

    return Rows(words, count, dim, read, (path,), size)


def _safetensors(path: Path, key: str | None) -> Rows:
    from safetensors import safe_open

    open_file: Any = safe_open
    with file_errors(path, "safetensors file"), open_file(path, framework="pt") as file:
        key = chosen(path.name, key, list(file.keys()))
        shape = tuple(file.get_slice(key).get_shape())
        kind = file.get_slice(key).get_dtype()
    words = f"{path.name}, {key}"
    count, dim = _shape(words, shape, kind.startswith(("F", "BF", "I", "U")))

    def read(first: int, last: int) -> Iterator[Any]:
        for span in _spans(first, last, dim):
            with file_errors(path, "safetensors file"), open_file(path, framework="pt") as file:
                yield file.get_slice(key)[span].clone()

    return Rows(words, count, dim, read, (path,), path.stat().st_size)


def _parquet(path: Path, key: str | None) -> Rows:
    from uncollapse.io import parquet

    return parquet.rows(path, key)


READERS: dict[str, Callable[[Path, str | None], Rows]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
}


def _spans(first: int, last: int, dim: int) -> Iterator[slice]:
    step = part_size(dim)
    return (slice(start, min(start + step, last)) for start in range(first, last, step))


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
        hint = "" if key is None else did_you_mean(key, there)
        raise UsageError(f"{words} {asked}; choose one with --key: {', '.join(there) or 'there are none'}.{hint}")
    return key


def _floating(array: Any) -> Tensor:
    if not isinstance(array, Tensor):
        kind = array.dtype.newbyteorder("=") if array.dtype.itemsize <= 8 else numpy.float64  # torch knows no others
        array = torch.from_numpy(numpy.ascontiguousarray(array, kind))
    tensor: Tensor = array
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
