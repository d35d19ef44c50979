"""The look of all static matplotlib plots: colours, legends, and how a figure is saved or put into a page."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from uncollapse.io import files

NEEDED = 'Plots need matplotlib: pip install "uncollapse[report]"'
COLOURS = ("#0068a8", "#c44d08", "#00805c", "#a3478b", "#776700", "#4b4bb5")  # of the light theme of the pages
MARKERS: tuple[Any, ...] = ("o", "s", "D", "^", "v", "P", "X", "*", "<", ">", "d", "p")
MARKERS += ((4, 1, 0), (6, 1, 0), "h", (2, 1, 0), (3, 1, 180), "8")  # tuples are stars: points, 1, angle
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
INK, QUIET, LINE = "#17212d", "#566373", "#dce2e9"
FORMATS = (".png", ".svg", ".pdf")
DARK = {  # colour as drawn, for light pages -> its replacement on dark pages, as in the style sheet of the pages
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


def series_colour(index: int) -> str:
    """Return the colour of a series, such as a diagnosis, by its index."""
    return COLOURS[index % len(COLOURS)]


def series_style(index: int) -> dict[str, Any]:
    """Return colour, dashes and width of a line: no two of 24 are alike, and neighbours also differ in grey."""
    return {"color": series_colour(index), "linestyle": _pair_with_colour(DASHES, index), "linewidth": 1.8}


def series_marker(index: int) -> Any:
    """Return the marker of a series: no two of 18 are alike, and no two of 108 together with their colours."""
    return _pair_with_colour(MARKERS, index)


def _pair_with_colour(looks: Sequence[Any], index: int) -> Any:
    """Return one of the looks in turn, shifted by one each time that its pairs with the colours would repeat."""
    return looks[(index + index // math.lcm(len(COLOURS), len(looks))) % len(looks)]


def new_figure(title: str, size: tuple[float, float], columns: int = 1) -> tuple[Any, Sequence[Any]]:
    """Return a figure with a title and a row of empty axes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(NEEDED) from error
    figure: Any = Figure(figsize=size, facecolor="white", layout="constrained")
    figure._repr_png_ = partial(_png, figure)  # a notebook shows it, also without pyplot
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    all_axes = figure.subplots(1, columns, squeeze=False)[0]
    figure.suptitle(title, fontsize=12, color=INK, x=0.015, ha="left", parse_math=False)
    for axes in all_axes:
        axes.tick_params(colors=QUIET, labelcolor=INK, length=3, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(QUIET)
    return figure, all_axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    return buffer.getvalue()


def add_legend_below(figure: Any, axes: Any, columns: int = 5) -> Any:
    """Add one legend for all panels below them, from the lines of one of the axes, and return it.

    It is outside, because lines may be anywhere inside. Names are not parsed as formulas.
    """
    lines, labels = axes.get_legend_handles_labels()
    place = {"loc": "outside lower left", "ncols": min(len(labels), columns)}
    legend = figure.legend(lines, labels, frameon=False, fontsize=9, labelcolor=INK, **place)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return legend


def legend_columns(width: float, names: Iterable[str]) -> int:
    """Return how many columns of names fit below a figure of `width` inches."""
    longest = max(map(len, names), default=1)
    return max(1, int(width / (0.5 + 0.066 * longest)))  # a line and its gap, and a letter of 9 points


def tick_positions(count: int, limit: int) -> range:
    """Return at most `limit` of the first `count` integers, evenly spaced."""
    return range(0, count, max(1, -(-count // limit)))


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write a figure atomically, in the format of the file name's suffix."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise ValueError(f"The file name of a plot must end in {', '.join(FORMATS)}, got {target.name!r}.")
    if target.suffix.lower() == ".svg":
        return files.write(target, themed_svg(figure))
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=160, format=target.suffix[1:].lower())
    return files.write(target, buffer.getvalue())


def themed_svg(figure: Any) -> str:
    """Return a figure as a standalone SVG file with the colours of light and dark pages.

    A reader who prefers dark pages sees light lines on the page's background. All others, and programs that ignore this
    preference, see the figure as it was drawn, on white. Equal figures give equal text, without dates or random names.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "uncollapse"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().replace("</style>", f"</style>\n{_dark_style()}", 1)


def _dark_style() -> str:
    """Return the style for dark pages. Black text has no colour of its own, so the root element gets one."""
    rules = [f"svg {{ fill: {DARK['#000000']} }}"]
    for light, dark in DARK.items():
        rules += [f'[style*="{name}: {light}"] {{ {name}: {dark} !important }}' for name in ("fill", "stroke")]
    lines = "\n".join(f"   {rule}" for rule in rules)
    return f'  <style type="text/css">\n  @media (prefers-color-scheme: dark) {{\n{lines}\n  }}\n  </style>'


def inline_svg(figure: Any) -> str:
    """Return a figure as an SVG element that takes its colours, light or dark, from the style sheet of the page."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "uncollapse"}):
        figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), transparent=True
        )
    text = buffer.getvalue()
    named = {value: f"--s{number}" for number, value in enumerate(COLOURS)}
    for value, name in (named | {INK: "--ink", QUIET: "--quiet", LINE: "--line"}).items():
        text = text.replace(f": {value}", f": var({name})")
    return re.sub(r' (width|height)="[\d.]+pt"', "", text[text.index("<svg") :], count=2)  # as wide as the page allows
