"""A board as one HTML page that needs nothing else: its tables, and a picture of each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uncollapse import __version__
from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io.files import write
from uncollapse.lab.tables import markdown
from uncollapse.lab.tables.markdown import group_cells
from uncollapse.lab.tables.paper_table import PaperTable, TableCell, build_cells
from uncollapse.lab.tables.selection import Record
from uncollapse.report.canvas import COLOURS, INK, LINE, MARKERS, inline_svg, new_figure, save_figure, series_colour
from uncollapse.report.markup import Child, Markup, element
from uncollapse.report.page import document, top
from uncollapse.report.sections import scroller, swatch

ONE_LINE = "white-space: nowrap"  # a wide table is scrolled rather than squeezed
BETTER, WORSE = "--none", "--complete"  # what the style sheet calls the colours of good and bad news


@dataclass(frozen=True)
class ResultPlot:
    """A picture of results as a matplotlib figure. caption: what it shows, in words."""

    title: str
    caption: str
    figure: Any


def write_page(
    board: PaperTable, records: Iterable[Record], path: str | Path, pictures: Iterable[ResultPlot] = ()
) -> Path:
    """Write the tables of a board, each with its picture, and more pictures, as one self-contained HTML page."""
    return write(Path(path), render_page(board, build_cells(board, records), tuple(pictures)))


def render_page(board: PaperTable, made: Sequence[TableCell], pictures: Sequence[ResultPlot] = ()) -> str:
    """The page as text."""
    groups = markdown.group_cells(made)
    links = [element("a", str(group), href=f"#group-{i}") for i, group in enumerate(groups)]
    links += [element("a", each.title, href=f"#picture-{i}") for i, each in enumerate(pictures)]
    body: list[Child] = [
        *top("tables", links, "Tables"),
        element(
            "main",
            element(
                "div", element("h1", board.title), element("p", markdown.coverage(made), class_="meta"), class_="title"
            ),
            element("p", markdown.legend(board, made), class_="lead"),
            [_group(board, i, group, rows) for i, (group, rows) in enumerate(groups.items())],
            [_picture(i, each) for i, each in enumerate(pictures)],
            _notes(markdown.cell_notes(board, made)),
            id="main",
        ),
        element("footer", element("p", f"Written by uncollapse {__version__}. This page sends and loads nothing.")),
    ]
    return document(board.title, (), body)


def _group(board: PaperTable, number: int, group: Any, rows: Mapping[Any, Sequence[TableCell]]) -> Markup:
    said = f"The same numbers as lines over {board.columns}, the paper's dashed."
    return element(
        "section",
        element("h2", f"{board.groups} {group}"),
        scroller(_table(board, rows), f"Results on {group}"),
        _card(draw_group(board, group, rows), said, "58rem"),
        id=f"group-{number}",
    )


def _picture(number: int, picture: ResultPlot) -> Markup:
    said = element("p", picture.caption, class_="lead")
    card = _card(picture.figure, picture.caption, "none")
    return element("section", element("h2", picture.title), said, card, id=f"picture-{number}")


def _card(figure: Any, said: str, widest: str) -> Markup:
    style = f"min-width: 32rem; max-width: {widest}"
    drawn = element("div", Markup(inline_svg(figure)), role="img", aria_label=said, style=style)
    return element("div", drawn, class_="card", style="margin-top: 1rem; overflow-x: auto")


def _table(board: PaperTable, rows: Mapping[Any, Sequence[TableCell]]) -> Markup:
    columns = [str(cell.column) for cell in next(iter(rows.values()))]
    head = element(
        "tr",
        element("th", markdown.corner_label(board), scope="col", style=ONE_LINE),
        [element("th", column, scope="col", class_="number") for column in columns],
    )
    body = [
        element(
            "tr",
            element("th", swatch(i), str(row), scope="row", style=ONE_LINE),
            [_cell(board, cell) for cell in along],
        )
        for i, (row, along) in enumerate(rows.items())
    ]
    return element("table", element("thead", head), element("tbody", body))


def _cell(board: PaperTable, cell: TableCell) -> Markup:
    """Ours, below it the paper's, and what was chosen."""
    colour = "--ink" if cell.near else {True: BETTER, False: WORSE, None: "--ink"}[cell.reached]
    lines = [element("span", markdown.format_marked(board, cell), style=f"color: var({colour}); font-weight: 600")]
    paper, chosen = markdown.format_published(board, cell), markdown.format_choice(cell)
    lines += [element("small", "paper ", paper)] if paper else []
    lines += [element("small", chosen)] if chosen else []
    stacked = [[line, element("br")] for line in lines[:-1]]
    return element("td", stacked, lines[-1], class_="number", style=ONE_LINE)


