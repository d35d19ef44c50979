"""Plots of encoders on the hypersphere: what predicts accuracy, and features on the circle."""

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
    Correlation,
    comparable_groups,
    correlate_with_accuracy,
    metric_column,
    partial_correlations,
)
from uncollapse.lab.tables.selection import Record
from uncollapse.lab.tables.table_page import ResultPlot
from uncollapse.report.canvas import COLORS, INK, LINE, QUIET, add_legend_below, new_figure

KINDS = {"InfoNCE alone": "o", "alignment and uniformity": "D", "mixtures of all": "s", "one of the two alone": "X"}
SCALE = "viridis"
CONCENTRATION = 60.0  # of the von Mises kernel that smooths angles; about 7 degrees
STEPS = 360  # angles at which a density is drawn
EVEN, HIGHEST = 0.25, 1.5  # height of the uniform density and largest height, outside the circle of radius 1
GRID, BANDWIDTH = 96, 0.06  # of the Gaussian density in the plane


def scatter_plots(records: Iterable[Record]) -> Iterator[ResultPlot]:
    """Yield the paper's central figure for each group of comparable encoders, next to the InfoMax view."""
    for group in comparable_groups(records):
        if len(group) >= FEWEST:
            yield ResultPlot(
                f"{len(group)} encoders on {group[0]['config']['data']}",
                describe_correlations(group),
                scatter_figure(group),
            )


def describe_correlations(records: Sequence[Record]) -> str:
    """Return how well each metric predicts accuracy, alone and with the other one held fixed, in sentences."""
    parts = (f"{one.name} {one.spearman:.2f} (R² {one.r_squared:.2f})" for one in correlate_with_accuracy(records))
    whole = f"Rank correlation with the accuracy of {len(records)} encoders: {'; '.join(parts)}."
    if not (partials := partial_correlations(records)):
        return whole
    given = (f"{one.name} {one.value:.2f} ({one.low:.2f} … {one.high:.2f})" for one in partials)
    return f"{whole} Partial rank correlation, with 95 % intervals: {'; '.join(given)}."


