"""The frame that all HTML pages share: Jinja2 templates, style sheet, scripts and Content-Security-Policy.

A page is one self-contained file. Templates escape every string. Only this module marks text as safe HTML: its own
style sheet and scripts, plotly.js, SVG plots that matplotlib wrote, and JSON that cannot end its script element.
"""

import base64
import functools
import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uncollapse import __version__
from uncollapse.io.files import write
from uncollapse.report.canvas import fit_column, inline_svg
from uncollapse.report.words import format_number, measure_title

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

NEEDED = 'HTML pages need Jinja2 and plotly: pip install "uncollapse[report]"'


def render(template: str, *, scripts: Sequence[str] = (), allowed: Sequence[str] = (), **context: Any) -> str:
    """Return a page as text.

    Args:
        template: File of the folder `templates` that extends `frame.html`.
        scripts: Files of the folder `assets` that the page ends with.
        allowed: Sources of more scripts that the policy allows, because a script of the page starts them.
        context: What the template shows. The frame needs `title`, `subtitle`, `subject` (what the link past the
            navigation leads to) and `links` (identifier of a section -> its name in the navigation).
    """
    environment = _environment()
    sources = [read_asset(name) for name in scripts]
    page = environment.get_template(template).render(
        policy=content_security_policy([*sources, *allowed]),
        style=_safe(read_asset("report.css")),
        scripts=list(map(_safe, sources)),
        version=__version__,
        **context,
    )
    return f"{page}\n"


def write_html(text: str, path: str | Path) -> Path:
    """Write a page atomically. Lone surrogates, which file names can contain, become question marks."""
    return write(Path(path), text.encode("utf-8", errors="replace"))


def content_security_policy(scripts: Sequence[str]) -> str:
    """Return the policy of a page: it may use its own styles, its own images and these scripts, and load nothing.

    Scripts are allowed by their hash, so a script that a model's name smuggled into the page would not run. Inline
    styles are allowed, because plotly creates some while it draws and SVG plots carry them. Nothing can be loaded, so
    a style cannot send anything either. blob: is for images and tables that the reader saves.
    """
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(map(script_hash, scripts)) or "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def script_hash(source: str) -> str:
    """Return the source expression by which a Content-Security-Policy allows an inline script."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() + "'"


def read_asset(name: str) -> str:
    """Return the text of a file of the folder `assets`."""
    return (files("uncollapse.report") / "assets" / name).read_text(encoding="utf-8")


def plotly_source() -> str:
    """Return the source of plotly.js from the installed package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(NEEDED) from error
    source: str = get_plotlyjs()
    return source


@functools.cache
def packed_plotly() -> str:
    """Return plotly.js as the page contains it: compressed from 5 MB to 2 MB, which the browser unpacks."""
    return base64.b64encode(gzip.compress(plotly_source().encode(), mtime=0)).decode()


def json_for_script(value: Any) -> "Markup":
    """Return JSON for a script element, which no string in it can end.

    >>> print(json_for_script({"name": "</script>"}))
    {"name":"\\u003c/script\\u003e"}
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII only, so without U+2028 too
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _safe(text)


def breakable(name: str) -> "Markup":
    """Return a long dotted name that may wrap after a dot, a slash or an underscore.

    >>> print(breakable("a.b_<i>"))
    a.<wbr>b_<wbr>&lt;i&gt;
    """
    from markupsafe import escape

    return _safe("").join(
        escape(part) + _safe("<wbr>" if part in "./_" else "") for part in re.split(r"([./_])", name) if part
    )


@functools.cache
def _environment() -> "Environment":
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError(NEEDED) from error
    environment = Environment(
        loader=PackageLoader("uncollapse.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": breakable,
        "json": json_for_script,
        "measure_title": measure_title,
        "number": format_number,
        "repr": repr,
        "svg": lambda figure: _safe(inline_svg(figure)),
        "column_svg": lambda figure: _safe(inline_svg(fit_column(figure), "column")),
    }
    return environment


def _safe(text: str) -> "Markup":
    """Return text that goes into a page unescaped. Never call this with a string of a model or a file."""
    from markupsafe import Markup

    return Markup(text)
