"""A board as one HTML page that needs nothing else: its tables, and a picture of each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uncollapse import __version__
from uncollapse.io.files import write
from uncollapse.lab.tables import markdown
from uncollapse.lab.tables.paper_table import Board, Cell, cells
from uncollapse.lab.tables.selection import Record
from uncollapse.lab.tables.table_plots import figure_of_group
from uncollapse.report.inline import svg
from uncollapse.report.markup import Child, Markup, element
from uncollapse.report.page import document, top
from uncollapse.report.sections import scroller, swatch

ONE_LINE = "white-space: nowrap"  # a wide table is scrolled rather than squeezed
BETTER, WORSE = "--none", "--complete"  # what the style sheet calls the colours of good and bad news


@dataclass(frozen=True)
class Picture:
    """A picture of results as a matplotlib figure. said: what it shows, in words."""

    title: str
    said: str
    figure: Any


def write_page(board: Board, records: Iterable[Record], path: str | Path, pictures: Iterable[Picture] = ()) -> Path:
    """Write the tables of a board, each with its picture, and more pictures, as one self-contained HTML page."""
    return write(Path(path), page(board, cells(board, records), tuple(pictures)))


def page(board: Board, made: Sequence[Cell], pictures: Sequence[Picture] = ()) -> str:
    """The page as text."""
    groups = markdown.by_group(made)
    links = [element("a", str(group), href=f"#group-{i}") for i, group in enumerate(groups)]
    links += [element("a", each.title, href=f"#picture-{i}") for i, each in enumerate(pictures)]
    body: list[Child] = [
        *top("tables", links, "Tables"),
        element(
            "main",
            element(
                "div", element("h1", board.title), element("p", markdown.summary(made), class_="meta"), class_="title"
            ),
            element("p", markdown.legend(board, made), class_="lead"),
            [_group(board, i, group, rows) for i, (group, rows) in enumerate(groups.items())],
            [_picture(i, each) for i, each in enumerate(pictures)],
            _notes(markdown.notes(board, made)),
            id="main",
        ),
        element("footer", element("p", f"Written by uncollapse {__version__}. This page sends and loads nothing.")),
    ]
    return document(board.title, (), body)


def _group(board: Board, number: int, group: Any, rows: Mapping[Any, Sequence[Cell]]) -> Markup:
    said = f"The same numbers as lines over {board.columns}, the paper's dashed."
    return element(
        "section",
        element("h2", f"{board.groups} {group}"),
        scroller(_table(board, rows), f"Results on {group}"),
        _card(figure_of_group(board, group, rows), said, "58rem"),
        id=f"group-{number}",
    )


def _picture(number: int, picture: Picture) -> Markup:
    said = element("p", picture.said, class_="lead")
    card = _card(picture.figure, picture.said, "none")
    return element("section", element("h2", picture.title), said, card, id=f"picture-{number}")


def _card(figure: Any, said: str, widest: str) -> Markup:
    style = f"min-width: 32rem; max-width: {widest}"
    drawn = element("div", Markup(svg(figure)), role="img", aria_label=said, style=style)
    return element("div", drawn, class_="card", style="margin-top: 1rem; overflow-x: auto")


def _table(board: Board, rows: Mapping[Any, Sequence[Cell]]) -> Markup:
    columns = [str(cell.column) for cell in next(iter(rows.values()))]
    head = element(
        "tr",
        element("th", markdown.corner(board), scope="col", style=ONE_LINE),
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


def _cell(board: Board, cell: Cell) -> Markup:
    """Ours, below it the paper's, and what was chosen."""
    colour = "--ink" if cell.near else {True: BETTER, False: WORSE, None: "--ink"}[cell.reached]
    lines = [element("span", markdown.marked(board, cell), style=f"color: var({colour}); font-weight: 600")]
    paper, chosen = markdown.theirs(board, cell), markdown.choice(cell)
    lines += [element("small", "paper ", paper)] if paper else []
    lines += [element("small", chosen)] if chosen else []
    stacked = [[line, element("br")] for line in lines[:-1]]
    return element("td", stacked, lines[-1], class_="number", style=ONE_LINE)


def _notes(notes: Sequence[str]) -> Markup | None:
    if not notes:
        return None
    items = [element("li", note) for note in notes]
    return element("section", element("h2", "Good to know"), element("ul", items, class_="sentences"), id="notes")
