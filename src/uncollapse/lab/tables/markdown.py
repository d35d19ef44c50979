"""Format a table: its cells, legend, notes and comparisons, as Markdown or as data for JSON."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from uncollapse.lab.tables.paper_table import PaperTable, TableCell, build_cells
from uncollapse.lab.tables.selection import Record
from uncollapse.lab.tables.significance import Paired, compare

NOTHING = "–"
CHANCE = 0.05  # p of a difference up to which chance is an unlikely reason
REACHED, NEAR = "✓", "≈"


def to_markdown(board: PaperTable, records: Iterable[Record], *, level: int = 2) -> str:
    """The tables of a board as Markdown, below a heading of the given level."""
    made = build_cells(board, records)
    lines = [f"{'#' * level} {_escaped(board.title)}", ""]
    for group, rows in group_cells(made).items():
        lines += [f"{'#' * (level + 1)} {_escaped(group)}", "", *_table(board, rows), ""]
    lines += [_escaped(legend(board, made, "Bold")), "", coverage(made)]
    lines += ["", *(f"- {_escaped(note)}" for note in cell_notes(board, made))]
    return "\n".join(lines).rstrip() + "\n"


def group_cells(made: Iterable[TableCell]) -> dict[Any, dict[Any, list[TableCell]]]:
    """The cells as tables: by group, then by row; every row of a table has the same columns."""
    tables: dict[Any, dict[Any, list[TableCell]]] = defaultdict(lambda: defaultdict(list))
    for cell in made:
        tables[cell.group][cell.row].append(cell)
    return tables


def corner_label(board: PaperTable) -> str:
    """What stands above the names of the rows and before those of the columns."""
    rows = board.rows if board.row_of is None else board.row_name or board.rows.partition("+")[0]
    return f"{rows} \\ {board.columns}"


def format_result(board: PaperTable, cell: TableCell) -> str:
    """What came: mean ± standard deviation and the number of seeds."""
    failed = f"{len(cell.failed)} not finite"
    if cell.mean is None:
        return failed if cell.failed else NOTHING
    seeds = f"{len(cell.figures)}{f', {failed}' if cell.failed else ''}"
    return f"{_number(board, cell.mean, cell.std)} ({seeds})"


def format_marked(board: PaperTable, cell: TableCell) -> str:
    """What came, with a sign if it is at least the paper's, or nearly."""
    sign = REACHED if cell.reached else NEAR if cell.near else ""
    return f"{sign} {format_result(board, cell)}".lstrip()


def format_published(board: PaperTable, cell: TableCell) -> str:
    """The paper's number; nothing if it has none."""
    return "" if cell.published is None else _number(board, cell.published.mean, cell.published.std)


def format_choice(cell: TableCell) -> str:
    """The values that were chosen in a cell; nothing if there was no choice."""
    return _settings(cell.chosen)


def legend(board: PaperTable, made: Sequence[TableCell], sign: str = REACHED) -> str:
    """How to read the tables. sign: what marks a cell that is at least the paper's."""
    unit = " in percent" if board.percent else ""
    said = [f"{board.metric.replace('_', ' ').capitalize()}{unit}: mean ± standard deviation (number of seeds)."]
    if any(cell.published for cell in made):
        sources = ", ".join(dict.fromkeys(c.published.source for c in made if c.published and c.published.source))
        said.append(f"Below it the published number{f' ({sources})' if sources else ''}. {sign}: at least that.")
        if any(cell.near for cell in made):
            said.append(f"{NEAR}: below it by no more than the larger of both deviations.")
    if any(cell.several and not cell.open_choice for cell in made):
        said.append(
            f"{' and '.join(board.choose)}: chosen by {board.by}, with the seeds that all values were run with."
        )
    return " ".join(said)


def coverage(made: Sequence[TableCell]) -> str:
    """How much is there, and how much of it is at least the paper's."""
    wanted = [cell for cell in made if cell.run or cell.published]
    judged = [cell for cell in made if cell.reached is not None]
    done = f"{sum(cell.run for cell in wanted)} of {len(wanted)} cells run"
    if not judged:
        return f"{done}."
    above, near = sum(bool(cell.reached) for cell in judged), sum(cell.near for cell in judged)
    nearly = f", {near} more within a deviation of it" if near else ""
    return f"{done}, {above} of {len(judged)} at least the paper's{nearly}."


