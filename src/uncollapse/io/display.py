"""Lay out results for terminals, as columns that fit the width, and for notebooks, as HTML in the notebook's style."""

import math
import textwrap
from collections.abc import Iterable, Sequence
from html import escape

from rich.text import Text


def fit_columns(
    head: list[str], rows: list[list[str]], width: int | None, optional: Sequence[str]
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return a table with only as many columns as fit, so that no number is cut, and the names of those left out.

    Args:
        head: the names of the columns, which may wrap between words.
        rows: the texts of the cells, which do not wrap.
        width: of the terminal; None for any.
        optional: names of columns that may be left out, the least important first.
    """
    left_out: list[str] = []
    for name in optional:
        if width is None or table_width(column_widths(head, rows)) <= width:
            break
        if name in head:
            place = head.index(name)
            head, rows = _without(head, place), [_without(row, place) for row in rows]
            left_out.append(name)
    return head, rows, left_out


def column_widths(head: list[str], rows: list[list[str]]) -> list[int]:
    """Return how wide each column of a table must be so that nothing is cut: names wrap between words, cells do not."""
    return [max(len(text) for text in (*title.split(), *(row[i] for row in rows))) for i, title in enumerate(head)]


def exact_widths(head: list[str], rows: list[list[str]], least: list[int], width: int | None) -> list[int]:
    """Return the width of each column: that of its text while there is room, and `least` from then on.

    With least widths alone, rich makes some columns wider than that and cuts the last ones.
    """
    full = [max(len(text) for text in (title, *(row[i] for row in rows))) for i, title in enumerate(head)]
    room = sum(full) if width is None else width - table_width(least)
    widths = []
    for small, large in zip(least, full, strict=True):
        widths.append(large if large - small <= room else small)
        room -= widths[-1] - small
    return widths


def table_width(columns: Iterable[int]) -> int:
    """Return the width of a table whose columns are this wide, with the gaps between them."""
    return sum(column + 3 for column in columns) + 2


def _without(texts: list[str], place: int) -> list[str]:
    return texts[:place] + texts[place + 1 :]


def wrap_title(words: str, width: int | None) -> Text:
    """Return the title of a table as wide as the terminal, not only as wide as the table."""
    lines = words.split("\n") if width is None else [textwrap.fill(line, width) for line in words.split("\n")]
    return Text("\n".join(lines), no_wrap=True, overflow="ignore")


def format_value(value: float) -> str:
    """Return a value for a column of a table, with as many decimals as its neighbors; a dash if it was not measured."""
    if math.isnan(value):
        return "–"
    value = round(value, 3) + 0.0  # no −0
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1e4 else f"{value:.2e}"


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return a table. Everything is escaped: names of models and files may hold anything.

    >>> html_table(["layer", "rank"], [["<b>", "3"]])
    '<table><thead><tr><th>layer</th><th>rank</th></tr></thead><tbody><tr><td>&lt;b&gt;</td><td>3</td></tr></tbody></table>'
    """
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(_row("td", row) for row in rows)
    return f"<table>{title}<thead>{_row('th', head)}</thead><tbody>{body}</tbody></table>"


def html_lines(lines: Sequence[str]) -> str:
    """Return a first sentence in bold, and what belongs to it as a list."""
    if not lines:
        return ""
    rest = "".join(f"<li>{escape(line)}</li>" for line in lines[1:])
    return f"<p><b>{escape(lines[0])}</b></p>" + (f"<ul>{rest}</ul>" if rest else "")


def html_code(code: str) -> str:
    """Return a line of code to copy."""
    return f"<pre>{escape(code)}</pre>"


def _row(cell: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts) + "</tr>"
