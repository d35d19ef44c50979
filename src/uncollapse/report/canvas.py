"""What all static plots share: their look, their legend, and how they are written."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uncollapse.io import files
from uncollapse.report import schemes

NEEDED = 'Plots need matplotlib: pip install "uncollapse[report]"'
COLOURS = ("#0068a8", "#c44d08", "#00805c", "#a3478b", "#776700", "#4b4bb5")  # those of the page in its light theme
MARKERS = ("o", "s", "D", "^", "v", "P")
INK, QUIET, LINE = "#17212d", "#566373", "#dce2e9"
FORMATS = (".png", ".svg", ".pdf")


def colour(of: int) -> str:
    """The colour of a diagnosis, by its number."""
    return COLOURS[of % len(COLOURS)]


def blank(title: str, size: tuple[float, float], columns: int = 1) -> tuple[Any, Sequence[Any]]:
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


def legend(axes: Any) -> None:
    """What the lines are, where there is more than one. Names are no formulas."""
    lines, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        for text in axes.legend(lines, labels, frameon=False, fontsize=9, labelcolor=INK).get_texts():
            text.set_parse_math(False)


def legend_below(figure: Any, axes: Any, columns: int = 5) -> Any:
    """One legend for all panels, below them: inside, it would cover lines. It is that of one of the axes."""
    lines, labels = axes.get_legend_handles_labels()
    place = {"loc": "outside lower left", "ncols": min(len(labels), columns)}
    made = figure.legend(lines, labels, frameon=False, fontsize=9, labelcolor=INK, **place)
    for text in made.get_texts():
        text.set_parse_math(False)
    return made


def evenly(count: int, most: int) -> range:
    """At most so many of the first `count` numbers, evenly spaced: where ticks have room."""
    return range(0, count, max(1, -(-count // most)))


def save(figure: Any, path: str | Path) -> Path:
    """Write the figure in the format that the name ends in, as a whole or not at all."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise ValueError(f"A plot ends in {', '.join(FORMATS)}; got {target.name!r}.")
    if target.suffix.lower() == ".svg":
        return files.write(target, schemes.svg(figure))
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=160, format=target.suffix[1:].lower())
    return files.write(target, drawn.getvalue())
