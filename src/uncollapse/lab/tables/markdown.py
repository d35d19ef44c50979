"""Format a table: its cells, legend, notes and comparisons, as Markdown or as data for JSON."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from uncollapse.lab.tables import contrasts
from uncollapse.lab.tables.paper_table import CLOSE, Details, PaperTable, Published, TableCell, build_cells
from uncollapse.lab.tables.selection import Record

NOTHING, COMMAND_ONLY = "–", "command only"
REACHED, TIED, NEAR = "✓", "=", "≈"
DIFFERENCES = "Differences by seed"  # heading of the comparisons


def to_markdown(
    table: PaperTable, records: Iterable[Record], *, level: int = 2, details: Iterable[Details] = ()
) -> str:
    """Return a table as Markdown, one per group, below a heading of the given level; further tables follow."""
    made = build_cells(table, records)
    lines = [f"{'#' * level} {_escape(table.title)}", ""]
    for group, rows in group_cells(made).items():
        lines += [f"{'#' * (level + 1)} {_escape(group)}", "", *_table(table, rows), ""]
    lines += [_escape(legend(table, made, "Bold")), "", coverage(table, made)]
    lines += ["", *(f"- {_escape(note)}" for note in cell_notes(table, made))]
    if found := contrasts.compare_rows(table, made):
        lines += ["", f"{'#' * (level + 1)} {DIFFERENCES}", "", contrast_table(table, found)]
    for more in details:
        lines += ["", f"{'#' * (level + 1)} {_escape(more.title)}", "", details_table(more)]
    return "\n".join(lines).rstrip() + "\n"


def group_cells(made: Iterable[TableCell]) -> dict[Any, dict[Any, list[TableCell]]]:
    """Return the cells by group, then by row; all rows of a group have the same columns."""
    tables: dict[Any, dict[Any, list[TableCell]]] = defaultdict(lambda: defaultdict(list))
    for cell in made:
        tables[cell.group][cell.row].append(cell)
    return tables


def corner_label(table: PaperTable) -> str:
    """Return the label of the top left corner."""
    rows = table.rows if table.row_of is None else table.row_name or table.rows.partition("+")[0]
    return f"{rows} \\ {table.columns}"


def format_result(table: PaperTable, cell: TableCell) -> str:
    """Return mean ± standard deviation and the number of seeds of a cell."""
    failed = f"{len(cell.failed)} not finite"
    if cell.mean is None:
        return failed if cell.failed else COMMAND_ONLY if cell.group in table.command_only else NOTHING
    seeds = f"{len(cell.figures)}{f', {failed}' if cell.failed else ''}"
    return f"{_number(table, cell.mean, cell.std)} ({seeds})"


def format_marked(table: PaperTable, cell: TableCell) -> str:
    """Return the result of a cell, with a sign if it is above, equal to or close to the paper's."""
    return f"{sign_of(cell)} {format_result(table, cell)}".lstrip()


def sign_of(cell: TableCell) -> str:
    """Return the sign of a cell compared with the paper's; empty if it is below, or not compared."""
    return TIED if cell.tied else REACHED if cell.reached else NEAR if cell.near else ""


def format_difference(table: PaperTable, cell: TableCell) -> str:
    """Return the interval of the difference from the paper's number, for a cell below it; empty if unknown."""
    if cell.reached is not False or cell.interval is None:
        return ""
    return contrasts.format_interval(table, cell.interval)


def format_published(table: PaperTable, cell: TableCell) -> str:
    """Return the paper's number; empty if there is none."""
    return "" if cell.published is None else _number(table, cell.published.mean, cell.published.std)


def format_choice(cell: TableCell) -> str:
    """Return the chosen values of a cell; empty if there was no choice."""
    return _settings(cell.chosen)


def legend(table: PaperTable, made: Sequence[TableCell], sign: str = REACHED) -> str:
    """Return how to read the tables. sign: marks a cell that is above the paper's."""
    unit = " in percent" if table.percent else ""
    said = [f"{table.metric.replace('_', ' ').capitalize()}{unit}: mean ± standard deviation (number of seeds)."]
    if any(cell.published for cell in made):
        sources = ", ".join(dict.fromkeys(c.published.source for c in made if c.published and c.published.source))
        said.append(f"Below it the published number{f' ({sources})' if sources else ''}. {sign}: above it.")
        if any(cell.tied for cell in made):
            said.append(f"{TIED}: equal as printed.")
        if any(format_difference(table, cell) for cell in made):
            said.append("Below that the 95 % interval of the difference, where ours is lower (Welch's error).")
        if any(cell.near for cell in made):
            said.append(f"{NEAR}: all of that interval is within {CLOSE:g} points of 0.")
    if any(cell.several and not cell.open_choice for cell in made):
        said.append(
            f"{' and '.join(table.choose)}: chosen by {table.by}, with the seeds that all values were run with."
        )
    return " ".join(said)


def coverage(table: PaperTable, made: Sequence[TableCell]) -> str:
    """Return how many cells were run, and how many cells of the paper's claim are above its numbers."""
    wanted = [cell for cell in made if cell.run or cell.published]
    ran = sum(cell.run for cell in wanted)
    all_known = any(cell.published for cell in made)  # else only what was run is known
    done = f"{ran} of {len(wanted)} cells run" if all_known else f"{ran} {'cell' if ran == 1 else 'cells'} run"
    counted = [cell for cell in made if cell.reached is not None and table.claim in (None, cell.row)]
    if not counted:
        return f"{done}."
    tied, near = sum(cell.tied for cell in counted), sum(cell.near for cell in counted)
    above = sum(bool(cell.reached) for cell in counted) - tied
    said = f"{done}. {'' if table.claim is None else f'{table.claim}: '}{above} of {len(counted)} above the paper's"
    ties = f", {tied} equal to it" if tied else ""
    return f"{said}{ties}{f', {near} below and close to it ({NEAR})' if near else ''}."


