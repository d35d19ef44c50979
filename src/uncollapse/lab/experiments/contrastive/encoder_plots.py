"""Pictures of encoders on the hypersphere: many in the plane of alignment and uniformity, single ones on the circle."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from uncollapse.errors import import_optional
from uncollapse.lab.experiments.contrastive.objectives import information_bound
from uncollapse.lab.tables.selection import Record
from uncollapse.lab.tables.table_page import ResultPlot
from uncollapse.report.canvas import COLOURS, INK, LINE, QUIET, add_legend_below, new_figure

KINDS = {"InfoNCE alone": "o", "alignment and uniformity": "D", "mixtures of all": "s", "one of the two alone": "X"}
SCALE = "viridis"
CONCENTRATION = 60.0  # of the von Mises kernel that smooths angles; about 7 degrees
STEPS = 360  # places around the circle
EVEN, HIGHEST = 0.25, 1.5  # of the density outside the circle, whose radius is 1
GRID, BANDWIDTH = 96, 0.06  # of the density in the plane, whose kernel is Gaussian


@dataclass(frozen=True)
class Correlation:
    """How well something goes along with accuracy.

    rank: Spearman's correlation, −1 … 1. share: of the accuracy's variance that a linear fit explains, 0 … 1.
    """

    words: str
    rank: float
    share: float


def scatter_plots(records: Iterable[Record]) -> Iterator[ResultPlot]:
    """The paper's central figure for each group of comparable encoders, and the InfoMax reading beside it."""
    for group in comparable_groups(records):
        if len(group) >= FEWEST:
            yield ResultPlot(
                f"{len(group)} encoders on {group[0]['config']['data']}",
                describe_correlations(group),
                scatter_figure(group),
            )


def describe_correlations(records: Sequence[Record]) -> str:
    """How well accuracy goes along with each measure, in a sentence."""
    parts = (f"{one.words} {one.rank:.2f} (R² {one.share:.2f})" for one in correlate_with_accuracy(records))
    return f"Rank correlation with the accuracy of {len(records)} encoders: {'; '.join(parts)}."


def scatter_figure(records: Sequence[Record]) -> Any:
    """Alignment and uniformity, coloured by accuracy; accuracy over their sum; accuracy over InfoMax's reading."""
    readings = {one.words: one for one in correlate_with_accuracy(records)}
    figure, (plane, both, information) = new_figure("What makes an encoder good", (15.0, 4.6), 3)
    accuracy = 100 * metric_column(records, ACCURACY)
    align, spread = metric_column(records, "alignment"), metric_column(records, "uniformity")
    points = _draw_points(plane, records, align, spread, accuracy)
    bar = figure.colorbar(points, ax=plane, pad=0.02)
    bar.set_label("accuracy on validation, %", color=INK)
    bar.outline.set_visible(False)
    _set_titles(
        plane, "a. Two measures, coloured by accuracy", "alignment, lower is better", "uniformity, lower is better"
    )
    for axes, name, values, title, along in (
        (both, SUM, align + spread, "b. Their sum", "alignment + uniformity"),
        (
            information,
            INFOMAX,
            metric_column(records, "information"),
            "c. InfoMax's reading",
            "log(M + 1) − loss, nats",
        ),
    ):
        _draw_points(axes, records, values, accuracy, accuracy)
        _set_titles(axes, _with_rank(title, readings[name]), along, "accuracy on validation, %")
    for marker in add_legend_below(figure, plane).legend_handles:
        marker.set(facecolor=QUIET, array=None)  # shapes tell kinds apart; colours tell accuracies
    return figure


def _with_rank(title: str, reading: Correlation) -> str:
    return f"{title}: rank correlation {reading.rank:.2f}, R² {reading.share:.2f}"


def _draw_points(axes: Any, records: Sequence[Record], x: NDArray[Any], y: NDArray[Any], colours: NDArray[Any]) -> Any:
    """A marker for each kind of objective."""
    drawn = None
    kinds = [objective_kind(record["config"]) for record in records]
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


def objective_kind(config: Any) -> str:
    """Which kind of objective a run has, among `KINDS`."""
    contrast, align, uniform = (bool(config[name]) for name in ("contrast", "align", "uniform"))
    if contrast:
        return "mixtures of all" if align or uniform else "InfoNCE alone"
    return "alignment and uniformity" if align and uniform else "one of the two alone"


