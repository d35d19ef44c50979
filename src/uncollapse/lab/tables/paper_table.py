"""Tables of results in the layout of a paper's table, cell by cell next to the paper's numbers; and further tables."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from uncollapse.lab.tables.selection import (
    Record,
    common_settings,
    field_of,
    freeze,
    main_settings,
    metric_of,
    seeds_of_choice,
    select_best,
)
from uncollapse.lab.tables.significance import Interval, difference_interval

CLOSE = 2.0  # points: see `TableCell.near`

Place = tuple[Any, Any, Any]  # group, row, column


@dataclass(frozen=True)
class Published:
    """A number of a paper, in the unit of the table.

    cell: the fields of the config that it belongs to. runs: how many runs its mean and standard deviation are of.
    """

    cell: Mapping[str, Any]
    mean: float
    std: float | None = None
    source: str = ""
    runs: int | None = None


@dataclass(frozen=True)
class Contrast:
    """A comparison of rows seed by seed: row − rival. row: None for every other row. columns: none for all of them."""

    rival: Any
    row: Any = None
    columns: tuple[Any, ...] = ()


@dataclass(frozen=True)
class PaperTable:
    """A table, or one for each value of the field `groups`.

    where: what the config of a result must have to belong. rows, columns: fields; several joined by "+" make rows of
    their combinations. metric: the metric of a result that is shown; higher is better. percent: it is a share, shown in
    percent. choose: fields whose value is chosen in each cell by the metric `by`, see `selection.select_best`.
    published: the paper's numbers. contrasts: which rows are compared seed by seed; together they are one family of
    tests. claim: the row whose cells are counted in the summary, the one that the paper is about; None counts all rows.
    protocol: the paper's settings; a cell with other settings says so, and is not compared with the paper's number.
    free: settings that may differ from the protocol. row_of, group_of: row and group of a config in words, where fields
    would be hard to read. all_groups: also show groups of the paper that have no results. other_groups: also show
    groups of results that the paper does not have. row_protocol: settings of the protocol in single rows. row_name:
    heading of rows in words. names: what plots call values of the axes and the metric. choice_seeds: seeds that are
    there to choose; they never count, also while the choice is not finished. command_only: groups that are too large
    to be run here, and the command that would run them.
    """

    title: str
    where: Mapping[str, Any]
    groups: str
    rows: str
    columns: str
    metric: str = "test"
    choose: tuple[str, ...] = ()
    by: str = "validation"
    published: tuple[Published, ...] = ()
    percent: bool = True
    contrasts: tuple[Contrast, ...] = ()
    claim: Any = None
    protocol: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    row_of: Callable[[Mapping[str, Any]], str] | None = None
    group_of: Callable[[Mapping[str, Any]], str] | None = None
    all_groups: bool = False
    other_groups: bool = True
    choice_seeds: tuple[int, ...] = ()
    row_name: str = ""
    row_protocol: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    command_only: Mapping[Any, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.choose and self.by == self.metric:
            raise ValueError(f"The table {self.title!r} shows {self.metric!r}, so it cannot choose by it as well.")
        for number in self.published:
            lacking = [name for name in self.axes if name not in number.cell]
            if lacking:
                raise ValueError(f"The published number {number.cell} lacks {', '.join(lacking)}.")
        rows = {number.cell[self.rows] for number in self.published}
        if self.claim is not None and self.claim not in rows:
            raise ValueError(f"claim must be a row of published numbers, {sorted(map(str, rows))}, got {self.claim!r}.")

    def name(self, value: object) -> str:
        """Return what plots call a value of an axis, a field or a metric."""
        return self.names.get(str(value), str(value).replace("_", " "))

    @property
    def axes(self) -> tuple[str, str, str]:
        """Fields of the groups, rows and columns."""
        return self.groups, self.rows, self.columns

    def place(self, record: Record) -> Place:
        """Return the group, row and column of a result."""
        row = field_of(record, self.rows) if self.row_of is None else self.row_of(record["config"])
        group = field_of(record, self.groups) if self.group_of is None else self.group_of(record["config"])
        return group, row, field_of(record, self.columns)

    @property
    def named(self) -> frozenset[str]:
        """Fields that place a result in the table, or that may differ between the results of a cell."""
        axes = (part for axis in self.axes for part in axis.split("+"))
        return frozenset((*axes, *self.where, *self.choose, "seed"))


@dataclass(frozen=True)
class TableCell:
    """A cell of the table: our results and the paper's number.

    figures: metrics by seed, in the unit of the table. failed: seeds whose run did not stay finite. chosen: the chosen
    values, if there were several. unusual: other settings in which it differs from most of its group. left_out: number
    of results with yet other settings, which do not count. comparable: whether it was run as the paper's was.
    open_choice: several values of the chosen fields were run, and no metric can choose among them. several: more than
    one value was run. untried: number of values that were not run here and that others of its row and group chose
    among. trials: number of runs that only choose. records: the results that count, also those that only choose.
    """

    group: Any
    row: Any
    column: Any
    figures: Mapping[int, float] = field(default_factory=dict)
    failed: tuple[int, ...] = ()
    chosen: Mapping[str, Any] = field(default_factory=dict)
    unusual: Mapping[str, Any] = field(default_factory=dict)
    left_out: int = 0
    published: Published | None = None
    comparable: bool = True
    open_choice: bool = False
    several: bool = False
    untried: int = 0
    trials: int = 0
    records: Sequence[Record] = field(default=(), repr=False)

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return statistics.fmean(self.figures.values()) if self.figures else None

    @property
    def std(self) -> float | None:
        """Over the seeds, with n − 1; None for a single one."""
        return statistics.stdev(self.figures.values()) if len(self.figures) > 1 else None

    @property
    def run(self) -> bool:
        """Whether there is any result."""
        return bool(self.figures or self.failed)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's, where there are both."""
        return None if self.mean is None or self.published is None else self.mean - self.published.mean

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of the difference from the paper's mean; None where a number of runs or a deviation is
        missing."""
        if self.difference is None or self.published is None:
            return None
        counts = len(self.figures), self.published.runs
        return difference_interval(self.difference, (self.std, self.published.std), counts)

    @property
    def near(self) -> bool:
        """Whether it is below the paper's and the whole interval of the difference is within 2 points of 0.

        This is a test of equivalence: a noisier run has a wider interval and passes less easily.
        """
        if self.reached is not False or self.failed or self.interval is None:
            return False
        return max(map(abs, self.interval)) <= CLOSE

    @property
    def tied(self) -> bool:
        """Whether it equals the paper's number as printed, as networks do that have collapsed to the same class."""
        return bool(self.reached) and self.difference is not None and round(self.difference, 2) == 0

    @property
    def reached(self) -> bool | None:
        """Whether all runs stayed finite and their mean is at least the paper's; None where one of both is missing.

        Papers print two decimal places; what comes after them does not count.
        """
        if not self.run or self.published is None or not self.comparable:
            return None
        return not self.failed and self.difference is not None and round(self.difference, 2) >= 0


