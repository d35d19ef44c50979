"""Show results in notebooks: small HTML tables that take their look from the notebook."""

from collections.abc import Iterable, Sequence
from html import escape


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
