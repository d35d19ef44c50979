"""Pictures of encoders on the hypersphere: many in the plane of alignment and uniformity, single ones on the circle."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from uncollapse.lab.experiments.contrastive.predictors import (
    ACCURACY,
    FEWEST,
    INFOMAX,
    SUM,
    Explained,
    column,
    comparable,
    explained,
)
from uncollapse.lab.tables.selection import Record
from uncollapse.lab.tables.table_page import ResultPlot
from uncollapse.report.canvas import COLOURS, INK, LINE, QUIET, add_legend_below, new_figure

KINDS = {"InfoNCE alone": "o", "alignment and uniformity": "D", "mixtures of all": "s", "one of the two alone": "X"}
SCALE = "viridis"
CONCENTRATION = 60.0  # of the von Mises kernel that smooths angles; about 7 degrees
STEPS = 360  # places around the circle
EVEN, HIGHEST = 0.25, 1.5  # of the density outside the circle, whose radius is 1
GRID, BANDWIDTH = 96, 0.06  # of the density in the plane, whose kernel is Gaussian


def scatters(records: Iterable[Record]) -> Iterator[ResultPlot]:
    """The paper's central figure for each group of comparable encoders, and the InfoMax reading beside it."""
    for group in comparable(records):
        if len(group) >= FEWEST:
            yield ResultPlot(f"{len(group)} encoders on {group[0]['config']['data']}", said(group), scatter(group))


def said(records: Sequence[Record]) -> str:
    """How well accuracy goes along with each measure, in a sentence."""
    parts = (f"{one.words} {one.rank:.2f} (R² {one.share:.2f})" for one in explained(records))
    return f"Rank correlation with the accuracy of {len(records)} encoders: {'; '.join(parts)}."


def scatter(records: Sequence[Record]) -> Any:
    """Alignment and uniformity, coloured by accuracy; accuracy over their sum; accuracy over InfoMax's reading."""
    readings = {one.words: one for one in explained(records)}
    figure, (plane, both, information) = new_figure("What makes an encoder good", (15.0, 4.6), 3)
    accuracy = 100 * column(records, ACCURACY)
    align, spread = column(records, "alignment"), column(records, "uniformity")
    points = _points(plane, records, align, spread, accuracy)
    bar = figure.colorbar(points, ax=plane, pad=0.02)
    bar.set_label("accuracy on validation, %", color=INK)
    bar.outline.set_visible(False)
    _titled(plane, "a. Two measures, coloured by accuracy", "alignment, lower is better", "uniformity, lower is better")
    for axes, name, values, title, along in (
        (both, SUM, align + spread, "b. Their sum", "alignment + uniformity"),
        (
            information,
            INFOMAX,
            column(records, "information"),
            "c. InfoMax's reading",
            "log(M + 1) − loss, nats",
        ),
    ):
        _points(axes, records, values, accuracy, accuracy)
        _titled(axes, _with_rank(title, readings[name]), along, "accuracy on validation, %")
    for marker in add_legend_below(figure, plane).legend_handles:
        marker.set(facecolor=QUIET, array=None)  # shapes tell kinds apart; colours tell accuracies
    return figure


def _with_rank(title: str, reading: Explained) -> str:
    return f"{title}: rank correlation {reading.rank:.2f}, R² {reading.share:.2f}"


def _points(axes: Any, records: Sequence[Record], x: NDArray[Any], y: NDArray[Any], colours: NDArray[Any]) -> Any:
    """A marker for each kind of objective."""
    drawn = None
    kinds = [kind(record["config"]) for record in records]
    for words, marker in KINDS.items():
        chosen = [at for at, own in enumerate(kinds) if own == words]
        if chosen:
            drawn = axes.scatter(
                x[chosen],
                y[chosen],
                c=colours[chosen],
                cmap=SCALE,
                vmin=colours.min(),
                vmax=colours.max(),
                marker=marker,
                s=52,
                edgecolors="white",
                linewidths=0.6,
                label=words,
                zorder=3,
            )
    return drawn


def kind(config: Any) -> str:
    """Which kind of objective a run has, among `KINDS`."""
    contrast, align, uniform = (bool(config[name]) for name in ("contrast", "align", "uniform"))
    if contrast:
        return "mixtures of all" if align or uniform else "InfoNCE alone"
    return "alignment and uniformity" if align and uniform else "one of the two alone"


def circles(records: Iterable[Record]) -> Iterator[ResultPlot]:
    """Features on the circle: all encoders of the same settings in one picture, one below the other."""
    groups: dict[str, dict[str, Record]] = {}
    for record in records:
        if "circle" in record:
            fixed = {k: v for k, v in record["config"].items() if k not in ("learned", "temperature")}
            groups.setdefault(str(sorted(fixed.items())), {})[record["config"]["learned"]] = record
    for group in groups.values():
        told = "; ".join(f"{name}: {100 * r['figures']['validation']:.1f} %" for name, r in group.items())
        data = next(iter(group.values()))["config"]["data"]
        yield ResultPlot(f"Features on the circle, {data}", f"Linear accuracy on validation: {told}.", circle(group))


