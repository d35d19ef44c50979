"""Read what a recipe states as data from the TOML files in its folder: papers' numbers, tables, presets and grids.

`paper.toml` has the tables of results and the papers' numbers in them; `grids.toml` has presets, quick settings and
sweeps. Everything is checked against the recipe's config when it is read. A recipe uses them like this::

    DATA = recipe_data.read(__package__, Config, row_of=variant)
    RECIPE = Recipe(..., tables=DATA.tables, grids=DATA.grids, presets=DATA.presets, quick=DATA.quick)

A second recipe in the same folder names its own files: ``read(__package__, Config, prefix="circle_")`` reads
`circle_paper.toml` and `circle_grids.toml`. Either file may be absent.

`paper.toml`::

    [shared]                                # arguments of `PaperTable` that all tables have
    groups = "data"
    rows = "norm"
    columns = "layers"

    [tables.table3]                         # one section per table; the first is the default
    title = "Test accuracy of deep GCNs"
    where = { missing = 0.0 }               # which results belong to it
    protocol = { select = "last" }          # settings of the paper, the others at their defaults; or a preset's name
    open = ["scale"]                        # fields that the protocol leaves open
    claim = "contra_norm"                   # the row that the summary counts
    contrasts = [                           # row − rival, seed by seed: one family of tests
        { row = "contra_norm", rival = "none", columns = [4] },
        { rival = "layer_norm" },           # every other row, in all columns
    ]
    names = { cora = "Cora" }               # what plots call it
    command_only = { pubmed = "uncollapse …" }  # groups too large to be run here; the table says so

    [tables.table3.published]
    source = "ContraNorm, Table 3"
    runs = 5                                # that its means and deviations are of, if it says so
    columns = [2, 4]
    [tables.table3.published.cells.cora]    # one section per group, one line per row, one entry per column
    none = ["81.75 ± 0.51", 72.61]
    contra_norm = [79.75, ""]               # "": the paper has no number here

`grids.toml`::

    [bases.deit]                            # settings that others build on
    epochs = 300
    [presets.paper]                         # `--preset paper`
    base = "deit"                           # a base or another preset, whose settings come first
    cure = "contra_norm"
    [quick]                                 # `--quick`
    epochs = 2

    [[variants.cures]]                      # grids that several sweeps share
    cure = "none"
    [[variants.cures]]
    cure = "contra_norm"
    scale = [0.1, 0.2]
    choose = ["scale"]                      # on validation, see `Grid`; `by` names another metric
    seeds_to_choose = 2                     # seeds of the choice; 1 if absent

    [[grids.small]]                         # `uncollapse sweep RECIPE small`
    base = "paper"
    variants = "cures"                      # one grid for each
    seed = [0, 1, 2]                        # several values: all combinations, in the order of the fields
    [grids.all]
    join = ["small", "large"]               # the grids of other sweeps

A field whose own type is a tuple takes a list of lists in a grid.
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.config.fields import parse_values
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.tables.paper_table import Contrast, PaperTable, Published

Settings = dict[str, Any]
RowOf = Callable[[Mapping[str, Any]], str]
OPTIONS = ("choose", "by", "seeds_to_choose")  # of a grid, next to the fields


@dataclass(frozen=True)
class RecipeData:
    """The tables, presets, quick settings and grids of a recipe."""

    tables: Mapping[str, PaperTable] = field(default_factory=dict)
    presets: Mapping[str, Settings] = field(default_factory=dict)
    quick: Settings | None = None
    grids: Mapping[str, tuple[Grid, ...]] = field(default_factory=dict)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Section = TypeVar("Section", bound=_Section)
Entry = TypeVar("Entry")


class _Published(_Section):
    columns: list[int | float | str]
    cells: dict[str, dict[str, list[float | str]]]
    source: str = ""
    runs: int | None = None


class _Contrast(_Section):
    rival: int | float | str
    row: int | float | str | None = None
    columns: list[int | float | str] = []


class _Table(_Section):
    title: str
    groups: str
    rows: str
    columns: str
    where: Settings = {}
    metric: str = "test"
    by: str = "validation"
    choose: list[str] = []
    free: list[str] = []
    percent: bool = True
    contrasts: list[_Contrast] = []
    claim: str | None = None
    names: dict[str, str] = {}
    all_groups: bool = False
    other_groups: bool = True
    choice_seeds: list[int] = []
    row_name: str = ""
    row_protocol: dict[str, Settings] = {}
    protocol: Settings | str | None = None
    open: list[str] = []
    command_only: dict[str, str] = {}
    published: _Published | None = None


class _Paper(_Section):
    shared: Settings = {}
    tables: dict[str, Settings]


class _Grids(_Section):
    bases: dict[str, Settings] = {}
    presets: dict[str, Settings] = {}
    quick: Settings | None = None
    variants: dict[str, list[Settings]] = {}
    grids: dict[str, list[Settings] | dict[str, list[str]]] = {}


def read(package: str | None, config: type, *, row_of: RowOf | None = None, prefix: str = "") -> RecipeData:
    """Return the data of a recipe, checked.

    Args:
        package: The package that has the files, a recipe's `__package__`.
        config: The recipe's config class.
        row_of: Returns the name of a config's row, for tables whose rows are not the values of one field.
        prefix: What the names of the files start with.

    Raises:
        ValueError: A file has an unknown section, field or setting, a value of a wrong type, or a row of a table
            whose number of cells is not that of its columns. The message names the file and the section.
    """
    sweeps, paper = (_File(package or "", f"{prefix}{name}.toml", config) for name in ("grids", "paper"))
    content = sweeps.section(_Grids, "the file", sweeps.content)
    named = _with_bases(sweeps, content)
    presets = {name: named[name] for name in content.presets}
    quick = None if content.quick is None else _resolve(sweeps, "quick", content.quick, named)
    grids: dict[str, tuple[Grid, ...]] = {}
    for name, given in content.grids.items():
        grids[name] = tuple(_sweep(sweeps, name, given, named, content.variants, grids))
    tables = _tables(paper, named, row_of) if paper.content else {}
    return RecipeData(tables, presets, quick, grids)


class _File:
    """A TOML file of a package and the config class that its settings belong to; empty if there is no such file."""

    def __init__(self, package: str, name: str, config: type) -> None:
        self.name, self.config = f"{package}/{name}", config
        file = resources.files(package).joinpath(name)
        self.content: Settings = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def error(self, at: str, problem: object) -> ValueError:
        return ValueError(f"{self.name}, {at}: {problem}")

    def section(self, kind: type[Section], at: str, content: Settings) -> Section:
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join([at, *map(str, first["loc"])])
            raise self.error(at, f"{first['msg']}, got {first['input']!r}.") from error

    def settings(self, at: str, values: Settings) -> Settings:
        """Return the settings in the types of their fields."""
        return {name: self.value(at, name, value) for name, value in values.items()}

    def value(self, at: str, name: str, value: Any, *, text: bool = False) -> Any:
        """Return a setting in the type of its field. text: it may be written as text, as keys of TOML are."""
        try:
            read = parse_values(self.config, {name: value})[name]
        except UsageError as error:
            raise self.error(at, error) from error
        plain = list(read) if isinstance(read, tuple) else "none" if read is None else read
        if plain != value and not text:
            raise self.error(at, f"{name} is {read!r} here, write it as such, got {value!r}.")
        return read

    def check_fields(self, at: str, names: Iterable[str]) -> None:
        known = {each.name for each in fields(self.config)}
        if unknown := [name for name in names if name not in known]:
            raise self.error(at, f"The config has no field {unknown[0]!r}.{did_you_mean(unknown[0], known)}")


def _with_bases(file: _File, content: _Grids) -> dict[str, Settings]:
    """Return the settings of bases and presets by name; each may only build on those before it."""
    named: dict[str, Settings] = {}
    for kind, entries in (("bases", content.bases), ("presets", content.presets)):
        for name, given in entries.items():
            if name in named:
                raise file.error(f"{kind}.{name}", "A base has the same name.")
            named[name] = _resolve(file, f"{kind}.{name}", given, named)
    return named


def _resolve(file: _File, at: str, given: Settings, named: Mapping[str, Settings]) -> Settings:
    own = {name: value for name, value in given.items() if name != "base"}
    return (
        _lookup(file, at, named, given["base"]) | file.settings(at, own) if "base" in given else file.settings(at, own)
    )


def _lookup(file: _File, at: str, entries: Mapping[str, Entry], name: str) -> Entry:
    if name not in entries:
        raise file.error(at, f"Nothing before it is named {name!r}.{did_you_mean(name, entries)}")
    return entries[name]


def _sweep(
    file: _File,
    name: str,
    given: list[Settings] | dict[str, list[str]],
    named: Mapping[str, Settings],
    variants: Mapping[str, list[Settings]],
    before: Mapping[str, tuple[Grid, ...]],
) -> Iterator[Grid]:
    """Yield the grids of one sweep."""
    at = f"grids.{name}"
    if isinstance(given, dict):
        if list(given) != ["join"]:
            raise file.error(at, f"A section with single brackets has `join` alone, got {', '.join(given)}.")
        for other in given["join"]:
            yield from _lookup(file, at, before, other)
        return
    for grid in given:
        own = {key: value for key, value in grid.items() if key not in ("base", "variants")}
        base = _lookup(file, at, named, grid["base"]) if "base" in grid else {}
        for variant in _lookup(file, at, variants, grid["variants"]) if "variants" in grid else [{}]:
            yield _grid(file, at, base, own | variant)


def _grid(file: _File, at: str, base: Settings, given: Settings) -> Grid:
    values = {name: (value,) for name, value in base.items()}
    for name, value in given.items():
        if name not in OPTIONS:
            several = value if isinstance(value, list) else [value]
            values[name] = tuple(file.value(at, name, each) for each in several)
    options = {name: given[name] for name in OPTIONS if name in given}
    try:
        return Grid(values, **options | {"choose": tuple(options.get("choose", ()))})
    except UsageError as error:
        raise file.error(at, error) from error


def _tables(file: _File, named: Mapping[str, Settings], row_of: RowOf | None) -> dict[str, PaperTable]:
    content = file.section(_Paper, "the file", file.content)
    made = {}
    for name, given in content.tables.items():
        at = f"tables.{name}"
        made[name] = _table(file, at, file.section(_Table, at, content.shared | given), named, row_of)
    return made


def _table(file: _File, at: str, table: _Table, named: Mapping[str, Settings], row_of: RowOf | None) -> PaperTable:
    axes = [part for axis in (table.groups, table.rows, table.columns) for part in axis.split("+")]
    file.check_fields(at, [*axes, *table.choose, *table.free, *table.open])
    return PaperTable(
        table.title,
        where=file.settings(at, table.where),
        groups=table.groups,
        rows=table.rows,
        columns=table.columns,
        metric=table.metric,
        choose=tuple(table.choose),
        by=table.by,
        published=tuple(_read_published(file, at, table, row_of)),
        percent=table.percent,
        contrasts=tuple(_contrast(file, at, table, each, row_of) for each in table.contrasts),
        claim=None if table.claim is None else _row(file, at, table, table.claim, row_of),
        names=table.names,
        protocol=_protocol(file, at, table, named),
        free=tuple(table.free),
        row_of=row_of,
        all_groups=table.all_groups,
        other_groups=table.other_groups,
        choice_seeds=tuple(table.choice_seeds),
        row_name=table.row_name,
        row_protocol={row: file.settings(at, values) for row, values in table.row_protocol.items()},
        command_only={
            file.value(at, table.groups, group, text=True): command for group, command in table.command_only.items()
        },
    )


def _protocol(file: _File, at: str, table: _Table, named: Mapping[str, Settings]) -> Settings:
    """Return every setting of the paper's protocol but those that it leaves open; nothing without a protocol."""
    if table.protocol is None:
        return {}
    asked = table.protocol
    given = _lookup(file, at, named, asked) if isinstance(asked, str) else file.settings(at, asked)
    every = asdict(file.config()) | given  # not `config(**given)`, which resets settings that its default cure ignores
    return {name: value for name, value in every.items() if name not in table.open}


