"""Figures and tables of the page on concepts, from results/concepts.json and results/propositions.json.

They are written by `python -m experiments.concepts` and `python -m experiments.propositions`.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from uncollapse.report.canvas import INK, LINE, QUIET, add_legend_below, new_figure, series_color, series_style
from website.pages.results import IMAGES, RESULTS, Row
from website.plots import save

RESULT, PROPOSITIONS = RESULTS / "concepts.json", RESULTS / "propositions.json"
LAYERS = {"mean_cosine": "a. Mean cosine of two tokens", "effective_rank": "b. Effective rank of the tokens"}
RING = np.linspace(0, 2 * math.pi, 181)
EQUATORS = (np.array([[1, 0, 0], [0, 0, 1]]), np.array([[1, 0, 0], [0, 1, 0]]))  # great circles, to see the ball
VIEW = 0.35  # how far the sphere is tilted towards the eye, in radians


@cache
def found() -> dict[str, Any]:
    """What was measured."""
    result: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return result


@cache
def propositions() -> dict[str, Any]:
    """What random matrices say of the two propositions."""
    result: dict[str, Any] = json.loads(PROPOSITIONS.read_text(encoding="utf-8"))
    return result


def states() -> tuple[Row, Sequence[Row]]:
    """What is measured of the tokens in each state."""
    rows = [
        (
            name,
            _number(one["figures"]["mean_cosine"]),
            _number(one["figures"]["effective_rank"]),
            _number(one["figures"]["uniformity"]),
        )
        for name, one in found()["spheres"].items()
    ]
    optimum = _number(found()["spheres"]["healthy"]["figures"]["optimum"])
    return ("", "mean cosine", "effective rank, of 3", f"uniformity; {optimum} if spread evenly"), rows


def depths() -> tuple[Row, Sequence[Row]]:
    """Where the random Transformers begin and end."""
    rows = [
        (
            name,
            f"{_number(one['mean_cosine'][0])} → {_number(one['mean_cosine'][-1])}",
            f"{one['effective_rank'][0]:.1f} → {one['effective_rank'][-1]:.1f}",
            one["verdict"] + (f", from {one['onset']} on" if one["onset"] else ""),
        )
        for name, one in found()["depth"].items()
    ]
    return ("random weights", "mean cosine, first → last", "effective rank, first → last", "verdict"), rows


def counts() -> tuple[Row, Sequence[Row]]:
    """How often each statement held."""
    first, second = propositions()["variance"], propositions()["rank"]
    rows = [("Proposition 1", "any scale ≥ 0", f"{first['draws']:,}", f"{first['violated']:,}")]
    for name, words in (("paper", "as stated: 1 + (1 − σ²_max)s > 0"), ("monotone", "1 + (1 − 3σ²_max)s ≥ 0")):
        of = second[name]
        rows.append(("Proposition 2", words, f"{of['cases']:,}", f"{of['violated']:,}"))
    return ("", "condition", "random cases that meet it", "of these violated"), rows


def draw() -> Iterator[Path]:
    """Draw all plots of the page."""
    yield _draw_spheres()
    yield _draw_pairs()
    yield _draw_step()
    yield _draw_depth()
    yield _draw_propositions()


def _draw_spheres() -> Path:
    """Tokens on the sphere above, their singular values below."""
    figure, _ = new_figure("", (7.9, 4.6))
    figure.clear()
    above, below = figure.subplots(2, 3, height_ratios=[3, 1.3])
    for number, (name, one) in enumerate(found()["spheres"].items()):
        _sphere(above[number], np.array(one["points"]), number)
        above[number].set_title(name, fontsize=12, color=INK)
        below[number].bar(range(1, 4), one["spectrum"], width=0.5, color=series_color(number))
        below[number].set(ylim=(0, 1), xticks=range(1, 4), yticks=[0, 0.5, 1])
        below[number].spines[["top", "right"]].set_visible(False)
        below[number].spines[["left", "bottom"]].set_color(QUIET)
        below[number].tick_params(colors=QUIET, labelcolor=INK, labelsize=9)
        below[number].set_xlabel("singular value", color=INK)
    below[0].set_ylabel("share of the sum", color=INK)
    return save(figure, IMAGES / "concepts_spheres.svg")


def _sphere(axes: Any, points: Any, number: int) -> None:
    """The points as seen from far away, those behind the sphere pale."""
    for plane in EQUATORS:
        x, y, depth = _seen(np.stack([np.cos(RING), np.sin(RING)], 1) @ plane)
        for there, dashes in ((depth <= 0, "-"), (depth > 0, (0, (2, 3)))):
            axes.plot(np.where(there, x, np.nan), np.where(there, y, np.nan), color=LINE, lw=1.2, linestyle=dashes)
    axes.plot(np.cos(RING), np.sin(RING), color=QUIET, linewidth=1.0)
    x, y, depth = _seen(points)
    for there, alpha in ((depth > 0, 0.3), (depth <= 0, 0.95)):
        look = {"color": series_color(number), "markersize": 5, "alpha": alpha, "markeredgewidth": 0}
        axes.plot(x[there], y[there], "o", **look)
    _bare(axes, 1.08)


def _seen(points: Any) -> tuple[Any, Any, Any]:
    """Where points of the space are in the plot, and how far behind it."""
    x, y, z = points.T
    return x, math.sin(VIEW) * y + math.cos(VIEW) * z, math.cos(VIEW) * y - math.sin(VIEW) * z


def _draw_pairs() -> Path:
    """Pairs of views on the circle, each pair joined by a line, in four states."""
    figure, panels = new_figure("", (7.6, 3.1), 4)
    for number, (axes, (name, one)) in enumerate(zip(panels, found()["pairs"].items(), strict=True)):
        x, y = np.array(one["x"]), np.array(one["y"])
        axes.plot(np.cos(RING), np.sin(RING), color=LINE, linewidth=1.2)
        axes.plot(*np.stack([x, y]).transpose(2, 0, 1), color=series_color(number), linewidth=1.2, alpha=0.6)
        axes.plot(*x.T, "o", color=series_color(number), markersize=7, markeredgewidth=0)
        axes.plot(*y.T, "o", color=series_color(number), markersize=6, markerfacecolor="none", markeredgewidth=1.4)
        alignment, uniformity = _number(one["figures"]["alignment"]), _number(one["figures"]["uniformity"])
        lines = (*name.split(", "), f"alignment {alignment}", f"uniformity {uniformity}")
        axes.set_title("\n".join(lines), fontsize=10, color=INK)
        _bare(axes, 1.15)
    return save(figure, IMAGES / "concepts_pairs.svg")


def _draw_step() -> Path:
    """Where one step of ContraNorm takes points, and where they are on the circle then."""
    figure, panels = new_figure("", (7.9, 3.6), 3)
    one = found()["step"]
    before, moved, after = (np.array(rows) for rows in (one["before"]["points"], one["moved"], one["after"]["points"]))
    titles = ("before", "one step: x − s·m", "after, on the circle again")
    for axes, title, of in zip(panels, titles, ("before", "", "after"), strict=True):
        axes.plot(np.cos(RING), np.sin(RING), color=LINE, linewidth=1.2)
        told = f"\nuniformity {_number(one[of]['figures']['uniformity'])}" if of else "\n"
        axes.set_title(title + told, fontsize=10, color=INK)
        _bare(axes, 1.15)
    look = {"markersize": 6, "markeredgewidth": 0}
    panels[0].plot(*before.T, "o", color=series_color(0), **look)
    panels[1].plot(*before.T, "o", color=series_color(0), alpha=0.35, **look)
    for start, end in zip(before, moved, strict=True):
        panels[1].annotate("", end, start, arrowprops={"arrowstyle": "->", "color": series_color(1), "linewidth": 1.2})
    panels[2].plot(*after.T, "o", color=series_color(2), **look)
    return save(figure, IMAGES / "concepts_step.svg")


def _draw_depth() -> Path:
    """Cosine and rank from layer to layer."""
    figure, panels = new_figure("", (7.9, 3.3), len(LAYERS))
    for axes, (measure, title) in zip(panels, LAYERS.items(), strict=True):
        for number, (name, one) in enumerate(found()["depth"].items()):
            axes.plot(one[measure], label=name, **series_style(number))
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set_xlabel("block", color=INK)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=LINE, linewidth=0.8)
    add_legend_below(figure, panels[0], 2)
    return save(figure, IMAGES / "concepts_depth.svg")


def _draw_propositions() -> Path:
    """The variance next to its bound, the rank next to both conditions, and the map that the counterexample meets."""
    figure, (variance, rank, spectrum) = new_figure("", (12.5, 4.0), 3)
    scale, bound, ratio = np.array(propositions()["variance"]["points"]).T
    variance.plot(scale, ratio, "o", color=series_color(0), markersize=3, alpha=0.5, label="random tokens")
    variance.plot(scale, bound, ".", color=QUIET, markersize=2, label="its bound, near 1 in all cases")
    _label(variance, "a. Proposition 1: variance after over before", "scale s")
    q, change = np.array(propositions()["rank"]["points"]).T
    rank.plot(q, change, "o", color=series_color(0), markersize=3, alpha=0.5)
    one = propositions()["counterexample"]
    fall = one["rank"]["after"] - one["rank"]["before"]
    rank.plot([one["q"]], [fall], "D", color=series_color(1), markersize=7, label="counterexample")
    rank.axhline(0, color=INK, linewidth=0.8)
    rank.set_ylim(top=rank.get_ylim()[1] + 0.4)  # room for words
    for limit, words in ((1 / 3, "monotone"), (1.0, "as stated")):
        rank.axvline(limit, color=QUIET, linestyle=(0, (4, 3)), linewidth=1.2)
        look = {"ha": "right", "va": "top", "fontsize": 9, "color": INK}
        rank.text(limit, 1.0, f"{words} ", transform=rank.get_xaxis_transform(), **look)
    _label(rank, "b. Proposition 2: change of the effective rank", "q = sσ²_max / (1 + s)")
    _draw_map(spectrum, one)
    for axes in (variance, rank, spectrum):
        _legend_beneath(axes)
    return save(figure, IMAGES / "concepts_propositions.svg")


def _draw_map(axes: Any, one: dict[str, Any]) -> None:
    """What the step makes of a singular value, at the scale of the counterexample."""
    s, values = one["scale"], np.linspace(0, 1.5, 200)
    axes.plot(values, (1 + s) * values - s * values**3, color=series_color(0), linewidth=2, label="(1 + s)σ − sσ³")
    axes.plot(one["values"], one["mapped"], "D", color=series_color(1), markersize=7, label="counterexample")
    top = ((1 + s) / (3 * s)) ** 0.5
    axes.axvline(top, color=QUIET, linestyle=(0, (4, 3)), linewidth=1.2, label="monotone up to here")
    for before, after in zip(one["values"], one["mapped"], strict=True):
        axes.annotate(f"{before:g} → {after:.3g}", (before, after), (6, 4), textcoords="offset points", color=INK)
    axes.set_xlim(0, 1.75)
    _label(axes, f"c. What the step makes of a singular value, s = {s:g}", "σ")


def _label(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(below, color=INK)
    axes.grid(axis="y", color=LINE, linewidth=0.8)


def _legend_beneath(axes: Any) -> None:
    place = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.18), "ncols": 2}
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, **place)


def _bare(axes: Any, reach: float) -> None:
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach))
    axes.set_aspect("equal")
    axes.set_axis_off()


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "concept_states": states,
    "concept_depths": depths,
    "concept_propositions": counts,
}
