"""Plots of point sets and of the limit of InfoNCE, from results/potentials/ and results/asymptotics/."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import NullLocator

from uncollapse.lab.config.fields import build
from uncollapse.lab.experiments.sphere import asymptotics, potentials
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.tables.selection import Record
from uncollapse.report.canvas import (
    INK,
    LINE,
    MARKERS,
    QUIET,
    add_legend_below,
    new_figure,
    series_color,
    series_marker,
    series_style,
)
from website.pages import results
from website.pages.results import IMAGES
from website.plots import save

SETS = {
    "uniform": "random",
    "regular": "regular",
    "optimised": "minimizing the loss",
    "half": "one half",
    "clusters": "clusters",
    "cluster": "one cluster",
}
NAMES = {2: "circle", 3: "sphere"}
INSIDE, AREA = (
    1.06,
    0.25,
)  # of the density around the circle: where it begins, and the area of an even one, in units of π
KERNEL = (1.0, 2.0, 3.0, 2.0, 1.0)  # smooths counts of angles
VIEW = math.radians(20)  # from which height the sphere is seen
ESTIMATORS = {"without": "without self pairs", "with": "with self pairs"}
FALLS = {"bias": (-1.0, "1/M"), "fluctuation": (-0.5, "M^−1/2")}


def draw() -> list[Path]:
    """Draw all plots that the results allow."""
    points = {record["config"]["dim"]: record for record in _planned(potentials.NAME) if "sets" in record}
    measured = [record for record in _planned(asymptotics.NAME) if "curve" in record]
    drawn = [_draw_sets(dim, points[dim]) for dim in NAMES if dim in points]
    drawn += [_draw_estimators(points)] if points else []
    if measured:
        drawn += [_draw_rates(measured, "bias"), _draw_rates(measured, "fluctuation"), _draw_terms(measured)]
    return drawn


def image(name: str) -> Path:
    """Where a plot is."""
    return IMAGES / f"hypersphere_{name}.svg"


def _planned(name: str) -> Iterator[Record]:
    """The results of the named grid, in its order: others may be of a quick trial."""
    recipe = RECIPES[name]
    found = {build(recipe.config, _known(recipe.config, r)): r for r in results.records(name)}
    grids: tuple[Grid, ...] = recipe.grids["all"]
    trials = (trial for grid in grids for cell in grid.cells(recipe.config) for trial in cell.trials)
    return (found[trial] for trial in trials if trial in found)


def _known(config: type, record: Record) -> dict[str, Any]:
    return {name: record["config"][name] for name in config.__dataclass_fields__}  # type: ignore[attr-defined]


def _draw_sets(dim: int, record: Record) -> Path:
    """A panel for each set, with its mean potential above it: the paper's Figure 4."""
    t, optimum = record["config"]["t"], record["figures"]["optimum"]
    title = f"Mean potential G of points on the {NAMES[dim]}, t = {t:g}; the least of any distribution: "
    figure, panels = new_figure(f"{title}{math.exp(optimum):.4f}", (10.8, 2.9), len(SETS))
    for axes, (name, words) in zip(panels, SETS.items(), strict=True):
        axes.set_axis_off()
        axes.set_aspect("equal")
        if name in record["sets"]:
            facts = record["sets"][name]
            (_draw_circle if dim == 2 else _draw_sphere)(axes, facts)
            axes.set_title(f"{words}, n = {facts['n']:,}\nG = {facts['potential']:.4f}", fontsize=10, color=INK)
    return save(figure, image(f"points_{NAMES[dim]}"))


def _draw_circle(axes: Any, facts: dict[str, Any]) -> None:
    """The points, and around them their density: the area over an arc is the share of the points on it."""
    counts = np.array(facts["angles"], float)
    kernel = np.array(KERNEL) / sum(KERNEL)
    reach = len(kernel) // 2
    density = np.convolve(np.concatenate([counts[-reach:], counts, counts[:reach]]), kernel, "valid") / counts.mean()
    angles = -math.pi + (np.arange(len(counts) + 1) + 0.5) * (2 * math.pi / len(counts))
    outside = np.sqrt(INSIDE**2 + AREA * np.append(density, density[0]))
    ring = [np.append(outside, np.full(len(angles), INSIDE)), np.append(angles, angles[::-1])]
    axes.fill(ring[0] * np.cos(ring[1]), ring[0] * np.sin(ring[1]), color=series_color(0), alpha=0.3, lw=0)
    x, y = np.array(facts["points"]).T
    axes.plot(x, y, ".", color=series_color(0), markersize=3, alpha=0.6, markeredgewidth=0)
    axes.set_xlim(-1.95, 1.95)
    axes.set_ylim(-1.95, 1.95)


def _draw_sphere(axes: Any, facts: dict[str, Any]) -> None:
    """The points as seen from far away, those behind the sphere pale."""
    x, y, z = np.array(facts["points"]).T
    depth, height = math.cos(VIEW) * y - math.sin(VIEW) * z, math.sin(VIEW) * y + math.cos(VIEW) * z
    edge = np.linspace(0, 2 * math.pi, 181)
    axes.plot(np.cos(edge), np.sin(edge), color=LINE, linewidth=1.2)
    for there, alpha in ((depth > 0, 0.18), (depth <= 0, 0.8)):
        look = {"color": series_color(0), "markersize": 4, "alpha": alpha, "markeredgewidth": 0}
        axes.plot(x[there], height[there], ".", **look)
    axes.set_xlim(-1.15, 1.15)
    axes.set_ylim(-1.15, 1.15)