def _read_published(file: _File, at: str, table: _Table, row_of: RowOf | None) -> Iterator[Published]:
    if (numbers := table.published) is None:
        return
    columns = [file.value(at, table.columns, column) for column in numbers.columns]
    for group_key, rows in numbers.cells.items():
        group = file.value(at, table.groups, group_key, text=True)
        for row_key, cells in rows.items():
            if len(cells) != len(columns):
                raise file.error(at, f"{group_key}, {row_key}: {len(columns)} columns, but {len(cells)} cells.")
            row = _row(file, at, table, row_key, row_of)
            for column, cell in zip(columns, cells, strict=True):
                if cell != "":
                    place = {table.groups: group, table.rows: row, table.columns: column}
                    yield Published(place, *_number(file, at, cell), numbers.source, numbers.runs)


def _row(file: _File, at: str, table: _Table, name: Any, row_of: RowOf | None) -> Any:
    """Return the name of a row: words, or the value of a field."""
    in_words = row_of is not None or "+" in table.rows
    return name if in_words else file.value(at, table.rows, name, text=True)


def _contrast(file: _File, at: str, table: _Table, given: _Contrast, row_of: RowOf | None) -> Contrast:
    at = f"{at}.contrasts"
    row = None if given.row is None else _row(file, at, table, given.row, row_of)
    columns = tuple(file.value(at, table.columns, column) for column in given.columns)
    return Contrast(_row(file, at, table, given.rival, row_of), row, columns)


def _number(file: _File, at: str, cell: float | str) -> tuple[float, float | None]:
    """Return the mean and the standard deviation of a cell, such as 81.75 or "81.75 ± 0.51"."""
    mean, _, deviation = str(cell).partition("±")
    try:
        return float(mean), float(deviation) if deviation else None
    except ValueError as error:
        raise file.error(at, f"A cell is a number, 'mean ± deviation' or '' if there is none, got {cell!r}.") from error
