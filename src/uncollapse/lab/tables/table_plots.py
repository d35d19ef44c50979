"""The table of a group as a picture: the figure over the columns, a line for each row, the paper's dashed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.tables.markdown import by_group
from uncollapse.lab.tables.paper_table import Board, Cell, cells
from uncollapse.lab.tables.selection import Record
from uncollapse.report.canvas import COLOURS, INK, LINE, MARKERS, blank, colour, save

SIZE = (8.4, 4.0)
ASIDE = 0.03  # of the room of a column: so that the error bars of ours and of the paper's are both seen


def plot(board: Board, records: Iterable[Record], group: Any, path: str | Path) -> Path:
    """Draw the table of a group, with error bars of one standard deviation. path: ends in .png, .svg or .pdf."""
    tables = by_group(cells(board, records))
    if group not in tables:
        hint = did_you_mean(group, tables)
        raise UsageError(f"No table is for {board.groups} {group}.{hint} There are: {', '.join(map(str, tables))}.")
    return save(figure_of_group(board, group, tables[group]), path)


def figure_of_group(board: Board, group: Any, rows: Mapping[Any, Sequence[Cell]]) -> Any:
    """The picture of a table as a matplotlib figure."""
    figure, (axes,) = blank(f"{board.groups} {group}", SIZE)
    for number, (row, along) in enumerate(rows.items()):
        _draw(axes, number, str(row), along)
    columns = [str(cell.column) for cell in next(iter(rows.values()))]
    axes.set_xticks(range(len(columns)), columns, parse_math=False)
    if len(columns) == 1:
        axes.set_xlim(-0.5, 0.5)  # else its tick lies at the edge, far from its points
    axes.set_xlabel(board.columns, color=INK, parse_math=False)
    axes.set_ylabel(f"{board.figure.replace('_', ' ')}{', %' if board.percent else ''}", color=INK, parse_math=False)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    lines, labels = axes.get_legend_handles_labels()
    if labels:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}  # beside: lines may be anywhere inside
        for text in axes.legend(lines, labels, frameon=False, fontsize=9, labelcolor=INK, **place).get_texts():
            text.set_parse_math(False)
    return figure


def _draw(axes: Any, number: int, name: str, along: Sequence[Cell]) -> None:
    """One row: ours where it was run, the paper's where it has a number."""
    ours = [None if cell.mean is None else (cell.mean, cell.std) for cell in along]
    paper = [None if cell.published is None else (cell.published.mean, cell.published.std) for cell in along]
    marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]  # other pairs once the colours are used up
    look = {"color": colour(number), "marker": marker, "markersize": 5, "elinewidth": 1.0, "capsize": 2.5}
    dashed = {"linestyle": (0, (4, 3)), "linewidth": 1.2, "markerfacecolor": "none"}
    for points, shift, label, style in (
        (paper, ASIDE, f"{name}, paper", dashed),
        (ours, -ASIDE, name, {"linewidth": 2}),
    ):
        if any(points):
            means, spreads = zip(*(point or (math.nan, None) for point in points), strict=True)  # a gap, not a bridge
            at = [column + shift for column in range(len(points))]
            axes.errorbar(at, means, yerr=[spread or 0.0 for spread in spreads], label=label, **look, **style)