def cell_notes(board: PaperTable, made: Sequence[TableCell]) -> list[str]:
    """What has to be known of single cells: settings that most of their table do not have, and results left out."""
    places: dict[tuple[Any, Any, str], list[str]] = defaultdict(list)
    for cell in made:
        said = [f"with {_settings(cell.unusual)}"] if cell.unusual else []
        if cell.left_out:
            results = "1 result" if cell.left_out == 1 else f"{cell.left_out} results"
            said.append(
                f"{results} with other settings (--set shows them) {'does' if cell.left_out == 1 else 'do'} not count"
            )
        if cell.open_choice:
            said.append(f"nothing tells which {' or '.join(board.choose)} to choose, as no {board.by} was measured")
        if said:
            places[cell.group, cell.row, "; ".join(said)].append(str(cell.column))
    unusual = [
        f"{group}, {row}, {board.columns} {', '.join(columns)}: {said}."
        for (group, row, said), columns in places.items()
    ]
    return unusual + comparisons(board, made)


def comparisons(board: PaperTable, made: Sequence[TableCell]) -> list[str]:
    """Each row beside the one that the board compares with, seed by seed, with the p of a sign-flip test."""
    if board.baseline is None:
        return []
    rivals = {(cell.group, cell.column): cell.figures for cell in made if cell.row == board.baseline}
    said = []
    for cell in made:
        other = rivals.get((cell.group, cell.column), {})
        if cell.row == board.baseline or not cell.figures.keys() & other.keys():
            continue
        found = compare(cell.figures, other)
        gain = f"{cell.row} − {board.baseline} = {_number(board, found.mean, found.std)}"
        seeds = "1 seed" if found.n == 1 else f"{found.n} seeds"
        words = f"{gain} over {seeds}, p = {found.p:.2g}: {certainty(found)}"
        said.append(f"{cell.group}, {board.columns} {cell.column}: {words}.")
    return said


def certainty(found: Paired) -> str:
    """How sure a difference is, in words."""
    if found.p <= CHANCE:
        return "unlikely to be chance"
    signs = {difference > 0 for difference in found.differences.values() if difference}
    if len(signs) == 1 and 0 not in found.differences.values() and found.n > 1:
        return "the same sign in all seeds, too few to rule out chance"
    return "within noise" if found.n > 1 else "one pair says nothing of chance"


def table_json(board: PaperTable, made: Sequence[TableCell]) -> dict[str, Any]:
    """All cells as plain data for JSON, in the unit of the table."""
    unit = "percent" if board.percent else None
    axes = {"groups": board.groups, "rows": board.rows, "columns": board.columns}
    about = {"title": board.title, "figure": board.metric, "unit": unit, "where": dict(board.where)}
    return {**about, **axes, "summary": coverage(made), "cells": [_facts(board, cell) for cell in made]}


def _facts(board: PaperTable, cell: TableCell) -> dict[str, Any]:
    paper = cell.published
    return {
        **dict(zip(board.axes, (cell.group, cell.row, cell.column), strict=True)),
        "mean": cell.mean,
        "std": cell.std,
        "seeds": {str(seed): value for seed, value in cell.figures.items()},
        "failed": list(cell.failed),
        "chosen": dict(cell.chosen),
        "unusual": dict(cell.unusual),
        "left_out": cell.left_out,
        "published": None if paper is None else {"mean": paper.mean, "std": paper.std, "source": paper.source},
        "difference": cell.difference,
        "reached": cell.reached,
        "near": cell.near,
    }


def _table(board: PaperTable, rows: Mapping[Any, Sequence[TableCell]]) -> list[str]:
    columns = [_escaped(cell.column) for cell in next(iter(rows.values()))]
    lines = [[_escaped(corner_label(board)), *columns], ["---", *["---:"] * len(columns)]]
    lines += [[_escaped(row), *(_markdown(board, cell) for cell in along)] for row, along in rows.items()]
    return [f"| {' | '.join(line)} |" for line in lines]


def _markdown(board: PaperTable, cell: TableCell) -> str:
    here = f"**{format_result(board, cell)}**" if cell.reached else format_marked(board, cell)
    paper = f"paper {format_published(board, cell)}" if cell.published else ""
    return "<br>".join(part for part in (here, paper, _escaped(format_choice(cell))) if part)


def _number(board: PaperTable, mean: float, std: float | None) -> str:
    digits, spread = (".2f", ".2f") if board.percent else (".4g", ".2g")
    return f"{mean:{digits}}" + (f" ± {std:{spread}}" if std is not None else "")


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _escaped(text: object) -> str:
    """Names as they are: Markdown must not take them for a column, markup or emphasis."""
    return "".join(f"\\{letter}" if letter in "\\|<*_`[" else letter for letter in str(text))
