"""Read files of embeddings that may be larger than memory, and write changed rows into a new file of the same kind.

Files are read and written in parts. Memory-mapped files are opened again for each part, which frees the memory of the
last one.
"""

import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy
from numpy.lib import format as npy
from torch import Tensor

from uncollapse.errors import UsageError, file_errors, similar_file
from uncollapse.io import tensor_files, vector_files
from uncollapse.io.embedding_rows import FEATURES, Rows, choose_key, part_size, refuse_key
from uncollapse.io.files import open_new, read_config

WILDCARDS = "*?["
STATE = "state.json"  # describes a dataset in a folder of `datasets`
TABLES = (".parquet", ".arrow", ".feather", ".csv", ".tsv")
SAFETENSORS = {"F16": "float16", "F32": "float32", "F64": "float64"}
TYPES = {name: short for short, name in SAFETENSORS.items()}
Change = Callable[[Tensor], Tensor]


def open_rows(path: Path, key: str | None = None) -> Rows:
    """Open the embeddings of a file with one of the suffixes in READERS, or of all files of a folder or a pattern.

    Args:
        path: The file, a folder of files of one kind or of `datasets`, or a pattern such as `parts/*.parquet`. Several
            files are read in the order of their names.
        key: The array, tensor, column or entry, if there are several. If a table has no column of lists, all its
            floating-point columns are the features.
    """
    found = [_open_file(file, key) for file in _files(path)]
    if len(found) == 1:
        return found[0]
    if other := [rows for rows in found if rows.dim != found[0].dim]:
        raise UsageError(
            f"The files of {path} must have the same number of features, got {found[0].dim} in {found[0].words} "
            f"and {other[0].dim} in {other[0].words}."
        )
    words = f"{path.name or path}, {len(found)} files"
    paths = tuple(file for rows in found for file in rows.paths)
    count = sum(rows.count for rows in found)
    return replace(found[0], words=words, count=count, read=lambda a, b: _read_all(found, a, b), paths=paths)


def _files(path: Path) -> list[Path]:
    if path.is_file() or not (path.is_dir() or any(letter in path.name for letter in WILDCARDS)):
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(folder.name for folder in path.iterdir() if folder.is_dir()))
        raise UsageError(f"{path} has several splits; name one of its folders: {splits}.")
    if (path / STATE).is_file():
        return _dataset_files(path)
    there = path.iterdir() if path.is_dir() else path.parent.glob(path.name)
    files = sorted(file for file in there if file.suffix in READERS and file.name[0] not in "._")
    if not files:
        where = f"in {path}" if path.is_dir() else f"that matches {path}"
        raise UsageError(f"There is no {', '.join(READERS)} file {where}.")
    if len({file.suffix for file in files}) > 1:
        raise UsageError(f"The files of {path} must be of one kind, got {files[0].name} and others; use a pattern.")
    return files


def _dataset_files(folder: Path) -> list[Path]:
    """Return the files of a folder that `datasets` saved, in the order of their rows."""
    state = read_config(folder / STATE)
    entries = state.get("_data_files") if isinstance(state, dict) else None
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or ()]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UsageError(f"{folder / STATE} names no files of the dataset; save it again with save_to_disk.")
    if state.get("_indices_data_files"):
        raise UsageError(f"{folder} selects some of its rows; save dataset.flatten_indices() to another folder.")
    return [folder / str(name) for name in names]


def _open_file(path: Path, key: str | None) -> Rows:
    if not path.is_file():
        raise UsageError(f"There is no file {path}.{similar_file(path)}")
    if path.suffix not in READERS:
        raise UsageError(f"{path.name} has an unknown suffix; expected one of {', '.join(READERS)}.")
    rows = READERS[path.suffix](path, key)
    if rows.count < 1 or rows.dim < 1:
        raise UsageError(f"{rows.words} has no embeddings: its shape is ({rows.count}, {rows.dim}).")
    if rows.dim > FEATURES:
        raise UsageError(f"{rows.words} has {rows.dim:,} features; at most {FEATURES:,} are allowed.")
    return rows


def _read_all(files: list[Rows], first: int, last: int) -> Iterator[Any]:
    """Yield arrays of several files as if they were one."""
    for rows in files:
        if first < rows.count and last > 0:
            yield from rows.read(max(0, first), min(rows.count, last))
        first, last = first - rows.count, last - rows.count


def _read_npy(path: Path, key: str | None) -> Rows:
    refuse_key(f"{path.name} holds one array", key)
    kind = ".npy file of numbers"
    with file_errors(path, kind), path.open("rb") as file:
        shape, by_column, dtype = tensor_files.read_header(file, path.stat().st_size)
        begin = file.tell()
    count, dim = _shape(path.name, shape, dtype.kind in "fiu")

    def read(first: int, last: int) -> Iterator[Any]:
        """Yield arrays by plain reads: mapped pages would count as memory of this process."""
        with file_errors(path, kind), path.open("rb", buffering=0) as file:
            file.seek(begin + first * dim * dtype.itemsize)
            for span in _spans(first, last, dim):
                yield numpy.fromfile(file, dtype, (span.stop - span.start) * dim).reshape(span.stop - span.start, dim)

    def read_mapped(first: int, last: int) -> Iterator[Any]:
        for span in _spans(first, last, dim):
            with file_errors(path, kind):
                yield numpy.array(numpy.load(path, mmap_mode="r", allow_pickle=False)[span])

    return Rows(path.name, count, dim, read_mapped if by_column else read, (path,), dtype=_float_name(dtype))