def circle(group: dict[str, Record]) -> Any:
    """A row for each encoder: distances of views, density in the plane and around the circle, and of some classes."""
    shown = _classes(next(iter(group.values())))
    figure, _ = new_figure("", (15.0, 3.5 * len(group)))
    figure.clear()
    rows = figure.subplots(len(group), 3 + len(shown), squeeze=False, width_ratios=[1.25, 1, 1, *[0.8] * len(shown)])
    for panels, (name, record) in zip(rows, group.items(), strict=True):
        angles = numpy.array(record["circle"]["angles"])
        labels = numpy.array(record["circle"]["labels"])
        _distances(panels[0], name, record)
        _density(panels[1], angles)
        _around(panels[2], angles, COLOURS[0], "angles, all classes")
        for number, (panel, (label, words)) in enumerate(zip(panels[3:], shown, strict=True)):
            _around(panel, angles[labels == label], COLOURS[(number + 1) % len(COLOURS)], words)
    return figure


def _classes(record: Record) -> list[tuple[int, str]]:
    """The first, a middle and the last class: number and name."""
    names = record["data"]["classes"]
    return [(at, names[at]) for at in sorted({0, len(names) // 2, len(names) - 1})]


def _distances(axes: Any, name: str, record: Record) -> None:
    counts = numpy.array(record["circle"]["distances"], dtype=float)
    edges = numpy.linspace(0, 2, len(counts) + 1)
    axes.bar(edges[:-1], 100 * counts / counts.sum(), width=edges[1], align="edge", color=COLOURS[0], linewidth=0)
    mean = float((counts * (edges[:-1] + edges[1] / 2)).sum() / counts.sum())
    axes.axvline(mean, color=QUIET, linestyle=(0, (4, 3)), linewidth=1.2)
    figures = record["figures"]
    title = f"{name}: {100 * figures['validation']:.1f} % linear\nmean distance {mean:.2f}"
    _plain(axes)
    _titled(axes, title, "distance of two views", "% of the pairs")


def _density(axes: Any, angles: NDArray[Any]) -> None:
    """Of the points in the plane, by a Gaussian kernel."""
    ticks = numpy.linspace(-1.25, 1.25, GRID)
    x, y = numpy.cos(angles), numpy.sin(angles)
    along = numpy.exp(-0.5 * ((ticks[:, None] - x) / BANDWIDTH) ** 2)  # the kernel is a product: so is the sum
    across = numpy.exp(-0.5 * ((ticks[:, None] - y) / BANDWIDTH) ** 2)
    extent = (-1.25, 1.25, -1.25, 1.25)
    axes.imshow(across @ along.T, origin="lower", extent=extent, cmap=_out_of_nothing(), interpolation="bilinear")
    axes.set_axis_off()
    axes.set_title("density, Gaussian kernel", fontsize=10, color=INK)


def _out_of_nothing() -> Any:
    """Colours from transparent to full, so that where nothing is the page is seen, be it light or dark."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("out of nothing", [f"{COLOURS[0]}00", COLOURS[0]])


def _around(axes: Any, angles: NDArray[Any], colour: str, title: str) -> None:
    """Density around the circle, outwards from it. An even one is a ring of width `EVEN`; too high ones are lowered."""
    around = numpy.linspace(-math.pi, math.pi, STEPS)
    if len(angles):  # of few pictures, none may be of a class
        heights = EVEN * 2 * math.pi * around_density(angles, around)
        radius = 1 + heights * min(1.0, HIGHEST / float(heights.max()))
        there, back = numpy.append(radius, numpy.ones(STEPS)), numpy.append(around, around[::-1])  # a ring
        axes.fill(there * numpy.cos(back), there * numpy.sin(back), color=colour, alpha=0.35, linewidth=0)
        axes.plot(radius * numpy.cos(around), radius * numpy.sin(around), color=colour, linewidth=1.2)
    axes.plot(numpy.cos(around), numpy.sin(around), color=QUIET, linewidth=1.0)
    axes.set_aspect("equal")
    axes.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6))
    axes.set_axis_off()
    axes.set_title(title, fontsize=10, color=INK)


def around_density(angles: NDArray[Any], around: NDArray[Any]) -> NDArray[Any]:
    """Density of angles at some places around the circle, by a von Mises kernel; its integral is 1."""
    kernel = numpy.exp(CONCENTRATION * (numpy.cos(around[:, None] - angles) - 1))
    weight = 2 * math.pi * numpy.i0(CONCENTRATION) * math.exp(-CONCENTRATION)
    density: NDArray[Any] = kernel.mean(1) / weight
    return density


def _plain(axes: Any) -> None:
    axes.tick_params(colors=QUIET, labelcolor=INK, length=3, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)


def _titled(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left", parse_math=False)
    axes.set_xlabel(x, color=INK, parse_math=False)
    axes.set_ylabel(y, color=INK, parse_math=False)
    axes.grid(color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