def cell_notes(table: PaperTable, made: Sequence[TableCell]) -> list[str]:
    """Return notes about single cells: settings that differ from most of their table, and excluded results."""
    places: dict[tuple[Any, Any, str], list[str]] = defaultdict(list)
    uncompared = contrasts.list_uncompared(table, made)
    for cell in made:
        said = [f"with {_settings(cell.unusual)}"] if cell.unusual else []
        said += ["not compared by seed with rows of other settings"] if cell in uncompared else []
        if cell.left_out:
            results = "1 result" if cell.left_out == 1 else f"{cell.left_out} results"
            said.append(
                f"{results} with other settings (--set shows them) {'does' if cell.left_out == 1 else 'do'} not count"
            )
        if cell.trials and not cell.run:
            said.append(f"only trials so far ({cell.trials}); seeds that choose do not count")
        if cell.untried:
            said.append(f"{cell.untried} of the values that others chose among are not run yet, so the choice is open")
        if cell.open_choice:
            said.append(f"{' or '.join(table.choose)} cannot be chosen, because no {table.by} was measured")
        if said:
            places[cell.group, cell.row, "; ".join(said)].append(str(cell.column))
    unusual = [
        f"{group}, {row}, {table.columns} {', '.join(columns)}: {said}."
        for (group, row, said), columns in places.items()
    ]
    left = {cell.group for cell in made} - {cell.group for cell in made if cell.run}
    commands = [f"{group}, {COMMAND_ONLY}: {line}." for group, line in table.command_only.items() if group in left]
    return unusual + commands


def contrast_table(table: PaperTable, found: Sequence[contrasts.Comparison]) -> str:
    """Return the comparisons of a table as Markdown, with how to read them."""
    head, rows = contrasts.contrast_rows(table, found)
    return details_table(Details(DIFFERENCES, contrasts.contrast_note(found), head, rows, words=3))


def details_table(table: Details) -> str:
    """Return a further table as Markdown, with how to read it."""
    lines = [[_escape(text) for text in line] for line in (table.head, *table.rows)]
    lines.insert(1, ["---"] * table.words + ["---:"] * (len(table.head) - table.words))
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{shown}\n\n{table.note}" if table.rows else table.note


def table_json(table: PaperTable, made: Sequence[TableCell]) -> dict[str, Any]:
    """Return all cells as plain data for JSON, in the unit of the table."""
    unit = "percent" if table.percent else None
    axes = {"groups": table.groups, "rows": table.rows, "columns": table.columns}
    about = {"title": table.title, "figure": table.metric, "unit": unit, "where": dict(table.where)}
    found = contrasts.contrast_json(table, contrasts.compare_rows(table, made))
    cells = [_facts(table, cell) for cell in made]
    return {**about, **axes, "summary": coverage(table, made), "cells": cells, "contrasts": found}


def _facts(table: PaperTable, cell: TableCell) -> dict[str, Any]:
    paper = cell.published
    return {
        **dict(zip(table.axes, (cell.group, cell.row, cell.column), strict=True)),
        "mean": cell.mean,
        "std": cell.std,
        "seeds": {str(seed): value for seed, value in cell.figures.items()},
        "failed": list(cell.failed),
        "trials": cell.trials,
        "untried": cell.untried,
        "chosen": dict(cell.chosen),
        "unusual": dict(cell.unusual),
        "left_out": cell.left_out,
        "published": None if paper is None else _number_facts(paper),
        "difference": cell.difference,
        "interval": cell.interval,
        "reached": cell.reached,
        "tied": cell.tied,
        "near": cell.near,
    }


def _number_facts(paper: Published) -> dict[str, Any]:
    return {"mean": paper.mean, "std": paper.std, "runs": paper.runs, "source": paper.source}


def _table(table: PaperTable, rows: Mapping[Any, Sequence[TableCell]]) -> list[str]:
    columns = [_escape(cell.column) for cell in next(iter(rows.values()))]
    lines = [[_escape(corner_label(table)), *columns], ["---", *["---:"] * len(columns)]]
    lines += [[_escape(row), *(_markdown(table, cell) for cell in along)] for row, along in rows.items()]
    return [f"| {' | '.join(line)} |" for line in lines]


def _markdown(table: PaperTable, cell: TableCell) -> str:
    above = cell.reached and not cell.tied
    here = f"**{format_result(table, cell)}**" if above else format_marked(table, cell)
    paper = f"paper {format_published(table, cell)}" if cell.published else ""
    parts = (here, paper, format_difference(table, cell), _escape(format_choice(cell)))
    return "<br>".join(part for part in parts if part)


def _number(table: PaperTable, mean: float, std: float | None) -> str:
    digits, spread = (".2f", ".2f") if table.percent else (".4g", ".2g")
    return f"{mean:{digits}}" + (f" ± {std:{spread}}" if std is not None else "")


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _escape(text: object) -> str:
    """Escape text for Markdown, so that it is not read as a column, markup or emphasis."""
    return "".join(f"\\{letter}" if letter in "\\|<*_`[" else letter for letter in str(text))
