"""Embeddings in a parquet file: a column of lists, or a column a feature."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from uncollapse.embeddings import PART, Rows, chosen
from uncollapse.loading.errors import UsageError, library

arrow: Any = library("pyarrow", "data")
parquet: Any = library("pyarrow.parquet", "data")
compute: Any = library("pyarrow.compute", "data")


def rows(path: Path, column: str | None) -> Rows:
    """The embeddings of a column of lists; without one, of all floating-point columns together."""
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise UsageError(f"{path} is no intact parquet file.") from error
    with file:
        schema, count = file.schema_arrow, file.metadata.num_rows
    lists = [field.name for field in schema if _is_list(field.type)]
    if column is None and not lists:
        return _of_columns(path, count, [field.name for field in schema if arrow.types.is_floating(field.type)])
    name = chosen(path.name, column, lists)
    words = f"{path.name}, {name}"
    first = next(_record_batches(path, [name], 1), None)
    dim = 0 if first is None else len(_lists(first.column(0), words, 0, None)[0])
    return Rows(words, count, dim, lambda: _list_arrays(path, name, words, dim))


def _is_list(kind: Any) -> bool:
    types = arrow.types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def _of_columns(path: Path, count: int, names: list[str]) -> Rows:
    if len(names) < 2:
        raise UsageError(f"{path.name} has neither a column of lists of numbers nor several floating-point columns.")
    words = f"{path.name}, {len(names)} columns"

    def read() -> Iterator[Any]:
        first = 0
        for batch in _record_batches(path, names, PART):
            _check_filled(words, first, *batch.columns)
            yield numpy.stack([column.to_numpy(zero_copy_only=False) for column in batch.columns], axis=1)
            first += len(batch)

    return Rows(words, count, len(names), read)


def _list_arrays(path: Path, column: str, words: str, dim: int) -> Iterator[Any]:
    first = 0
    for batch in _record_batches(path, [column], PART):
        yield _lists(batch.column(0), words, first, dim)
        first += len(batch)


def _record_batches(path: Path, columns: list[str], size: int) -> Iterator[Any]:
    with parquet.ParquetFile(path) as file:
        yield from file.iter_batches(size, columns=columns)


def _lists(column: Any, words: str, first: int, dim: int | None) -> Any:
    """A column of lists as an array (m, d); all lists must be as long as `dim`, or as the first one."""
    _check_filled(words, first, column)
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
        raise UsageError(f"{words}: there are empty entries from row {first} on; leave out rows without an embedding.")