def build_cells(table: PaperTable, records: Iterable[Record]) -> list[TableCell]:
    """Return all cells, group by group and row by row, for each row and column in the results or in the paper.

    Groups with results come first, and in each group the row that others are compared with. Groups without results are
    left out, unless there are no results at all or the table shows the whole paper. The paper's protocol is required in
    groups that the paper has.
    """
    mine = [
        r
        for r in records
        if all(field_of(r, name) == freeze(value) for name, value in table.where.items())
        and (table.metric in r["figures"] or not r["figures"])  # none at all: it did not stay finite
    ]
    found: dict[Place, list[Record]] = defaultdict(list)
    for r in mine:
        found[table.place(r)].append(r)
    paper = {tuple(freeze(n.cell[name]) for name in table.axes): n for n in table.published}
    if not table.other_groups:
        known = {at[0] for at in paper}
        found = {at: of for at, of in found.items() if at[0] in known}
    made = []
    first = [contrast.rival for contrast in table.contrasts if contrast.row is None]
    with_results = {at[0] for at in found}
    shown = (at[0] for at in [*paper, *found] if table.all_groups or not found or at[0] in with_results)
    for group in sorted(_sort_numbers(shown), key=lambda group: group not in with_results):
        here = [at for at in [*paper, *found] if at[0] == group]
        usual = common_settings((found.get(at, ()) for at in dict.fromkeys(here)), table.named, table.protocol)
        by_paper = not table.published or any(at in paper for at in here)
        usual |= dict(table.protocol) if by_paper else {}
        single = table.row_protocol if by_paper else {}
        asked = {row: usual | dict(single.get(row, {})) for row in (at[1] for at in here)}
        rows, columns = (_sort_numbers(at[axis] for at in here) for axis in (1, 2))
        rows.sort(key=lambda row: row not in first)
        places = [(group, row, column) for row in rows for column in columns]
        cells = [_cell(table, at, found.get(at, ()), asked[at[1]], paper.get(at)) for at in places]
        made += [_with_untried(table, cell, cells) for cell in cells]
    return made


