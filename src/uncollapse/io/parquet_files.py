"""Read and write embeddings in parquet files, batch by batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch import Tensor

from uncollapse.errors import UsageError, file_errors, import_optional
from uncollapse.io.embedding_rows import FEATURES, Rows, choose_key, part_size


def read_rows(path: Path, column: str | None) -> Rows:
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

    kind = str(schema.field(name).type.value_type)
    dtype = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(kind, "float32")
    return Rows(words, count, dim, read, (path,), key=name, dtype=dtype)


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


def _record_batches(
    path: Path, columns: list[str] | None, first: int, last: int, size: int
) -> Iterator[tuple[int, Any]]:
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


def write_mapped(source: Rows, file: IO[bytes], change: Callable[[Tensor], Tensor]) -> None:
    """Write a copy of a parquet file whose embeddings are changed; all other columns stay as they are.

    Args:
        source: The embeddings of one file, in a column of lists.
        file: An open binary file.
        change: Maps rows (m, d) to rows (m, e).
    """
    if source.key is None:
        raise UsageError(f"{source.words} has one feature per column; put the features into a column of lists.")
    arrow: Any = import_optional("pyarrow", "data")
    parquet: Any = import_optional("pyarrow.parquet", "data")
    path, name, writer = source.paths[0], source.key, None
    for row, batch in _record_batches(path, None, 0, source.count, part_size(source.dim)):
        place = batch.schema.get_field_index(name)
        given = torch.from_numpy(numpy.ascontiguousarray(_lists(batch.column(place), source.words, row, source.dim)))
        new = change(given if given.dtype == torch.float64 else given.float()).numpy().astype(source.dtype)
        lists = arrow.FixedSizeListArray.from_arrays(arrow.array(new.reshape(-1)), new.shape[1])
        table = arrow.Table.from_batches([batch]).set_column(place, name, lists)
        writer = writer or parquet.ParquetWriter(file, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
