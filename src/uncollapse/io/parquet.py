"""Read embeddings from a parquet file: one column of lists, or one column per feature."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from uncollapse.errors import UsageError, file_errors, import_optional
from uncollapse.io.embedding_rows import FEATURES, Rows, choose_key, part_size

arrow: Any = import_optional("pyarrow", "data")
parquet: Any = import_optional("pyarrow.parquet", "data")
compute: Any = import_optional("pyarrow.compute", "data")

KIND = "parquet file"


def rows(path: Path, column: str | None) -> Rows:
    """The embeddings of a column of lists; without one, of all floating-point columns together."""
    with file_errors(path, KIND), parquet.ParquetFile(path) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
        _check_widths(path, file.metadata)
    lists = [field.name for field in schema if _is_list(field.type)]
    if column is None and not lists:
        return _of_columns(path, count, [field.name for field in schema if arrow.types.is_floating(field.type)])
    name = choose_key(path.name, column, lists)
    words = f"{path.name}, {name}"
    begin = next(_record_batches(path, [name], 0, min(1, count), 1), None)
    dim = 0 if begin is None else len(_lists(begin[1].column(0), words, 0, None)[0])

    def read(first: int, last: int) -> Iterator[Any]:
        for row, batch in _record_batches(path, [name], first, last, part_size(dim)):
            yield _lists(batch.column(0), words, row, dim)

    return Rows(words, count, dim, read, (path,))


def _is_list(kind: Any) -> bool:
    types = arrow.types
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
    """Batches of at most `size` rows from row `first` to before `last`, each with the number of its first row."""
    with file_errors(path, KIND), parquet.ParquetFile(path) as file:
        begin = 0
        for group in range(file.metadata.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if begin < last and begin + count > first:
                yield from _within(file.iter_batches(size, [group], columns), begin, first, last)
            begin += count


def _within(batches: Any, row: int, first: int, last: int) -> Iterator[tuple[int, Any]]:
    """What of batches, of which the first begins with row `row`, lies between two rows."""
    for batch in batches:
        start, end = max(first - row, 0), min(last - row, len(batch))
        if start < end:
            yield row + start, batch.slice(start, end - start)
        row += len(batch)


def _check_widths(path: Path, metadata: Any) -> None:
    """Raise if a row has more numbers in a column than embeddings have: a few bytes can stand for billions of them."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if not 0 <= column.num_values <= FEATURES * max(group.num_rows, 1):
                raise UsageError(
                    f"{path.name} declares {column.num_values:,} numbers for {group.num_rows:,} rows in "
                    f"{column.path_in_schema}; embeddings have {FEATURES:,} features at most."
                )


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