def _with_untried(table: PaperTable, cell: TableCell, group: Sequence[TableCell]) -> TableCell:
    """Return a cell that knows how many of the values that others of its row chose among are missing in it.

    As long as they are, its choice is open, and it is not compared with the paper's number.
    """
    if not cell.records:
        return cell
    others = (one for one in group if one.row == cell.row and one.several)
    tried = set().union(*(_tried(table, one) for one in others)) - _tried(table, cell)
    return replace(cell, untried=len(tried), comparable=cell.comparable and not tried)


def _tried(table: PaperTable, cell: TableCell) -> set[tuple[Any, ...]]:
    return {tuple(field_of(record, name) for name in table.choose) for record in cell.records}


def _cell(
    table: PaperTable, at: Place, records: Sequence[Record], usual: Mapping[str, Any], published: Published | None
) -> TableCell:
    if not records:
        return TableCell(*at, published=published)
    unusual, same = main_settings(records, table.named, usual)
    runs: dict[tuple[Any, ...], dict[int, Record]] = defaultdict(dict)
    for record in same:
        runs[tuple(field_of(record, name) for name in table.choose)][record["seed"]] = record
    taken = select_best(runs, table.by)
    firsts = (of[min(of)] for of in runs.values())
    open_choice = len(runs) > 1 and all(metric_of(record, table.by) is None for record in firsts)
    used = {*table.choice_seeds, *(seeds_of_choice(runs) if table.choice_seeds and len(runs) > 1 else ())}
    counted = {seed: metric_of(r, table.metric) for seed, r in sorted(runs[taken].items()) if seed not in used}
    unit = 100.0 if table.percent else 1.0
    return TableCell(
        *at,
        figures={seed: unit * value for seed, value in counted.items() if value is not None},
        failed=tuple(seed for seed, value in counted.items() if value is None),
        chosen=_chosen_values(table, taken, list(runs)),
        unusual=unusual,
        comparable=unusual.keys() <= set(table.free) and not open_choice,
        open_choice=open_choice,
        several=len(runs) > 1,
        trials=sum(seed in used for of in runs.values() for seed in of),
        left_out=len(records) - len(same),
        published=published,
        records=same,
    )


def _chosen_values(table: PaperTable, best: tuple[Any, ...], tried: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Return the chosen values of fields with several values, or with a value that is not the protocol's."""
    several = [len(set(values)) > 1 for values in zip(*tried, strict=True)]
    fields = zip(table.choose, best, several, strict=True)
    return {name: value for name, value, choice in fields if choice or value != table.protocol.get(name, value)}


def _sort_numbers(values: Iterable[Any]) -> list[Any]:
    """Return numbers sorted; other values in the given order."""
    found = list(dict.fromkeys(values))
    numbers = all(isinstance(value, int | float) for value in found)
    return sorted(found) if numbers else found


@dataclass(frozen=True)
class Details:
    """A table of texts. note: how to read it. words: how many of the first columns are words and not numbers."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: int = 1


def details_json(tables: Sequence[Details]) -> list[dict[str, Any]]:
    """Return tables as plain data for JSON."""
    return [asdict(table) for table in tables]
