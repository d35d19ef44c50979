"""Write embeddings that were changed into a new file of the same kind, part by part."""

import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy
from numpy.lib import format as npy
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.io import files, vector_files
from uncollapse.io.embedding_files import SAFETENSORS, TABLES
from uncollapse.io.embedding_rows import Rows

TYPES = {name: short for short, name in SAFETENSORS.items()}
Change = Callable[[Tensor], Tensor]


def check_target(source: Rows, path: Path) -> None:
    """Raise a UsageError if the rows cannot be written to this path."""
    given = source.paths[0]
    if len(source.paths) > 1:
        raise UsageError(
            f"{source.words} are several files; change them one by one, or put them into one: "
            "datasets.load_from_disk(folder).to_parquet(file) for a dataset."
        )
    if path.suffix != given.suffix:
        raise UsageError(f"The new file must be of the same kind, {given.suffix}, got {path.name}.")
    if path.exists() and path.samefile(given):
        raise UsageError(f"{path} is the file that is read; give the new one another name.")


def write_changed(source: Rows, path: Path, change: Change, dim: int) -> Path:
    """Write all rows, changed, to a new file in the type of numbers of the old one; it is never half written.

    Args:
        source: The embeddings of one file.
        path: The new file, with the suffix of the old one.
        change: Maps rows (m, d) to rows (m, dim).
        dim: The number of features after the change.
    """
    check_target(source, path)
    with files.open_new(path) as file:
        WRITERS[path.suffix](source, file, change, dim)
    return path


def _arrays(source: Rows, change: Change) -> Iterator[Any]:
    for rows in source.parts():
        yield numpy.ascontiguousarray(change(rows).numpy(), source.dtype)


def _npy(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    header = {"descr": npy.dtype_to_descr(numpy.dtype(source.dtype)), "fortran_order": False}
    npy.write_array_header_2_0(file, header | {"shape": (source.count, dim)})
    for array in _arrays(source, change):
        file.write(array.tobytes())


def _npz(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    with zipfile.ZipFile(file, "w") as archive, archive.open(f"{source.key}.npy", "w", force_zip64=True) as inner:
        _npy(source, inner, change, dim)


def _safetensors(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    size = source.count * dim * numpy.dtype(source.dtype).itemsize
    entry = {"dtype": TYPES[source.dtype], "shape": [source.count, dim], "data_offsets": [0, size]}
    header = json.dumps({source.key: entry}).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header)
    for array in _arrays(source, change):
        file.write(array.tobytes())


def _table(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    from uncollapse.io.table_files import write_mapped  # needs pyarrow, which other files do not

    write_mapped(source, file, change)


WRITERS: dict[str, Callable[[Rows, IO[bytes], Change, int], None]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    **dict.fromkeys(TABLES, _table),
    **vector_files.WRITERS,
}
