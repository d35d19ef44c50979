"""Plots of the page of vision, from results/vit/: what happens block by block, and how many dimensions are left."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from uncollapse.lab.tables.selection import Record
from uncollapse.report.canvas import INK, LINE, QUIET, add_legend_below, new_figure, series_color, series_style
from website.pages import vision
from website.plots import save

BY_LAYER = {
    "mean_cosine": "a. Similarity of patches",
    "attention_std": "b. Deviation of attention rows",
    "effective_rank": "c. Effective rank of an image's patches",
}
MARKED = 0.9  # share of the sum of singular values, where the plot has dots


def draw() -> Iterator[Path]:
    """Draw all plots that the results allow."""
    for name, (data, depth) in vision.PLACES.items():
        found = vision.grouped(data, depth)
        for kind, drawn in (("layers", _draw_layers), ("spectrum", _draw_spectra)):
            if found and f"{kind}_{name}" in vision.PLOTS:
                yield drawn(f"{vision.ACCURACY.name(data)}, {depth} blocks", found, vision.image(f"{kind}_{name}"))


def _draw_layers(where: str, found: dict[str, list[Record]], path: Path) -> Path:
    """A panel for each measure with a line for each way: the mean over seeds, in a band from the least to the most."""
    figure, panels = new_figure(f"{where}: after each block, trained", (10.1, 3.6), len(BY_LAYER))
    for axes, (measure, title) in zip(panels, BY_LAYER.items(), strict=True):
        if "none" in found:
            start = np.array([_along(r, "before", measure) for r in found["none"]], float).mean(0)
            axes.plot(start, color=QUIET, linewidth=1.2, linestyle=(0, (1, 2)), label="nothing added, before training")
        for number, (way, of) in enumerate(found.items()):
            lines = np.array([_along(r, "after", measure) for r in of], float)
            axes.plot(lines.mean(0), label=_told(way, len(of)), **_look(number))
            axes.fill_between(
                range(lines.shape[1]), lines.min(0), lines.max(0), color=series_color(number), alpha=0.15, lw=0
            )
        _titled(axes, title, "block")
    add_legend_below(figure, panels[0])
    return save(figure, path)


def _along(record: Record, when: str, measure: str) -> list[float]:
    """A measure after each block."""
    layers = record["diagnosis"][when]["layers"]
    return [layer[measure] for layer in layers if layer["name"].startswith("block")]


def _draw_spectra(where: str, found: dict[str, list[Record]], path: Path) -> Path:
    """The singular values of the last block, each over their sum, and their sums; the mean over seeds."""
    figure, (values, sums) = new_figure(f"{where}: singular values of the patches after the last block", (10.1, 3.6), 2)
    for number, (way, of) in enumerate(found.items()):
        line = np.array([r["spectrum"] for r in of]).mean(0)
        line, held = line / line.sum(), vision.held(line.tolist(), MARKED)
        dimensions = np.arange(1, len(line) + 1)
        values.plot(dimensions, 100 * line, label=f"{_told(way, len(of))}: {held} dimensions", **_look(number))
        sums.plot(dimensions, 100 * line.cumsum(), **_look(number))
        sums.plot([held], [100 * line[:held].sum()], "o", color=series_color(number), markersize=5)
    _logarithmic(values)
    sums.axhline(100 * MARKED, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
    _titled(values, "Each, % of the sum", "dimension, largest first")
    _titled(sums, f"Added up, % of the sum; dots: where {MARKED:.0%} is reached", "dimensions")
    add_legend_below(figure, values)
    return save(figure, path)


def _logarithmic(axes: Any) -> None:
    """With plain numbers beside the axis, not powers."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 5)]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def _told(way: str, seeds: int) -> str:
    return f"{vision.ACCURACY.name(way)} ({seeds} seed{'s' if seeds > 1 else ''})"


def _look(number: int) -> dict[str, Any]:
    """Color and dashes of a way. Six colors and four dashes give twelve pairs."""
    return series_style(number)


def _titled(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel(below, color=INK)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
