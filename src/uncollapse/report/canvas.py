"""The look of all static matplotlib plots: colors, legends, and how a figure is saved or put into a page."""

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from uncollapse.io import files

NEEDED = 'Plots need matplotlib: pip install "uncollapse[report]"'
COLORS = ("#0068a8", "#c44d08", "#00805c", "#a3478b", "#776700", "#4b4bb5")  # of the light theme of the pages
MARKERS: tuple[Any, ...] = ("o", "s", "D", "^", "v", "P", "X", "*", "<", ">", "d", "p")
MARKERS += ((4, 1, 0), (6, 1, 0), "h", (2, 1, 0), (3, 1, 180), "8")  # tuples are stars: points, 1, angle
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
INK, QUIET, LINE = "#17212d", "#566373", "#dce2e9"
FORMATS = (".png", ".svg", ".pdf")
COLUMN, NARROW, LINE_HEIGHT = 3.5, 2.4, 0.17  # inches: a column of a paper, a small panel, a line of text
LETTERS = 13.0  # of a label per inch
DARK = {  # color as drawn, for light pages -> its replacement on dark pages, as in the style sheet of the pages
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


def series_color(index: int) -> str:
    """Return the color of a series, such as a diagnosis, by its index."""
    return COLORS[index % len(COLORS)]


def series_style(index: int) -> dict[str, Any]:
    """Return color, dashes and width of a line: no two of 24 are alike, and neighbors also differ in grey."""
    return {"color": series_color(index), "linestyle": _pair_with_color(DASHES, index), "linewidth": 1.8}


def series_marker(index: int) -> Any:
    """Return the marker of a series: no two of 18 are alike, and no two of 108 together with their colors."""
    return _pair_with_color(MARKERS, index)


def _pair_with_color(looks: Sequence[Any], index: int) -> Any:
    """Return one of the looks in turn, shifted by one each time that its pairs with the colors would repeat."""
    return looks[(index + index // math.lcm(len(COLORS), len(looks))) % len(looks)]


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


def fit_column(figure: Any) -> Any:
    """Lay out a figure again, in place, for a column of a paper or a phone, and return it.

    Panels of a row go below each other, or in pairs if they are small; two rows become two columns. Text stays as large
    as it was, so long lines are broken.
    """
    panels = [axes for axes in figure.axes if axes.get_subplotspec() is not None]
    specs = [axes.get_subplotspec() for axes in panels]
    grid, (width, height) = specs[0].get_gridspec(), figure.get_size_inches()
    shape = max(0.7, (height / grid.nrows) / (width / grid.ncols))
    columns = 2 if (len(panels) > 1 and width / grid.ncols < NARROW) or grid.nrows > 1 else 1
    places = [divmod(number, columns) for number in range(len(panels))]
    ratios: dict[str, Any] = {}
    if grid.nrows == 2:
        places = [(spec.colspan.start, spec.rowspan.start) for spec in specs]
        ratios, shape = {"width_ratios": grid.get_height_ratios()}, 1.0
    rows, own = 1 + max(row for row, _ in places), COLUMN / columns
    new = figure.add_gridspec(rows, columns, **ratios)
    for axes, place in zip(panels, places, strict=True):
        axes.set_subplotspec(new[place])
        if not axes.get_ylabel() and axes.get_xlabel() == panels[0].get_xlabel():
            axes.set_ylabel(panels[0].get_ylabel())  # the first panel's stood for all
        _fit_text(axes, int(LETTERS * own), int(LETTERS * own * shape * 0.65))
    extra = _break_title(figure) + sum(_narrow_legend(figure, legend) for legend in list(figure.legends))
    figure.set_size_inches(COLUMN, rows * own * shape + LINE_HEIGHT * extra)
    return figure


def _fit_text(axes: Any, across: int, up: int) -> None:
    """Break the titles and labels of a panel into lines of so many letters, and leave out labels of ticks."""
    for place in ("left", "center"):
        axes.set_title(_wrapped(axes.get_title(place), across), loc=place, fontsize=9, color=INK)
    axes.set_xlabel(_wrapped(axes.get_xlabel(), int(0.85 * across)), fontsize=9)
    axes.set_ylabel(_wrapped(axes.get_ylabel(), up), fontsize=9)
    axes.tick_params(labelsize=8)
    axes.tick_params(which="minor", labelsize=6)
    if axes.get_legend():
        axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="best")
    names = [text.get_text() for text in axes.get_xticklabels()]
    if type(axes.xaxis.get_major_locator()).__name__ == "FixedLocator" and len(names) > 2 and len(names[0]) > 3:
        every = 2 if sum(len(name) + 2 for name in names) > 1.25 * across else 1
        kept = [name if not at % every and (at != 1 or len(names[1]) > 3) else "" for at, name in enumerate(names)]
        axes.set_xticks(axes.get_xticks(), kept, parse_math=False)


def _break_title(figure: Any) -> int:
    """Break the title of a figure, and return the number of its lines."""
    text = _wrapped(figure.get_suptitle(), int(LETTERS * COLUMN))
    if not text:
        return 0
    figure.suptitle(text, fontsize=10, color=INK, x=0.015, ha="left", parse_math=False)
    return text.count("\n") + 1


def _narrow_legend(figure: Any, legend: Any) -> int:
    """Put a legend below a column, and return the number of its lines."""
    labels = [text.get_text() for text in legend.get_texts()]
    drawn = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    whole = {name for name, line in drawn.items() if isinstance(line, tuple)}  # a point with its bars
    lines = [drawn[name] if name in whole else own for name, own in zip(labels, legend.legend_handles, strict=True)]
    legend.remove()
    columns = min(len(labels), legend_columns(COLUMN, labels))
    place = {"loc": "outside lower left", "ncols": columns, "columnspacing": 1.0}
    for text in figure.legend(lines, labels, frameon=False, fontsize=8, labelcolor=INK, **place).get_texts():
        text.set_parse_math(False)
    return -(-len(labels) // columns)


def _wrapped(text: str, letters: int) -> str:
    return "\n".join(line for part in text.split("\n") for line in textwrap.wrap(part, max(8, letters)))


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
    """Return a figure as a standalone SVG file with the colors of light and dark pages.

    A reader who prefers dark pages sees light lines on the page's background. All others, and programs that ignore this
    preference, see the figure as it was drawn, on white. Equal figures give equal text, without dates or random names.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "uncollapse"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().replace("</style>", f"</style>\n{_dark_style()}", 1)


def _dark_style() -> str:
    """Return the style for dark pages. Black text has no color of its own, so the root element gets one."""
    rules = [f"svg {{ fill: {DARK['#000000']} }}"]
    for light, dark in DARK.items():
        rules += [f'[style*="{name}: {light}"] {{ {name}: {dark} !important }}' for name in ("fill", "stroke")]
    lines = "\n".join(f"   {rule}" for rule in rules)
    return f'  <style type="text/css">\n  @media (prefers-color-scheme: dark) {{\n{lines}\n  }}\n  </style>'


def inline_svg(figure: Any, salt: str = "uncollapse") -> str:
    """Return a figure as an SVG element that takes its colors, light or dark, from the style sheet of the page.

    Names inside it depend on the `salt`: two forms of a figure on one page need different ones.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(
            buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), transparent=True
        )
    text = buffer.getvalue()
    named = {value: f"--s{number}" for number, value in enumerate(COLORS)}
    for value, name in (named | {INK: "--ink", QUIET: "--quiet", LINE: "--line"}).items():
        text = text.replace(f": {value}", f": var({name})")
    return re.sub(r' (width|height)="[\d.]+pt"', "", text[text.index("<svg") :], count=2)  # as wide as the page allows
