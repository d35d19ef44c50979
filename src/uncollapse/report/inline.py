"""Static plots within a page."""

import io
import re
from typing import Any

from uncollapse.report.canvas import COLOURS, INK, LINE, QUIET


def svg(figure: Any) -> str:
    """A figure as an SVG element whose colours are those of the report's style sheet, in its light and dark theme."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "uncollapse"}):  # the same picture, the same text
        figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), transparent=True
        )
    text = buffer.getvalue()
    named = {value: f"--s{number}" for number, value in enumerate(COLOURS)}
    for value, name in (named | {INK: "--ink", QUIET: "--quiet", LINE: "--line"}).items():
        text = text.replace(f": {value}", f": var({name})")
    return re.sub(r' (width|height)="[\d.]+pt"', "", text[text.index("<svg") :], count=2)  # as wide as there is room