def circle_plots(records: Iterable[Record]) -> Iterator[ResultPlot]:
    """Features on the circle: all encoders of the same settings in one picture, one below the other."""
    groups: dict[str, dict[str, Record]] = {}
    for record in records:
        if "circle" in record:
            fixed = {k: v for k, v in record["config"].items() if k not in ("learned", "temperature")}
            groups.setdefault(str(sorted(fixed.items())), {})[record["config"]["learned"]] = record
    for group in groups.values():
        told = "; ".join(f"{name}: {100 * r['figures']['validation']:.1f} %" for name, r in group.items())
        data = next(iter(group.values()))["config"]["data"]
        yield ResultPlot(
            f"Features on the circle, {data}", f"Linear accuracy on validation: {told}.", circle_figure(group)
        )


def circle_figure(group: dict[str, Record]) -> Any:
    """A row for each encoder: distances of views, density in the plane and around the circle, and of some classes."""
    shown = _classes(next(iter(group.values())))
    figure, _ = new_figure("", (15.0, 3.5 * len(group)))
    figure.clear()
    rows = figure.subplots(len(group), 3 + len(shown), squeeze=False, width_ratios=[1.25, 1, 1, *[0.8] * len(shown)])
    for panels, (name, record) in zip(rows, group.items(), strict=True):
        angles = numpy.array(record["circle"]["angles"])
        labels = numpy.array(record["circle"]["labels"])
        _draw_distances(panels[0], name, record)
        _draw_density(panels[1], angles)
        _draw_angles(panels[2], angles, COLOURS[0], "angles, all classes")
        for number, (panel, (label, words)) in enumerate(zip(panels[3:], shown, strict=True)):
            _draw_angles(panel, angles[labels == label], COLOURS[(number + 1) % len(COLOURS)], words)
    return figure


