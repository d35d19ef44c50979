"""HTML page and plots of a paper table: one table and one plot per group, and more plots of the results."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.tables import markdown
from uncollapse.lab.tables.markdown import group_cells
from uncollapse.lab.tables.paper_table import PaperTable, TableCell, build_cells
from uncollapse.lab.tables.selection import Record
from uncollapse.report import frame
from uncollapse.report.canvas import COLOURS, INK, LINE, MARKERS, new_figure, save_figure, series_colour

BETTER, WORSE, NEUTRAL = "--none", "--complete", "--ink"  # colours of the style sheet
SIZE = (8.4, 4.0)
SHIFT = 0.03  # columns between our points and the paper's, so that both error bars can be seen


@dataclass(frozen=True)
class ResultPlot:
    """A plot of results as a matplotlib figure. caption: what it shows, in words."""

    title: str
    caption: str
    figure: Any


def write_page(
    table: PaperTable, records: Iterable[Record], path: str | Path, plots: Iterable[ResultPlot] = ()
) -> Path:
    """Write a table, a plot per group and more plots as one self-contained HTML page."""
    return frame.write_html(render_page(table, build_cells(table, records), tuple(plots)), path)


def render_page(table: PaperTable, cells: Sequence[TableCell], plots: Sequence[ResultPlot] = ()) -> str:
    """Return the page as text."""
    groups = [_group(table, i, name, rows) for i, (name, rows) in enumerate(group_cells(cells).items())]
    links = {group["id"]: group["name"] for group in groups}
    return frame.render(
        "table.html",
        title=table.title,
        subtitle=markdown.coverage(cells),
        subject="tables",
        links=links | {f"plot-{i}": plot.title for i, plot in enumerate(plots)},
        legend=markdown.legend(table, cells),
        corner=markdown.corner_label(table),
        columns=table.columns,
        groups=groups,
        plots=plots,
        notes=markdown.cell_notes(table, cells),
    )


def _group(table: PaperTable, number: int, group: Any, rows: Mapping[Any, Sequence[TableCell]]) -> dict[str, Any]:
    """Return what the template shows of a group."""
    return {
        "id": f"group-{number}",
        "name": str(group),
        "heading": f"{table.groups} {group}",
        "columns": [str(cell.column) for cell in next(iter(rows.values()))],
        "rows": {str(row): [_cell(table, cell) for cell in along] for row, along in rows.items()},
        "figure": draw_group(table, group, rows),
    }


def _cell(table: PaperTable, cell: TableCell) -> dict[str, str]:
    """Return our number and its colour, the paper's, and the settings that were chosen."""
    colour = NEUTRAL if cell.near else {True: BETTER, False: WORSE, None: NEUTRAL}[cell.reached]
    paper, choice = markdown.format_published(table, cell), markdown.format_choice(cell)
    return {"ours": markdown.format_marked(table, cell), "colour": colour, "paper": paper, "choice": choice}


def plot_group(table: PaperTable, records: Iterable[Record], group: Any, path: str | Path) -> Path:
    """Plot one group of a table, with error bars of one standard deviation. path: ends in .png, .svg or .pdf."""
    groups = group_cells(build_cells(table, records))
    if group not in groups:
        hint = did_you_mean(group, groups)
        raise UsageError(f"The table has no {table.groups} {group}.{hint} It has: {', '.join(map(str, groups))}.")
    return save_figure(draw_group(table, group, groups[group]), path)


def draw_group(table: PaperTable, group: Any, rows: Mapping[Any, Sequence[TableCell]]) -> Any:
    """Return a matplotlib figure of one group: the metric over the columns, one line per row, the paper's dashed."""
    figure, (axes,) = new_figure(f"{table.groups} {group}", SIZE)
    for number, (row, along) in enumerate(rows.items()):
        _draw_row(axes, number, str(row), along)
    columns = [str(cell.column) for cell in next(iter(rows.values()))]
    axes.set_xticks(range(len(columns)), columns, parse_math=False)
    if len(columns) == 1:
        axes.set_xlim(-0.5, 0.5)  # keeps the single tick next to its points
    axes.set_xlabel(table.columns, color=INK, parse_math=False)
    axes.set_ylabel(f"{table.metric.replace('_', ' ')}{', %' if table.percent else ''}", color=INK, parse_math=False)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    lines, labels = axes.get_legend_handles_labels()
    if labels:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}  # outside: lines may be anywhere inside
        for text in axes.legend(lines, labels, frameon=False, fontsize=9, labelcolor=INK, **place).get_texts():
            text.set_parse_math(False)
    return figure


def _draw_row(axes: Any, number: int, name: str, along: Sequence[TableCell]) -> None:
    """Draw one row: our results, and the paper's as a dashed line."""
    ours = [None if cell.mean is None else (cell.mean, cell.std) for cell in along]
    paper = [None if cell.published is None else (cell.published.mean, cell.published.std) for cell in along]
    marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]  # new pairs once all colours are used
    look = {"color": series_colour(number), "marker": marker, "markersize": 5, "elinewidth": 1.0, "capsize": 2.5}
    dashed = {"linestyle": (0, (4, 3)), "linewidth": 1.2, "markerfacecolor": "none"}
    for points, shift, label, style in (
        (paper, SHIFT, f"{name}, paper", dashed),
        (ours, -SHIFT, name, {"linewidth": 2}),
    ):
        if any(points):
            means, deviations = zip(*(point or (math.nan, None) for point in points), strict=True)  # NaN leaves a gap
            at = [column + shift for column in range(len(points))]
            axes.errorbar(at, means, yerr=[std or 0.0 for std in deviations], label=label, **look, **style)