def _notes(notes: Sequence[str]) -> Markup | None:
    if not notes:
        return None
    items = [element("li", note) for note in notes]
    return element("section", element("h2", "Good to know"), element("ul", items, class_="sentences"), id="notes")


SIZE = (8.4, 4.0)
ASIDE = 0.03  # of the room of a column: so that the error bars of ours and of the paper's are both seen


def plot_group(board: PaperTable, records: Iterable[Record], group: Any, path: str | Path) -> Path:
    """Draw the table of a group, with error bars of one standard deviation. path: ends in .png, .svg or .pdf."""
    tables = group_cells(build_cells(board, records))
    if group not in tables:
        hint = did_you_mean(group, tables)
        raise UsageError(f"No table is for {board.groups} {group}.{hint} There are: {', '.join(map(str, tables))}.")
    return save_figure(draw_group(board, group, tables[group]), path)


def draw_group(board: PaperTable, group: Any, rows: Mapping[Any, Sequence[TableCell]]) -> Any:
    """The picture of a table as a matplotlib figure."""
    figure, (axes,) = new_figure(f"{board.groups} {group}", SIZE)
    for number, (row, along) in enumerate(rows.items()):
        _draw_row(axes, number, str(row), along)
    columns = [str(cell.column) for cell in next(iter(rows.values()))]
    axes.set_xticks(range(len(columns)), columns, parse_math=False)
    if len(columns) == 1:
        axes.set_xlim(-0.5, 0.5)  # else its tick lies at the edge, far from its points
    axes.set_xlabel(board.columns, color=INK, parse_math=False)
    axes.set_ylabel(f"{board.metric.replace('_', ' ')}{', %' if board.percent else ''}", color=INK, parse_math=False)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    lines, labels = axes.get_legend_handles_labels()
    if labels:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}  # beside: lines may be anywhere inside
        for text in axes.legend(lines, labels, frameon=False, fontsize=9, labelcolor=INK, **place).get_texts():
            text.set_parse_math(False)
    return figure


def _draw_row(axes: Any, number: int, name: str, along: Sequence[TableCell]) -> None:
    """One row: ours where it was run, the paper's where it has a number."""
    ours = [None if cell.mean is None else (cell.mean, cell.std) for cell in along]
    paper = [None if cell.published is None else (cell.published.mean, cell.published.std) for cell in along]
    marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]  # other pairs once the colours are used up
    look = {"color": series_colour(number), "marker": marker, "markersize": 5, "elinewidth": 1.0, "capsize": 2.5}
    dashed = {"linestyle": (0, (4, 3)), "linewidth": 1.2, "markerfacecolor": "none"}
    for points, shift, label, style in (
        (paper, ASIDE, f"{name}, paper", dashed),
        (ours, -ASIDE, name, {"linewidth": 2}),
    ):
        if any(points):
            means, spreads = zip(*(point or (math.nan, None) for point in points), strict=True)  # a gap, not a bridge
            at = [column + shift for column in range(len(points))]
            axes.errorbar(at, means, yerr=[spread or 0.0 for spread in spreads], label=label, **look, **style)
