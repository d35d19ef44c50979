"""HTML page and plots of a paper table: one table and one plot per group, and more plots of the results."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.tables import contrasts, markdown
from uncollapse.lab.tables.markdown import group_cells
from uncollapse.lab.tables.paper_table import Details, PaperTable, TableCell, build_cells
from uncollapse.lab.tables.selection import Record
from uncollapse.lab.tables.significance import mean_interval
from uncollapse.report import frame
from uncollapse.report.canvas import (
    INK,
    LINE,
    QUIET,
    add_legend_below,
    legend_columns,
    new_figure,
    save_figure,
    series_color,
    series_marker,
)

BETTER, WORSE, NEUTRAL = "--none", "--complete", "--ink"  # colors of the style sheet
WIDTH, HEIGHT, LEGEND_LINE = 5.6, 3.6, 0.19  # inches: of a plot, and of each line of its legend
SHIFT = 0.03  # columns between our points and the paper's, so that both error bars can be seen
FEWEST = 5  # seeds from which on an interval is drawn: of fewer it is wider than anything else in the plot
DASHED: dict[str, Any] = {"linestyle": (0, (4, 3)), "linewidth": 1.2, "markerfacecolor": "none"}  # the paper's


@dataclass(frozen=True)
class ResultPlot:
    """A plot of results as a matplotlib figure. caption: what it shows, in words."""

    title: str
    caption: str
    figure: Any


def write_page(
    table: PaperTable,
    records: Iterable[Record],
    path: str | Path,
    plots: Iterable[ResultPlot] = (),
    details: Iterable[Details] = (),
) -> Path:
    """Write a table, a plot per group, further tables and plots as one self-contained HTML page."""
    return frame.write_html(render_page(table, build_cells(table, records), tuple(plots), tuple(details)), path)


def render_page(
    table: PaperTable,
    cells: Sequence[TableCell],
    plots: Sequence[ResultPlot] = (),
    details: Sequence[Details] = (),
) -> str:
    """Return the page as text."""
    groups = [_group(table, i, name, rows) for i, (name, rows) in enumerate(group_cells(cells).items())]
    links = {group["id"]: group["name"] for group in groups}
    found = contrasts.compare_rows(table, cells)
    head, rows = contrasts.contrast_rows(table, found)
    differences = Details(markdown.DIFFERENCES, contrasts.contrast_note(found), head, rows, words=3)
    shown = [*([differences] if rows else ()), *details]
    return frame.render(
        "table.html",
        title=table.title,
        subtitle=markdown.coverage(table, cells),
        subject="tables",
        links=links
        | _links("details", (each.title for each in shown))
        | _links("plot", (plot.title for plot in plots)),
        legend=markdown.legend(table, cells),
        corner=markdown.corner_label(table),
        columns=table.columns,
        groups=groups,
        plots=plots,
        notes=markdown.cell_notes(table, cells),
        details=shown,
    )


def _links(name: str, titles: Iterable[str]) -> dict[str, str]:
    return {f"{name}-{i}": title for i, title in enumerate(titles)}


def _group(table: PaperTable, number: int, group: Any, rows: Mapping[Any, Sequence[TableCell]]) -> dict[str, Any]:
    """Return what the template shows of a group."""
    return {
        "id": f"group-{number}",
        "name": str(group),
        "heading": group_title(table, group),
        "columns": [str(cell.column) for cell in next(iter(rows.values()))],
        "rows": {str(row): [_cell(table, cell) for cell in along] for row, along in rows.items()},
        "figure": draw_group(table, group, rows),
    }


def _cell(table: PaperTable, cell: TableCell) -> dict[str, str]:
    """Return our number and its color, the paper's, the interval of the difference, and the chosen settings."""
    color = NEUTRAL if cell.near or cell.tied else {True: BETTER, False: WORSE, None: NEUTRAL}[cell.reached]
    return {
        "ours": markdown.format_marked(table, cell),
        "color": color,
        "paper": markdown.format_published(table, cell),
        "difference": markdown.format_difference(table, cell),
        "choice": markdown.format_choice(cell),
    }


def group_title(table: PaperTable, group: Any) -> str:
    """Return what plots call a group: its name, or the field and its value."""
    return table.names.get(str(group), f"{table.groups} {group}")


