"""Read and write embeddings in JSON lines, torch files and flat indexes of FAISS."""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch import Tensor

from uncollapse.errors import UsageError, file_errors
from uncollapse.io import tensor_files
from uncollapse.io.embedding_rows import FEATURES, Rows, choose_key, part_size, refuse_key

LONGEST_LINE = 2**24  # bytes of a row
Change = Callable[[Tensor], Tensor]


def read_lines(path: Path, key: str | None) -> Rows:
    """Open a file with one JSON value per line: a list of numbers, or an object with one."""
    with file_errors(path, f"{path.suffix} file"):
        first = next(_lines(path), None)
        count = sum(1 for _ in _lines(path))
        head = None if first is None else json.loads(first)
    if isinstance(head, dict):
        lists = [name for name, value in head.items() if _is_vector(value)]
        key = choose_key(path.name, key, lists)
    else:
        refuse_key(f"{path.name} holds one list per line", key)
    words = path.name if key is None else f"{path.name}, {key}"
    dim = len(_vector(words, 0, head, key, None)) if head is not None else 0

    def read(begin: int, end: int) -> Iterator[Any]:
        for row, values in _parse_rows(path, begin, end, part_size(dim)):
            vectors = [_vector(words, row + number, value, key, dim) for number, value in enumerate(values)]
            yield numpy.array(vectors, numpy.float64)

    return Rows(words, count, dim, read, (path,), key=key)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                raise UsageError(f"{path.name} has a line of more than {LONGEST_LINE:,} bytes; is it JSON lines?")
            if line.strip():
                yield line