def scatter_figure(records: Sequence[Record]) -> Any:
    """Draw alignment and uniformity, colored by accuracy; accuracy over their sum, and over InfoMax's bound."""
    readings = {one.name: one for one in correlate_with_accuracy(records)}
    figure, (plane, both, information) = new_figure("What makes an encoder good", (15.0, 4.6), 3)
    accuracy = 100 * metric_column(records, ACCURACY)
    align, spread = metric_column(records, "alignment"), metric_column(records, "uniformity")
    points = _draw_points(plane, records, align, spread, accuracy)
    bar = figure.colorbar(points, ax=plane, pad=0.02)
    bar.set_label("accuracy on validation, %", color=INK)
    bar.outline.set_visible(False)
    _set_titles(
        plane, "a. Two measures, colored by accuracy", "alignment, lower is better", "uniformity, lower is better"
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
        marker.set(facecolor=QUIET, array=None)  # markers show the kind, colors show the accuracy
    return figure


def _with_rank(title: str, reading: Correlation) -> str:
    return f"{title}: rank correlation {reading.spearman:.2f}, R² {reading.r_squared:.2f}"


def _draw_points(axes: Any, records: Sequence[Record], x: NDArray[Any], y: NDArray[Any], colors: NDArray[Any]) -> Any:
    """Draw one point per encoder, with a marker per kind of objective."""
    drawn = None
    kinds = [objective_kind(record["config"]) for record in records]
    for words, marker in KINDS.items():
        chosen = [at for at, own in enumerate(kinds) if own == words]
        if chosen:
            drawn = axes.scatter(
                x[chosen],
                y[chosen],
                c=colors[chosen],
                cmap=SCALE,
                vmin=colors.min(),
                vmax=colors.max(),
                marker=marker,
                s=52,
                edgecolors="white",
                linewidths=0.6,
                label=words,
                zorder=3,
            )
    return drawn


def objective_kind(config: Any) -> str:
    """Return the kind of a run's objective, one of `KINDS`."""
    contrast, align, uniform = (bool(config[name]) for name in ("contrast", "align", "uniform"))
    if contrast:
        return "mixtures of all" if align or uniform else "InfoNCE alone"
    return "alignment and uniformity" if align and uniform else "one of the two alone"


def circle_plots(records: Iterable[Record]) -> Iterator[ResultPlot]:
    """Yield one plot of features on the circle per group of encoders with the same settings."""
    groups: dict[str, dict[str, Record]] = {}
    for record in records:
        if "circle" in record:
            fixed = {k: v for k, v in record["config"].items() if k not in ("learned", "temperature")}
            groups.setdefault(str(sorted(fixed.items())), {})[record["config"]["learned"]] = record
    for group in groups.values():
        shares = "; ".join(f"{name}: {100 * r['figures']['test']:.1f} %" for name, r in group.items())
        data = next(iter(group.values()))["config"]["data"]
        yield ResultPlot(
            f"Features on the circle, {data}", f"Linear accuracy on test images: {shares}.", circle_figure(group)
        )


def circle_figure(group: dict[str, Record]) -> Any:
    """Draw one row per encoder: distances of views, densities in the plane and on the circle, and of some classes."""
    shown = _classes(next(iter(group.values())))
    figure, _ = new_figure("", (15.0, 3.5 * len(group)))
    figure.clear()
    rows = figure.subplots(len(group), 3 + len(shown), squeeze=False, width_ratios=[1.25, 1, 1, *[0.8] * len(shown)])
    for panels, (name, record) in zip(rows, group.items(), strict=True):
        angles = numpy.array(record["circle"]["angles"])
        labels = numpy.array(record["circle"]["labels"])
        _draw_distances(panels[0], name, record)
        _draw_density(panels[1], angles)
        _draw_angles(panels[2], angles, COLORS[0], "angles, all classes")
        for number, (panel, (label, words)) in enumerate(zip(panels[3:], shown, strict=True)):
            _draw_angles(panel, angles[labels == label], COLORS[(number + 1) % len(COLORS)], words)
    return figure


def _classes(record: Record) -> list[tuple[int, str]]:
    """Return the first, a middle and the last class: number and name."""
    names = record["data"]["classes"]
    return [(at, names[at]) for at in sorted({0, len(names) // 2, len(names) - 1})]


def _draw_distances(axes: Any, name: str, record: Record) -> None:
    counts = numpy.array(record["circle"]["distances"], dtype=float)
    edges = numpy.linspace(0, 2, len(counts) + 1)
    axes.bar(edges[:-1], 100 * counts / counts.sum(), width=edges[1], align="edge", color=COLORS[0], linewidth=0)
    mean = float((counts * (edges[:-1] + edges[1] / 2)).sum() / counts.sum())
    axes.axvline(mean, color=QUIET, linestyle=(0, (4, 3)), linewidth=1.2)
    metrics = record["figures"]
    shown = "validation" if "validation" in metrics else "test"  # without a holdout, test images are shown
    accuracy = f"{name}: {100 * metrics['test']:.1f} % linear on test images"
    title = f"{accuracy}\n{shown} images: mean distance {mean:.2f}"
    _style_axes(axes)
    _set_titles(axes, title, "distance of two views", "% of the pairs")


def _draw_density(axes: Any, angles: NDArray[Any]) -> None:
    """Draw the density of the points in the plane, with a Gaussian kernel."""
    ticks = numpy.linspace(-1.25, 1.25, GRID)
    x, y = numpy.cos(angles), numpy.sin(angles)
    along = numpy.exp(-0.5 * ((ticks[:, None] - x) / BANDWIDTH) ** 2)  # the kernel is a product: so is the sum
    across = numpy.exp(-0.5 * ((ticks[:, None] - y) / BANDWIDTH) ** 2)
    extent = (-1.25, 1.25, -1.25, 1.25)
    axes.imshow(across @ along.T, origin="lower", extent=extent, cmap=_transparent_colormap(), interpolation="bilinear")
    axes.set_axis_off()
    axes.set_title("density, Gaussian kernel", fontsize=10, color=INK)


def _transparent_colormap() -> Any:
    """Return a color map from transparent to opaque, so that an empty plot shows the page, light or dark."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("transparent", [f"{COLORS[0]}00", COLORS[0]])


def _draw_angles(axes: Any, angles: NDArray[Any], color: str, title: str) -> None:
    """Draw a density outwards from the circle. A uniform one is a ring of width `EVEN`; high ones are scaled down."""
    around = numpy.linspace(-math.pi, math.pi, STEPS)
    if len(angles):  # a class may have no images among few
        heights = EVEN * 2 * math.pi * angle_density(angles, around)
        radius = 1 + heights * min(1.0, HIGHEST / float(heights.max()))
        there, back = numpy.append(radius, numpy.ones(STEPS)), numpy.append(around, around[::-1])  # a ring
        axes.fill(there * numpy.cos(back), there * numpy.sin(back), color=color, alpha=0.35, linewidth=0)
        axes.plot(radius * numpy.cos(around), radius * numpy.sin(around), color=color, linewidth=1.2)
    axes.plot(numpy.cos(around), numpy.sin(around), color=QUIET, linewidth=1.0)
    axes.set_aspect("equal")
    axes.set(xlim=(-2.6, 2.6), ylim=(-2.6, 2.6))
    axes.set_axis_off()
    axes.set_title(title, fontsize=10, color=INK)


def angle_density(angles: NDArray[Any], around: NDArray[Any]) -> NDArray[Any]:
    """Return the density of angles at some points of the circle, with a von Mises kernel; its integral is 1."""
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
