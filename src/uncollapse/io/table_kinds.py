"""Open tables in parquet, Arrow and delimited files, and write them, record batch by record batch."""

import csv as plain_csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from uncollapse.errors import UsageError, file_errors, import_optional
from uncollapse.io.embedding_rows import FEATURES

LONGEST_LINE = 2**24  # bytes of a row of a delimited file
SAMPLE = 100  # rows by which the columns of a delimited file are told apart
Batches = Iterator[tuple[int, Any]]


@dataclass(frozen=True)
class TableFile:
    """A table in a file.

    schema: of its columns. count: of its rows. batches: columns (None for all), first row, last row and size -> record
    batches of at most `size` rows, each with the number of its first row. writer: (open file, schema) -> a writer.
    """

    path: Path
    schema: Any
    count: int
    batches: Callable[[list[str] | None, int, int, int], Batches]
    writer: Callable[[IO[bytes], Any], Any]


def open_table(path: Path) -> TableFile:
    """Open the table of a file, by its suffix."""
    return KINDS[path.suffix](path)


def _parquet(path: Path) -> TableFile:
    parquet: Any = import_optional("pyarrow.parquet", "data")
    with _open_parquet(path) as file:
        schema, count = file.schema_arrow, file.metadata.num_rows
        _check_widths(path, file.metadata)
    return TableFile(path, schema, count, partial(_parquet_batches, path), parquet.ParquetWriter)


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    parquet: Any = import_optional("pyarrow.parquet", "data")
    with file_errors(path, "parquet file"), parquet.ParquetFile(path) as file:
        yield file