def _draw_estimators(points: dict[int, Record]) -> Path:
    """How far both estimators are from the optimum on samples of the uniform distribution, and on the best points."""
    title = "The loss on n points of the uniform distribution: mean, and a standard deviation on either side"
    figure, panels = new_figure(title, (9.4, 3.7), len(points))
    for axes, (dim, record) in zip(panels, points.items(), strict=True):
        rows, few, optimum = record["estimators"], record["few"], record["figures"]["optimum"]
        for number, (kind, words) in enumerate(ESTIMATORS.items()):
            mean, std = (np.array([row[kind][name] for row in rows]) for name in ("mean", "std"))
            sizes, best = [row["n"] for row in rows], "log" if kind == "without" else "log_self"
            axes.plot(sizes, mean, label=words, **series_style(number))
            axes.fill_between(sizes, mean - std, mean + std, color=series_color(number), alpha=0.18, lw=0)
            marked = {"color": series_color(number), "markersize": 5, "markerfacecolor": "none"}
            axes.plot([row["n"] for row in few], [row["optimised"][best] for row in few], MARKERS[0], **marked)
        axes.plot([], [], MARKERS[0], color=QUIET, markerfacecolor="none", label="points that minimize the loss")
        axes.axhline(optimum, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label="closed-form optimum")
        _logarithmic(axes, "n", "log of the mean potential", f"On the {NAMES[dim]}", y=False)
    add_legend_below(figure, panels[0], 8)
    return save(figure, image("estimators"))


def _draw_rates(records: list[Record], kind: str) -> Path:
    """A panel for each temperature, a line for each encoder over the number of negatives."""
    power, told = FALLS[kind]
    words = {"bias": "bias of InfoNCE − log M", "fluctuation": "standard deviation of a single draw"}[kind]
    temperatures = _temperatures(records)
    title = f"The {words}, over the number of negatives M"
    figure, panels = new_figure(title, (10.1, 3.9), len(temperatures))
    for axes, temperature in zip(panels, temperatures, strict=True):
        mine = [record for record in records if record["config"]["temperature"] == temperature]
        for record in mine:
            negatives, values = (
                np.array([row[name] for row in record["curve"]], float) for name in ("negatives", kind)
            )
            axes.plot(negatives, np.abs(values), label=record["config"]["encoder"], **_look(record))
        high = axes.get_ylim()[1]
        guide = np.array(negatives[[len(negatives) // 2, -1]])
        axes.plot(guide, high * 0.3 * (guide / guide[0]) ** power, color=QUIET, linestyle=(0, (4, 3)), label=told)
        _logarithmic(axes, "negatives M", words if temperature == temperatures[0] else "", f"τ = {temperature:g}")
    add_legend_below(figure, panels[-1], 8)
    return save(figure, image(f"asymptotics_{kind}"))


def _draw_terms(records: list[Record]) -> Path:
    """The two terms of the limit, with both ends: all points equal, and pairs aligned on an even sphere."""
    temperatures = _temperatures(records)
    figure, panels = new_figure(
        "The two terms of the limit; on a dashed line their sum is the same", (10.1, 3.9), len(temperatures)
    )
    for axes, temperature in zip(panels, temperatures, strict=True):
        mine = [record for record in records if record["config"]["temperature"] == temperature]
        for record in (each for each in mine if each["config"]["encoder"] != asymptotics.SPHERE):  # it is the optimum
            look = {**_look(record), "markersize": 9, "linestyle": "none"}
            axes.plot(*_place(record["terms"]), label=record["config"]["encoder"], **look)
        for (name, terms), marker in zip(mine[0]["references"].items(), "xX", strict=True):
            words = {"collapsed": "all points equal", "uniform": "the optimum"}[name]
            axes.plot(*_place(terms), marker, color=INK, markersize=9, label=words, zorder=0)
        _sums(axes, 1 / temperature)
        _titled(axes, "alignment term, −E x·y/τ", f"τ = {temperature:g}")
    panels[0].set_ylabel("uniformity term, E log E exp(x·x⁻/τ)", color=INK)
    add_legend_below(figure, panels[-1], 8)
    return save(figure, image("asymptotics_terms"))


def _sums(axes: Any, largest: float) -> None:
    """Lines on which the limit is the same, over the whole of what both terms can be."""
    room = 0.12 * largest
    ends = np.array([-largest - room, room])
    for total in np.linspace(-1, 1, 9) * largest:
        axes.plot(ends, total - ends, color=LINE, linewidth=0.8, linestyle=(0, (4, 3)), zorder=-1)
    axes.set_xlim(*ends)
    axes.set_ylim(-room, largest + room)


def _place(terms: dict[str, float]) -> tuple[list[float], list[float]]:
    return [terms["alignment"]], [terms["uniformity"]]


def _temperatures(records: list[Record]) -> list[float]:
    return sorted({record["config"]["temperature"] for record in records})


def _look(record: Record) -> dict[str, Any]:
    """Color and marker of an encoder, the same in all plots."""
    number = asymptotics.ENCODERS.index(record["config"]["encoder"])
    return {"color": series_color(number), "marker": series_marker(number), "markersize": 4, "linewidth": 1.6}


def _logarithmic(axes: Any, below: str, aside: str, title: str, y: bool = True) -> None:
    axes.set_xscale("log", base=16 if y else 4)  # where numbers have room
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if y:
        axes.set_yscale("log")
    _titled(axes, below, title)
    axes.set_ylabel(aside, color=INK)


def _titled(axes: Any, below: str, title: str) -> None:
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel(below, color=INK)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
