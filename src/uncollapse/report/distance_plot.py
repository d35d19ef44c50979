"""Plot the distances between embeddings, next to those of random points on the sphere."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.report.canvas import INK, QUIET, add_legend_below, new_figure, series_colour
from uncollapse.report.tracks import diagnosis_names

SIZE = (5.6, 3.4)  # inches; narrow, so that the plot fits on a phone
STYLES = {"rows": ("two rows", "-"), "pairs": ("a row and its partner", ":")}


@dataclass(frozen=True)
class DistancePlot:
    """A figure of matplotlib, and its main numbers in words."""

    figure: Any
    caption: str


def draw_distances(diagnoses: Sequence[Diagnosis]) -> DistancePlot | None:
    """Return the histograms of all layers that have them; None if there are none."""
    found = [
        (name, layer, of)
        for of, (name, d) in enumerate(zip(diagnosis_names(diagnoses), diagnoses, strict=True))
        for layer in d.layers
        if layer.distances
    ]
    if not found:
        return None
    figure, (axes,) = new_figure("", SIZE)
    captions, widths = [], set()
    for name, layer, of in found:
        start = f"{name}: " if len(found) > 1 else ""
        for kind, (words, line) in STYLES.items():
            if kind in layer.distances:
                _draw(axes, layer.distances[kind], f"{start}{words}", line, series_colour(of))
                captions.append(f"{start}{words}, median {_median(layer.distances[kind]):.2f}")
        if layer.dim not in widths and "random" in layer.distances:
            label = f"random points in {layer.dim} dimensions"
            _draw(axes, layer.distances["random"], label, "--", QUIET)
            captions.append(f"{label}, median {_median(layer.distances['random']):.2f}")
            widths.add(layer.dim)
    axes.set_xlabel("distance on the unit sphere", color=INK)
    axes.set_ylabel("share of pairs", color=INK)
    axes.set_xlim(0, 2)
    axes.set_ylim(bottom=0)
    add_legend_below(figure, axes, 2)
    return DistancePlot(figure, f"Distances: {'; '.join(captions)}.")


def _draw(axes: Any, shares: Sequence[float], label: str, line: str, colour: str) -> None:
    edges = [2 * number / len(shares) for number in range(len(shares) + 1)]
    axes.stairs(shares, edges, label=label, linestyle=line, color=colour, linewidth=1.6)


def _median(shares: Sequence[float]) -> float:
    """Return the middle of the bin in which half of the pairs is reached."""
    reached = next(number for number, total in enumerate(accumulate(shares)) if total >= 0.5 * sum(shares))
    return 2 * (reached + 0.5) / len(shares)