def _parquet_batches(path: Path, columns: list[str] | None, first: int, last: int, size: int) -> Batches:
    with _open_parquet(path) as file:
        begin = 0
        for group in range(file.metadata.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if begin < last and begin + count > first:
                yield from _slice_batches(file.iter_batches(size, [group], columns), begin, first, last, size)
            begin += count


def _slice_batches(batches: Any, row: int, first: int, last: int, size: int) -> Batches:
    """Yield the parts of batches between two rows; the first batch begins with row `row`."""
    for batch in batches:
        if row >= last:
            return
        for start in range(max(first - row, 0), min(last - row, len(batch)), size):
            yield row + start, batch.slice(start, min(size, last - row - start))
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


def _arrow(path: Path) -> TableFile:
    ipc: Any = import_optional("pyarrow.ipc", "data")
    with file_errors(path, "Arrow file"), _open_arrow(path) as batches:
        schema, count = batches.schema, sum(batch.num_rows for batch in _each(batches))
    return TableFile(path, schema, count, partial(_arrow_batches, path), ipc.new_file)


@contextmanager
def _open_arrow(path: Path) -> Iterator[Any]:
    """Open a file of either Arrow format: with random access, or a stream as `datasets` writes it."""
    arrow: Any = import_optional("pyarrow", "data")
    ipc: Any = import_optional("pyarrow.ipc", "data")
    with arrow.memory_map(str(path)) as source:
        try:
            reader = ipc.open_file(source)
        except arrow.ArrowInvalid:
            source.seek(0)
            reader = ipc.open_stream(source)
        yield reader


def _each(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _arrow_batches(path: Path, columns: list[str] | None, first: int, last: int, size: int) -> Batches:
    with file_errors(path, "Arrow file"), _open_arrow(path) as reader:
        batches = (batch if columns is None else batch.select(columns) for batch in _each(reader))
        for row, batch in _slice_batches(batches, 0, first, last, size):
            batch.validate(full=True)  # offsets of a damaged file would be read as they are
            yield row, batch


def _open_text_table(path: Path) -> TableFile:
    """Open a file of comma- or tab-separated values. Lists may be texts such as "[0.1, 0.2]"."""
    arrow: Any = import_optional("pyarrow", "data")
    with file_errors(path, f"{path.suffix} file"):
        names, has_head = _column_names(path)
        reader = _open_delimited(path, names, has_head, None, arrow)
        head = next(iter(reader), None)
        if head is None:
            raise UsageError(f"{path.name} has no rows below the names of its columns.")
        kinds = _column_kinds(head, arrow)
        again = partial(_delimited_batches, path, names, has_head, kinds)
        count = sum(len(batch) for _, batch in again(names[:1], 0, 2**62, LONGEST_LINE))
    listed = arrow.list_(arrow.float64())
    schema = arrow.schema([(name, listed if kinds[name] == "list" else kinds[name]) for name in names])
    return TableFile(path, schema, count, again, partial(_DelimitedWriter, path))


def _column_names(path: Path) -> tuple[list[str], bool]:
    """Return the names of the columns, f0, f1 … if the first line is a row of numbers, and whether there is a head.

    The numbers 0, 1, 2 … are a head: pandas names columns so.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        line = file.readline(LONGEST_LINE)
    fields = next(plain_csv.reader([line], delimiter=_delimiter(path)), [])
    if not fields or len(fields) > FEATURES or len(line) == LONGEST_LINE:
        raise UsageError(f"{path.name} must have 1 to {FEATURES:,} columns, got {len(fields):,} in its first line.")
    counted = len(fields) > 2 and fields == [str(number) for number in range(len(fields))]
    has_head = counted or not all(map(_is_number, fields))
    if has_head and len(set(fields)) < len(fields):
        raise UsageError(f"{path.name} has two columns of the same name; give each its own.")
    return fields if has_head else [f"f{number}" for number in range(len(fields))], has_head


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix == ".tsv" else ","


def _open_delimited(path: Path, names: list[str], has_head: bool, kinds: dict[str, Any] | None, arrow: Any) -> Any:
    csv: Any = import_optional("pyarrow.csv", "data")
    texts = {name: arrow.string() if kind == "list" else kind for name, kind in (kinds or {}).items()}
    read = csv.ReadOptions(column_names=names, skip_rows=int(has_head), block_size=2 * LONGEST_LINE)
    parse = csv.ParseOptions(delimiter=_delimiter(path), newlines_in_values=True)
    return csv.open_csv(path, read, parse, csv.ConvertOptions(column_types=texts, null_values=["", "NA", "null"]))


def _column_kinds(batch: Any, arrow: Any) -> dict[str, Any]:
    """Return the type of each column: float64 for features, "list" for texts that are lists, or else text.

    A column of whole numbers is one of features if it is named like one with fractions ("dim_3" like "dim_0"). Where
    all numbers are whole, the columns whose kind of name is the most frequent are the features: "dim_0", but not "id".
    """
    types: Any = import_optional("pyarrow", "data").types
    fractions = {_pattern(field.name) for field in batch.schema if types.is_floating(field.type)}
    lists = {field.name for field in batch.schema if types.is_string(field.type) and _has_lists(batch, field.name)}
    whole = Counter(_pattern(field.name) for field in batch.schema if types.is_integer(field.type))
    usual = {pattern for pattern, count in whole.items() if count == max(whole.values())}
    alike = fractions if fractions or lists else usual
    kinds: dict[str, Any] = dict.fromkeys(lists, "list")
    for field in batch.schema:
        is_whole = types.is_integer(field.type) and _pattern(field.name) in alike
        is_feature = types.is_floating(field.type) or is_whole
        kinds.setdefault(field.name, arrow.float64() if is_feature else arrow.string())
    return kinds


def _has_lists(batch: Any, name: str) -> bool:
    texts = batch.column(name).slice(0, SAMPLE).to_pylist()
    return bool(texts) and all(str(text).lstrip().startswith("[") for text in texts)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _delimited_batches(
    path: Path,
    names: list[str],
    has_head: bool,
    kinds: dict[str, Any],
    columns: list[str] | None,
    first: int,
    last: int,
    size: int,
) -> Batches:
    arrow: Any = import_optional("pyarrow", "data")
    with file_errors(path, f"{path.suffix} file"):
        reader = _open_delimited(path, names, has_head, kinds, arrow)
        for row, batch in _slice_batches(reader, 0, first, last, size):
            chosen = {name: batch.column(name) for name in columns or names}
            lists = {name: _parse_lists(c, arrow) for name, c in chosen.items() if kinds[name] == "list"}
            yield row, arrow.record_batch(chosen | lists)


def _parse_lists(column: Any, arrow: Any) -> Any:
    found = [None if text is None else json.loads(text) for text in column.to_pylist()]
    return arrow.array(found, arrow.list_(arrow.float64()))


class _DelimitedWriter:
    """Writes record batches as delimited text, lists as JSON."""

    def __init__(self, path: Path, file: IO[bytes], schema: Any) -> None:
        self._arrow: Any = import_optional("pyarrow", "data")
        csv: Any = import_optional("pyarrow.csv", "data")
        types = self._arrow.types
        self._lists = [f.name for f in schema if types.is_list(f.type) or types.is_fixed_size_list(f.type)]
        text = self._arrow.string()
        plain = self._arrow.schema([(f.name, text if f.name in self._lists else f.type) for f in schema])
        self._writer = csv.CSVWriter(file, plain, write_options=csv.WriteOptions(delimiter=_delimiter(path)))

    def write_table(self, table: Any) -> None:
        for name in self._lists:
            texts = self._arrow.array([json.dumps(row) for row in table.column(name).to_pylist()])
            table = table.set_column(table.schema.get_field_index(name), name, texts)
        self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()


KINDS: dict[str, Callable[[Path], TableFile]] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".csv": _open_text_table,
    ".tsv": _open_text_table,
}
