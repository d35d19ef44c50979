"""Read and write embeddings in the columns of tables, batch by batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from torch import Tensor

from uncollapse.errors import UsageError, import_optional
from uncollapse.io.embedding_rows import Rows, choose_key, part_size
from uncollapse.io.table_kinds import TableFile, open_table


def read_rows(path: Path, column: str | None) -> Rows:
    """Open the embeddings of a column of lists; without one, of all floating-point columns together."""
    types: Any = import_optional("pyarrow", "data").types
    table = open_table(path)
    lists = [field.name for field in table.schema if _is_list(field.type, types)]
    if column is None and not lists:
        return _of_columns(table, _feature_names(table))
    name = choose_key(path.name, column, lists)
    words = f"{path.name}, {name}"
    begin = next(table.batches([name], 0, min(1, table.count), 1), None)
    dim = 0 if begin is None else len(_lists(begin[1].column(0), words, 0, None)[0])

    def read(first: int, last: int) -> Iterator[Any]:
        for row, batch in table.batches([name], first, last, part_size(dim)):
            yield _lists(batch.column(0), words, row, dim)

    kind = str(table.schema.field(name).type.value_type)
    dtype = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(kind, "float32")
    return Rows(words, table.count, dim, read, (path,), key=name, dtype=dtype)


def _is_list(kind: Any, types: Any) -> bool:
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def _feature_names(table: TableFile) -> list[str]:
    types: Any = import_optional("pyarrow", "data").types
    return [field.name for field in table.schema if types.is_floating(field.type)]


def _of_columns(table: TableFile, names: list[str]) -> Rows:
    path = table.path
    if len(names) < 2:
        raise UsageError(
            f"{path.name} has neither a column of lists of numbers nor several floating-point columns, which is how "
            "embeddings are stored in a table. Texts must be embedded first."
        )
    words = f"{path.name}, {len(names)} columns"

    def read(first: int, last: int) -> Iterator[Any]:
        for row, batch in table.batches(names, first, last, part_size(len(names))):
            yield _stack(batch, words, row)

    return Rows(words, table.count, len(names), read, (path,))


def _stack(batch: Any, words: str, row: int) -> Any:
    """Return columns of numbers as an array (m, d)."""
    _check_filled(words, row, *batch.columns)
    return numpy.stack([column.to_numpy(zero_copy_only=False) for column in batch.columns], axis=1)


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
    """Write a copy of a table whose embeddings are changed; all other columns stay as they are.

    Args:
        source: The embeddings of one file.
        file: An open binary file.
        change: Maps rows (m, d) to rows (m, e). Columns of single features are then f0, f1 … if e ≠ d.
    """
    arrow: Any = import_optional("pyarrow", "data")
    table, writer = open_table(source.paths[0]), None
    for row, batch in table.batches(None, 0, source.count, part_size(source.dim)):
        names = _feature_names(table) if source.key is None else [source.key]
        found = _stack(batch.select(names), source.words, row) if source.key is None else None
        given = _lists(batch.column(names[0]), source.words, row, source.dim) if found is None else found
        rows = torch.from_numpy(numpy.ascontiguousarray(given))
        new = change(rows if rows.dtype == torch.float64 else rows.float()).numpy().astype(source.dtype)
        changed = _replace(arrow.Table.from_batches([batch]), names, new, arrow, source.key is not None)
        writer = writer or table.writer(file, changed.schema)
        writer.write_table(changed)
    if writer is not None:
        writer.close()


def _replace(table: Any, names: list[str], new: Any, arrow: Any, as_list: bool) -> Any:
    """Return a table with new embeddings in place of its columns of these names."""
    if as_list:
        lists = arrow.FixedSizeListArray.from_arrays(arrow.array(new.reshape(-1)), new.shape[1])
        return table.set_column(table.schema.get_field_index(names[0]), names[0], lists)
    titles = names if new.shape[1] == len(names) else [f"f{number}" for number in range(new.shape[1])]
    for title, values in zip(titles, new.T, strict=True):
        column = arrow.array(numpy.ascontiguousarray(values))
        place = table.schema.get_field_index(title)
        table = table.append_column(title, column) if title not in names else table.set_column(place, title, column)
    return table if titles is names else table.drop_columns([name for name in names if name not in titles])
