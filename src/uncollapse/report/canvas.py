"""What all static plots share: their look, their legend, and how they are written."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uncollapse.io import files

NEEDED = 'Plots need matplotlib: pip install "uncollapse[report]"'
COLOURS = ("#0068a8", "#c44d08", "#00805c", "#a3478b", "#776700", "#4b4bb5")  # those of the page in its light theme
MARKERS = ("o", "s", "D", "^", "v", "P")
INK, QUIET, LINE = "#17212d", "#566373", "#dce2e9"
FORMATS = (".png", ".svg", ".pdf")


def series_colour(of: int) -> str:
    """The colour of a diagnosis, by its number."""
    return COLOURS[of % len(COLOURS)]


def new_figure(title: str, size: tuple[float, float], columns: int = 1) -> tuple[Any, Sequence[Any]]:
    """A figure with a title and empty axes beside each other. matplotlib is imported here, and only here."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(NEEDED) from error
    figure: Any = Figure(figsize=size, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    all_axes = figure.subplots(1, columns, squeeze=False)[0]
    figure.suptitle(title, fontsize=12, color=INK, x=0.015, ha="left", parse_math=False)
    for axes in all_axes:
        axes.tick_params(colors=QUIET, labelcolor=INK, length=3, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(QUIET)
    return figure, all_axes


def add_legend(axes: Any) -> None:
    """What the lines are, where there is more than one. Names are no formulas."""
    lines, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        for text in axes.legend(lines, labels, frameon=False, fontsize=9, labelcolor=INK).get_texts():
            text.set_parse_math(False)


def add_legend_below(figure: Any, axes: Any, columns: int = 5) -> Any:
    """One legend for all panels, below them: inside, it would cover lines. It is that of one of the axes."""
    lines, labels = axes.get_legend_handles_labels()
    place = {"loc": "outside lower left", "ncols": min(len(labels), columns)}
    made = figure.legend(lines, labels, frameon=False, fontsize=9, labelcolor=INK, **place)
    for text in made.get_texts():
        text.set_parse_math(False)
    return made


def tick_positions(count: int, most: int) -> range:
    """At most so many of the first `count` numbers, evenly spaced: where ticks have room."""
    return range(0, count, max(1, -(-count // most)))


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write the figure in the format that the name ends in, as a whole or not at all."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise ValueError(f"A plot ends in {', '.join(FORMATS)}; got {target.name!r}.")
    if target.suffix.lower() == ".svg":
        return files.write(target, themed_svg(figure))
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=160, format=target.suffix[1:].lower())
    return files.write(target, drawn.getvalue())


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


def themed_svg(figure: Any) -> str:
    """A matplotlib figure as SVG. The same picture gives the same text: it has neither date nor random names.

    A reader who prefers dark pages sees light lines on the page's own ground. All others, and programs that do not know
    of this preference, see the picture as it was drawn, on white.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "uncollapse"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().replace("</style>", f"</style>\n{_dark_style()}", 1)


def _dark_style() -> str:
    """The style for dark pages. Text that is drawn in black has no colour of its own, so the root has one."""
    rules = [f"svg {{ fill: {PAIRS['#000000']} }}"]
    for drawn, shown in PAIRS.items():
        rules += [f'[style*="{what}: {drawn}"] {{ {what}: {shown} !important }}' for what in ("fill", "stroke")]
    lines = "\n".join(f"   {rule}" for rule in rules)
    return f'  <style type="text/css">\n  @media (prefers-color-scheme: dark) {{\n{lines}\n  }}\n  </style>'


def inline_svg(figure: Any) -> str:
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