def _read_npz(path: Path, key: str | None) -> Rows:
    """Open an array of an archive as a stream, which is never unpacked as a whole."""
    with file_errors(path, ".npz file"), zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        key = choose_key(path.name, key, names)
        size = archive.getinfo(f"{key}.npy").file_size
        with archive.open(f"{key}.npy") as file:
            shape, by_column, dtype = tensor_files.read_header(file, size)
    words = f"{path.name}, {key}"
    count, dim = _shape(words, shape, dtype.kind in "fiu")
    if by_column:
        raise UsageError(f"{words} is stored column by column and cannot be streamed; save it as a .npy file.")

    def read(first: int, last: int) -> Iterator[Any]:
        with file_errors(path, ".npz file"), zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            tensor_files.read_header(file, size)
            file.seek(first * dim * dtype.itemsize, 1)
            for span in _spans(first, last, dim):
                numbers = (span.stop - span.start) * dim
                yield numpy.frombuffer(file.read(numbers * dtype.itemsize), dtype, numbers).reshape(-1, dim).copy()

    return Rows(words, count, dim, read, (path,), key=key, dtype=_float_name(dtype))


def _read_safetensors(path: Path, key: str | None) -> Rows:
    from safetensors import safe_open

    open_file: Any = safe_open
    with file_errors(path, "safetensors file"), open_file(path, framework="pt") as file:
        key = choose_key(path.name, key, list(file.keys()))
        shape = tuple(file.get_slice(key).get_shape())
        kind = file.get_slice(key).get_dtype()
    words = f"{path.name}, {key}"
    count, dim = _shape(words, shape, kind.startswith(("F", "BF", "I", "U")))

    def read(first: int, last: int) -> Iterator[Any]:
        for span in _spans(first, last, dim):
            with file_errors(path, "safetensors file"), open_file(path, framework="pt") as file:
                yield file.get_slice(key)[span].clone()

    return Rows(words, count, dim, read, (path,), key=key, dtype=SAFETENSORS.get(kind, "float32"))


def _float_name(dtype: Any) -> str:
    return dtype.name if dtype.name in SAFETENSORS.values() else "float32"


def _spans(first: int, last: int, dim: int) -> Iterator[slice]:
    step = part_size(dim)
    return (slice(start, min(start + step, last)) for start in range(first, last, step))


def _shape(words: str, shape: tuple[int, ...], numbers: bool) -> tuple[int, int]:
    if len(shape) != 2 or not numbers:
        got = f"shape {shape}" if numbers else "something else"
        raise UsageError(f"{words} must hold numbers of shape (rows, features), got {got}.")
    return shape[0], shape[1]


def _read_table(path: Path, key: str | None) -> Rows:
    from uncollapse.io.table_files import read_rows  # needs pyarrow, which other files do not

    return read_rows(path, key)


READERS: dict[str, Callable[[Path, str | None], Rows]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    **dict.fromkeys(TABLES, _read_table),
    **vector_files.READERS,
}


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
    with open_new(path) as file:
        WRITERS[path.suffix](source, file, change, dim)
    return path


def _arrays(source: Rows, change: Change) -> Iterator[Any]:
    for rows in source.parts():
        yield numpy.ascontiguousarray(change(rows).numpy(), source.dtype)


def _write_npy(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    header = {"descr": npy.dtype_to_descr(numpy.dtype(source.dtype)), "fortran_order": False}
    npy.write_array_header_2_0(file, header | {"shape": (source.count, dim)})
    for array in _arrays(source, change):
        file.write(array.tobytes())


def _write_npz(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    with zipfile.ZipFile(file, "w") as archive, archive.open(f"{source.key}.npy", "w", force_zip64=True) as inner:
        _write_npy(source, inner, change, dim)


def _write_safetensors(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    size = source.count * dim * numpy.dtype(source.dtype).itemsize
    entry = {"dtype": TYPES[source.dtype], "shape": [source.count, dim], "data_offsets": [0, size]}
    header = json.dumps({source.key: entry}).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header)
    for array in _arrays(source, change):
        file.write(array.tobytes())


def _write_table(source: Rows, file: IO[bytes], change: Change, dim: int) -> None:
    from uncollapse.io.table_files import write_mapped  # needs pyarrow, which other files do not

    write_mapped(source, file, change)


WRITERS: dict[str, Callable[[Rows, IO[bytes], Change, int], None]] = {
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".safetensors": _write_safetensors,
    **dict.fromkeys(TABLES, _write_table),
    **vector_files.WRITERS,
}