def _parse_rows(path: Path, begin: int, end: int, size: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield parsed lines from one row to before another, at most `size` at a time, with the number of the first."""
    values: list[Any] = []
    with file_errors(path, f"{path.suffix} file"):
        for row, line in enumerate(_lines(path)):
            if begin <= row < end:
                values.append(json.loads(line))
            if values and (len(values) == size or row + 1 >= end):
                yield row + 1 - len(values), values
                values = []
            if row + 1 >= end:
                return


def _is_vector(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(number) in (int, float) for number in value)


def _vector(words: str, row: int, value: Any, key: str | None, dim: int | None) -> list[float]:
    vector: Any = value if key is None else value.get(key) if isinstance(value, dict) else None
    if not _is_vector(vector) or (dim is not None and len(vector) != dim):
        got = f"{len(vector)} numbers" if _is_vector(vector) else "something else"
        expected = "a list of numbers" if dim is None else f"a list of {dim} numbers, as the first row has"
        raise UsageError(f"{words}: row {row} must have {expected}, got {got}.")
    found: list[float] = vector
    return found


def write_lines(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    """Write the lines with changed embeddings; the other entries of each object stay."""
    for row, values in _parse_rows(source.paths[0], 0, source.count, part_size(source.dim)):
        given = [_vector(source.words, row + n, value, source.key, source.dim) for n, value in enumerate(values)]
        for value, vector in zip(values, change(torch.tensor(given, dtype=torch.float64)).tolist(), strict=True):
            changed = vector if source.key is None else value | {source.key: vector}
            file.write(json.dumps(changed, ensure_ascii=False).encode() + b"\n")


def read_torch(path: Path, key: str | None) -> Rows:
    """Open a tensor (rows, features) of a torch file, which is read as a whole, without running anything in it."""
    content = tensor_files.read_torch_file(path)
    if not isinstance(content, Tensor):
        named = content if isinstance(content, dict) else {}
        there = [str(name) for name, value in named.items() if isinstance(value, Tensor) and value.dim() == 2]
        key = choose_key(path.name, key, there)
        content = named[key]
    else:
        refuse_key(f"{path.name} holds one tensor", key)
    words = path.name if key is None else f"{path.name}, {key}"
    if content.dim() != 2 or content.is_complex() or content.dtype == torch.bool or content.layout != torch.strided:
        raise UsageError(f"{words} must hold numbers of shape (rows, features), got {tuple(content.shape)}.")
    rows: Tensor = content.detach()

    def read(first: int, last: int) -> Iterator[Any]:
        for start in range(first, last, part_size(rows.shape[1])):
            yield rows[start : min(start + part_size(rows.shape[1]), last)].clone()

    names = {torch.float16: "float16", torch.float64: "float64"}
    dtype = names.get(rows.dtype, "float32")
    return Rows(words, rows.shape[0], rows.shape[1], read, (path,), key=key, dtype=dtype)


def write_torch(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    """Write the changed tensor under the name that it had."""
    rows = torch.cat([change(part) for part in source.parts()]).to(getattr(torch, source.dtype))
    torch.save(rows if source.key is None else {source.key: rows}, file)


@dataclass(frozen=True)
class _Flat:
    """A flat index in a file: where its vectors begin, and what to repeat before them."""

    begin: int
    count: int
    dim: int
    code: bytes
    metric: bytes


FLAT = (b"IxF2", b"IxFI", b"IxFl")  # L2, inner product, other metrics
WITH_IDS = (b"IxMp", b"IxM2")  # an index and the ids of its vectors
HEAD = struct.Struct("<iqqq?i")  # dimensions, vectors, two unused numbers, whether it is trained, metric
UNUSED = 1 << 20


def read_flat_index(path: Path, key: str | None) -> Rows:
    """Open the vectors of a flat FAISS index; the library itself is not needed."""
    refuse_key(f"{path.name} is an index", key)
    with file_errors(path, "FAISS index"), path.open("rb") as file:
        flat = _read_head(file, path)

    def read(first: int, last: int) -> Iterator[Any]:
        with file_errors(path, "FAISS index"), path.open("rb", buffering=0) as file:
            file.seek(flat.begin + 4 * first * flat.dim)
            for start in range(first, last, part_size(flat.dim)):
                rows = min(part_size(flat.dim), last - start)
                yield numpy.fromfile(file, "<f4", rows * flat.dim).reshape(rows, flat.dim)

    return Rows(path.name, flat.count, flat.dim, read, (path,))


def _read_head(file: IO[bytes], path: Path) -> _Flat:
    code = file.read(4)
    if code in WITH_IDS:
        _read_numbers(file)
        code = file.read(4)
    if code not in FLAT:
        raise UsageError(
            f"{path.name} is not a flat index of FAISS, which stores vectors as they are. Write them with "
            "numpy.save('rows.npy', index.reconstruct_n(0, index.ntotal)), and measure that file."
        )
    dim, count, metric = _read_numbers(file)
    (entries,) = struct.unpack("<Q", file.read(8))
    begin = file.tell()
    if not 0 < dim <= FEATURES or count < 0 or entries != count * dim or begin + 4 * entries > path.stat().st_size:
        raise ValueError("sizes that do not fit")
    return _Flat(begin, count, dim, code, metric)


def _read_numbers(file: IO[bytes]) -> tuple[int, int, bytes]:
    """Return dimensions, vectors and the bytes of the metric at the head of an index."""
    dim, count, _, _, _, metric = HEAD.unpack(file.read(HEAD.size))
    return dim, count, struct.pack("<i", metric) + (file.read(4) if metric > 1 else b"")


def write_flat_index(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    """Write a flat index of the changed vectors with the same metric."""
    with source.paths[0].open("rb") as old:
        if old.read(4) in WITH_IDS:
            raise UsageError(f"{source.words} has ids of its own; write the vectors as .npy and build the index again.")
        old.seek(0)
        flat = _read_head(old, source.paths[0])
    file.write(flat.code + struct.pack("<iqqq?", dim, source.count, UNUSED, UNUSED, True) + flat.metric)
    file.write(struct.pack("<Q", source.count * dim))
    for rows in source.parts():
        file.write(numpy.ascontiguousarray(change(rows).numpy(), "<f4").tobytes())


READERS: dict[str, Callable[[Path, str | None], Rows]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), read_lines),
    **dict.fromkeys((".pt", ".pth"), read_torch),
    **dict.fromkeys((".faiss", ".index"), read_flat_index),
}
WRITERS: dict[str, Callable[[Rows, IO[bytes], Change, int], None]] = {
    **dict.fromkeys((".jsonl", ".ndjson"), write_lines),
    **dict.fromkeys((".pt", ".pth"), write_torch),
    **dict.fromkeys((".faiss", ".index"), write_flat_index),
}
