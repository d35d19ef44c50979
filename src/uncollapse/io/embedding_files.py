"""Open files of embeddings that may be larger than memory.

Files are read in parts. Memory-mapped files are opened again for each part, which frees the memory of the last one.
"""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy

from uncollapse.errors import UsageError, file_errors, import_optional
from uncollapse.io import tensor_files
from uncollapse.io.embedding_rows import FEATURES, Rows, choose_key, part_size

WILDCARDS = "*?["


def open_rows(path: Path, key: str | None = None) -> Rows:
    """Open the embeddings of a .npy, .npz, .parquet or .safetensors file, or of all files of a folder or a pattern.

    Args:
        path: The file, a folder of files of one kind, or a pattern such as `parts/*.parquet`. Several files are read in
            the order of their names.
        key: The array of a .npz or .safetensors file, or the column of a .parquet file, if there are several. If a
            parquet file has no column of lists, all its floating-point columns are the features.
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
    return Rows(words, count, found[0].dim, lambda first, last: _read_all(found, first, last), paths)


def _files(path: Path) -> list[Path]:
    if path.is_file() or not (path.is_dir() or any(letter in path.name for letter in WILDCARDS)):
        return [path]
    there = path.iterdir() if path.is_dir() else path.parent.glob(path.name)
    files = sorted(file for file in there if file.suffix in READERS and file.name[0] not in "._")
    if not files:
        raise UsageError(f"There is no {', '.join(READERS)} file in {path}.")
    if len({file.suffix for file in files}) > 1:
        raise UsageError(f"The files of {path} must be of one kind, got {files[0].name} and others; use a pattern.")
    return files


def _open_file(path: Path, key: str | None) -> Rows:
    if not path.is_file():
        raise UsageError(f"There is no file {path}.")
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


def _npy(path: Path, key: str | None) -> Rows:
    if key is not None:
        raise UsageError(f"{path.name} holds one array, which has no name; leave out --key.")
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

    return Rows(path.name, count, dim, read_mapped if by_column else read, (path,))


def _npz(path: Path, key: str | None) -> Rows:
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

    return Rows(words, count, dim, read, (path,))


def _safetensors(path: Path, key: str | None) -> Rows:
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

    return Rows(words, count, dim, read, (path,))


def _spans(first: int, last: int, dim: int) -> Iterator[slice]:
    step = part_size(dim)
    return (slice(start, min(start + step, last)) for start in range(first, last, step))


def _shape(words: str, shape: tuple[int, ...], numbers: bool) -> tuple[int, int]:
    if len(shape) != 2 or not numbers:
        got = f"shape {shape}" if numbers else "something else"
        raise UsageError(f"{words} must hold numbers of shape (rows, features), got {got}.")
    return shape[0], shape[1]


def _parquet(path: Path, column: str | None) -> Rows:
    """Open the embeddings of a column of lists; without one, of all floating-point columns together."""
    types: Any = import_optional("pyarrow", "data").types
    with _open_parquet(path) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
        _check_widths(path, file.metadata)
    lists = [field.name for field in schema if _is_list(field.type, types)]
    if column is None and not lists:
        return _of_columns(path, count, [field.name for field in schema if types.is_floating(field.type)])
    name = choose_key(path.name, column, lists)
    words = f"{path.name}, {name}"
    begin = next(_record_batches(path, [name], 0, min(1, count), 1), None)
    dim = 0 if begin is None else len(_lists(begin[1].column(0), words, 0, None)[0])

    def read(first: int, last: int) -> Iterator[Any]:
        for row, batch in _record_batches(path, [name], first, last, part_size(dim)):
            yield _lists(batch.column(0), words, row, dim)

    return Rows(words, count, dim, read, (path,))


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    parquet: Any = import_optional("pyarrow.parquet", "data")
    with file_errors(path, "parquet file"), parquet.ParquetFile(path) as file:
        yield file


def _is_list(kind: Any, types: Any) -> bool:
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def _of_columns(path: Path, count: int, names: list[str]) -> Rows:
    if len(names) < 2:
        raise UsageError(f"{path.name} has neither a column of lists of numbers nor several floating-point columns.")
    words = f"{path.name}, {len(names)} columns"

    def read(first: int, last: int) -> Iterator[Any]:
        for row, batch in _record_batches(path, names, first, last, part_size(len(names))):
            _check_filled(words, row, *batch.columns)
            yield numpy.stack([column.to_numpy(zero_copy_only=False) for column in batch.columns], axis=1)

    return Rows(words, count, len(names), read, (path,))


def _record_batches(path: Path, columns: list[str], first: int, last: int, size: int) -> Iterator[tuple[int, Any]]:
    """Yield batches of at most `size` rows from row `first` to before `last`, each with the number of its first row."""
    with _open_parquet(path) as file:
        begin = 0
        for group in range(file.metadata.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if begin < last and begin + count > first:
                yield from _slice_batches(file.iter_batches(size, [group], columns), begin, first, last)
            begin += count


def _slice_batches(batches: Any, row: int, first: int, last: int) -> Iterator[tuple[int, Any]]:
    """Yield the parts of batches between two rows; the first batch begins with row `row`."""
    for batch in batches:
        start, end = max(first - row, 0), min(last - row, len(batch))
        if start < end:
            yield row + start, batch.slice(start, end - start)
        row += len(batch)


def _check_widths(path: Path, metadata: Any) -> None:
    """Raise if a row has more numbers in a column than embeddings have: a few bytes can declare billions of them."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if not 0 <= column.num_values <= FEATURES * max(group.num_rows, 1):
                raise UsageError(
                    f"{path.name} declares {column.num_values:,} numbers for {group.num_rows:,} rows in "
                    f"{column.path_in_schema}; at most {FEATURES:,} features are allowed."
                )


def _lists(column: Any, words: str, first: int, dim: int | None) -> Any:
    """Return a column of lists as an array (m, d); all lists must have the length `dim`, or that of the first one."""
    _check_filled(words, first, column)
    compute: Any = import_optional("pyarrow.compute", "data")
    lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
    dim = int(lengths[0]) if dim is None else dim
    if (lengths != dim).any():
        row = int((lengths != dim).nonzero()[0][0])
        raise UsageError(f"{words}: row {first + row} has {lengths[row]} numbers, and the first row has {dim}.")
    flat = column.flatten()
    _check_filled(words, first, flat)
    return numpy.array(flat.to_numpy(zero_copy_only=False)).reshape(-1, dim)


def _check_filled(words: str, first: int, *columns: Any) -> None:
    if any(column.null_count for column in columns):
        raise UsageError(f"{words}: there are empty entries from row {first} on; remove rows without an embedding.")


READERS: dict[str, Callable[[Path, str | None], Rows]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
}