def plot_group(table: PaperTable, records: Iterable[Record], group: Any, path: str | Path) -> Path:
    """Plot one group of a table, with 95 % intervals of the means. path: ends in .png, .svg or .pdf."""
    groups = group_cells(build_cells(table, records))
    if group not in groups:
        hint = did_you_mean(group, groups)
        raise UsageError(f"The table has no {table.groups} {group}.{hint} It has: {', '.join(map(str, groups))}.")
    return save_figure(draw_group(table, group, groups[group]), path)


def draw_group(table: PaperTable, group: Any, rows: Mapping[Any, Sequence[TableCell]]) -> Any:
    """Return a matplotlib figure of one group: the metric over the columns, one line per row, the paper's dashed.

    Bars are 95 % intervals of the mean. Where there are fewer than five seeds, their values are dots instead.
    """
    cells = [cell for along in rows.values() for cell in along]
    bars = any(len(cell.figures) >= FEWEST or _paper(cell)[1] for cell in cells)
    dots = any(1 < len(cell.figures) < FEWEST for cell in cells)
    words = ", ".join(["mean over seeds", *["bars: 95 % interval"] * bars, *["dots: single seeds"] * dots])
    names = [*map(table.name, rows), *["the paper's"] * any(cell.published for cell in cells)]
    legend = legend_columns(WIDTH, names)
    size = (WIDTH, HEIGHT + LEGEND_LINE * math.ceil(len(names) / legend))
    figure, (axes,) = new_figure(f"{group_title(table, group)}\n{words}", size)
    columns = [str(cell.column) for cell in next(iter(rows.values()))]
    apart = 0.8 / len(rows) if len(columns) == 1 else 0.0  # points of a single column would cover each other
    for number, (row, along) in enumerate(rows.items()):
        _draw_row(axes, number, table.name(row), along, apart * (number - (len(rows) - 1) / 2))
    axes.set_xticks(range(len(columns)), columns, parse_math=False)
    if len(columns) == 1:
        axes.set_xlim(-0.5, 0.5)  # keeps the single tick next to its points
    axes.set_xlabel(table.name(table.columns), color=INK, parse_math=False)
    axes.set_ylabel(f"{table.name(table.metric)}{', %' if table.percent else ''}", color=INK, parse_math=False)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    if table.percent and min((cell.mean for cell in cells if cell.mean is not None), default=0.0) >= 0:
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))  # an interval may reach below what is possible
    if any(cell.published for cell in cells):
        axes.plot([], [], color=QUIET, marker="o", markersize=5, label="the paper's", **DASHED)
    if axes.get_legend_handles_labels()[1]:
        add_legend_below(figure, axes, legend)
    return figure


def _draw_row(axes: Any, number: int, name: str, along: Sequence[TableCell], offset: float) -> None:
    """Draw one row, `offset` columns to the right: our results, and the paper's as a dashed line."""
    color = series_color(number)
    look = {"color": color, "marker": series_marker(number), "markersize": 5, "elinewidth": 1.0, "capsize": 2.5}
    label = {"label": name}
    run = any(cell.mean is not None for cell in along)  # otherwise the paper's line stands for the row
    for points, shift, style in (
        ([_paper(cell) for cell in along], SHIFT, DASHED if run else DASHED | label),
        ([_ours(cell) for cell in along], -SHIFT, {"linewidth": 2} | label),
    ):
        if any(not math.isnan(mean) for mean, _ in points):
            means, halves = zip(*points, strict=True)  # NaN leaves a gap
            at = [column + offset + shift for column in range(len(points))]
            axes.errorbar(at, means, yerr=halves, **look, **style)
    for column, cell in enumerate(along):
        if 1 < len(cell.figures) < FEWEST:
            values = list(cell.figures.values())
            axes.plot([column + offset - 3 * SHIFT] * len(values), values, "o", color=color, markersize=4, alpha=0.6)


def _ours(cell: TableCell) -> tuple[float, float]:
    """Return our mean and the half width of its interval, 0 if there are too few seeds for a bar."""
    bar = cell.mean is not None and len(cell.figures) >= FEWEST
    return _with_half(cell.mean, cell.std if bar else None, len(cell.figures))


def _paper(cell: TableCell) -> tuple[float, float]:
    """Return the paper's mean and the half width of its interval, 0 if the number of its runs is not known."""
    paper = cell.published
    return _with_half(None, None, 0) if paper is None else _with_half(paper.mean, paper.std, paper.runs or 0)


def _with_half(mean: float | None, std: float | None, n: int) -> tuple[float, float]:
    if mean is None:
        return math.nan, 0.0
    interval = mean_interval(mean, std, n)
    return mean, (interval[1] - mean if interval else 0.0)
