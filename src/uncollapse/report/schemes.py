"""SVG pictures that can be read on a light and on a dark page: one file with the colours of both."""

import io
from typing import Any

# As drawn, for a light page, and what takes its place on a dark one: the pairs of the report's style sheet
PAIRS = {
    "#0068a8": "#58b4f0",
    "#c44d08": "#f79256",
    "#00805c": "#3fcf9f",
    "#a3478b": "#e795c6",
    "#776700": "#d9c53f",
    "#4b4bb5": "#a5a6ff",
    "#17212d": "#e7edf4",
    "#566373": "#9dabba",
    "#dce2e9": "#2a3542",
    "#000000": "#e7edf4",
    "#ffffff": "transparent",
}


def svg(figure: Any) -> str:
    """A matplotlib figure as SVG. The same picture gives the same text: it has neither date nor random names.

    A reader who prefers dark pages sees light lines on the page's own ground. All others, and programs that do not know
    of this preference, see the picture as it was drawn, on white.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "uncollapse"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().replace("</style>", f"</style>\n{_dark()}", 1)


def _dark() -> str:
    """The style for dark pages. Text that is drawn in black has no colour of its own, so the root has one."""
    rules = [f"svg {{ fill: {PAIRS['#000000']} }}"]
    for drawn, shown in PAIRS.items():
        rules += [f'[style*="{what}: {drawn}"] {{ {what}: {shown} !important }}' for what in ("fill", "stroke")]
    lines = "\n".join(f"   {rule}" for rule in rules)
    return f'  <style type="text/css">\n  @media (prefers-color-scheme: dark) {{\n{lines}\n  }}\n  </style>'