def _classes(record: Record) -> list[tuple[int, str]]:
    """The first, a middle and the last class: number and name."""
    names = record["data"]["classes"]
    return [(at, names[at]) for at in sorted({0, len(names) // 2, len(names) - 1})]


def _draw_distances(axes: Any, name: str, record: Record) -> None:
    counts = numpy.array(record["circle"]["distances"], dtype=float)
    edges = numpy.linspace(0, 2, len(counts) + 1)
    axes.bar(edges[:-1], 100 * counts / counts.sum(), width=edges[1], align="edge", color=COLOURS[0], linewidth=0)
    mean = float((counts * (edges[:-1] + edges[1] / 2)).sum() / counts.sum())
    axes.axvline(mean, color=QUIET, linestyle=(0, (4, 3)), linewidth=1.2)
    figures = record["figures"]
    title = f"{name}: {100 * figures['validation']:.1f} % linear\nmean distance {mean:.2f}"
    _style_axes(axes)
    _set_titles(axes, title, "distance of two views", "% of the pairs")


def _draw_density(axes: Any, angles: NDArray[Any]) -> None:
    """Of the points in the plane, by a Gaussian kernel."""
    ticks = numpy.linspace(-1.25, 1.25, GRID)
    x, y = numpy.cos(angles), numpy.sin(angles)
    along = numpy.exp(-0.5 * ((ticks[:, None] - x) / BANDWIDTH) ** 2)  # the kernel is a product: so is the sum
    across = numpy.exp(-0.5 * ((ticks[:, None] - y) / BANDWIDTH) ** 2)
    extent = (-1.25, 1.25, -1.25, 1.25)
    axes.imshow(across @ along.T, origin="lower", extent=extent, cmap=_transparent_colormap(), interpolation="bilinear")
    axes.set_axis_off()
    axes.set_title("density, Gaussian kernel", fontsize=10, color=INK)


def _transparent_colormap() -> Any:
    """Colours from transparent to full, so that where nothing is the page is seen, be it light or dark."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("out of nothing", [f"{COLOURS[0]}00", COLOURS[0]])


def _draw_angles(axes: Any, angles: NDArray[Any], colour: str, title: str) -> None:
    """Density around the circle, outwards from it. An even one is a ring of width `EVEN`; too high ones are lowered."""
    around = numpy.linspace(-math.pi, math.pi, STEPS)
    if len(angles):  # of few pictures, none may be of a class
        heights = EVEN * 2 * math.pi * angle_density(angles, around)
        radius = 1 + heights * min(1.0, HIGHEST / float(heights.max()))
        there, back = numpy.append(radius, numpy.ones(STEPS)), numpy.append(around, around[::-1])  # a ring
        axes.fill(there * numpy.cos(back), there * numpy.sin(back), color=colour, alpha=0.35, linewidth=0)
        axes.plot(radius * numpy.cos(around), radius * numpy.sin(around), color=colour, linewidth=1.2)
    axes.plot(numpy.cos(around), numpy.sin(around), color=QUIET, linewidth=1.0)
    axes.set_aspect("equal")
    axes.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6))
    axes.set_axis_off()
    axes.set_title(title, fontsize=10, color=INK)


def angle_density(angles: NDArray[Any], around: NDArray[Any]) -> NDArray[Any]:
    """Density of angles at some places around the circle, by a von Mises kernel; its integral is 1."""
    kernel = numpy.exp(CONCENTRATION * (numpy.cos(around[:, None] - angles) - 1))
    weight = 2 * math.pi * numpy.i0(CONCENTRATION) * math.exp(-CONCENTRATION)
    density: NDArray[Any] = kernel.mean(1) / weight
    return density


def _style_axes(axes: Any) -> None:
    axes.tick_params(colors=QUIET, labelcolor=INK, length=3, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)


def _set_titles(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left", parse_math=False)
    axes.set_xlabel(x, color=INK, parse_math=False)
    axes.set_ylabel(y, color=INK, parse_math=False)
    axes.grid(color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)


ACCURACY = "validation_output_linear"
FREE = frozenset(
    ("contrast", "temperature", "negatives", "align", "alpha", "uniform", "t", "batch", "dim", "seed")
)  # settings in which encoders of one picture may differ
SUM, INFOMAX = "alignment + uniformity", "InfoMax: log(M + 1) − loss"
FEWEST = 3  # encoders that a correlation needs


def comparable_groups(records: Iterable[Record]) -> list[list[Record]]:
    """Encoders that differ in objective, batch, size of the output and seed only, in groups; the largest first."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if {"alignment", "uniformity", "information", ACCURACY} <= record["figures"].keys():
            fixed = {name: value for name, value in record["config"].items() if name not in FREE}
            groups[json.dumps(fixed, sort_keys=True)].append(record)
    return sorted(groups.values(), key=len, reverse=True)


def correlate_with_accuracy(records: Sequence[Record], accuracy: str = ACCURACY) -> list[Correlation]:
    """How each measure, the sum of the paper's two, and InfoNCE's reading go along with accuracy; needs 3 encoders.

    The paper's two are added up, and also weighed as suits a linear fit best. InfoNCE is read at the temperature that
    makes its bound tightest and, if all were trained with it alone, also by the loss that each was trained to.
    """
    target = metric_column(records, accuracy)
    align, spread, tightest = (metric_column(records, name) for name in ("alignment", "uniformity", "information"))
    readings: list[tuple[str, NDArray[Any]]] = [
        ("alignment", align),
        ("uniformity", spread),
        (SUM, align + spread),
        ("the two, weighed", _linear_fit([align, spread], target)),
        (INFOMAX, tightest),
    ]
    reached = [information_in_training(record) for record in records]
    if None not in reached:
        readings.append(("InfoMax, by the loss that it was trained to", numpy.array(reached, dtype=float)))
    return [Correlation(words, _spearman(values, target), _r_squared(values, target)) for words, values in readings]


def information_in_training(record: Record) -> float | None:
    """log(M + 1) − loss at the end of the training, with its own temperature and batch; None if it had other aims."""
    config, epochs = record["config"], record.get("epochs")
    if not epochs or not config["contrast"] or config["align"] or config["uniform"]:
        return None
    negatives = config["batch"] - 1 if config["negatives"] == "cross" else 2 * config["batch"] - 2
    return information_bound(epochs[-1]["loss"] / config["contrast"], negatives)


def metric_column(records: Sequence[Record], name: str) -> NDArray[Any]:
    """A figure of each encoder."""
    return numpy.array([record["figures"][name] for record in records], dtype=float)


def _spearman(values: NDArray[Any], target: NDArray[Any]) -> float:
    stats: Any = import_optional("scipy.stats", "train")
    if min(values.std(), target.std()) == 0:  # nothing goes along with what does not change
        return 0.0
    return float(stats.spearmanr(values, target).statistic)


def _r_squared(values: NDArray[Any], target: NDArray[Any]) -> float:
    """R² of the linear fit."""
    spread = float(((target - target.mean()) ** 2).sum())
    return 1 - float(((target - _linear_fit([values], target)) ** 2).sum()) / spread if spread else 0.0


def _linear_fit(values: Sequence[NDArray[Any]], target: NDArray[Any]) -> NDArray[Any]:
    """What the best linear fit expects."""
    design = numpy.column_stack([*values, numpy.ones_like(target)])
    expected: NDArray[Any] = design @ numpy.linalg.lstsq(design, target, rcond=None)[0]
    return expected
