"""HTML page of a search: the best trial, parameter importances, the history, and all trials."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uncollapse.report import frame
from uncollapse.report.canvas import COLOURS, INK, LINE, MARKERS, QUIET, add_legend_below, new_figure
from uncollapse.tuning.trial_result import Better, TrialResult, best_trial, format_value

STATES = {"done": "done", "pruned": "stopped early", "failed": "failed", "open": "not done"}
SIZE = (8.4, 3.6)
ROW = 0.42  # inches of a bar
GOOD, QUIETLY = COLOURS[0], {"color": QUIET, "linewidth": 1.0, "linestyle": (0, (4, 3))}
MOST = 12  # letters of a label below an axis that still lie flat


@dataclass(frozen=True)
class SearchReport:
    """What the page of a search shows.

    metric: name of the value that trials are compared by. space: see `space.facts`. importances: see
    `trial_result.parameter_importances`. line: code or command to copy. sentences: findings, shown first.
    """

    title: str
    metric: str
    better: Better
    trials: Sequence[TrialResult]
    space: Sequence[Mapping[str, Any]]
    importances: Mapping[str, float]
    line: str = ""
    sentences: Sequence[str] = field(default_factory=tuple)


def write_search_page(search: SearchReport, path: str | Path) -> Path:
    """Write the page of a search as one self-contained file."""
    return frame.write_html(render_search_page(search), path)


def render_search_page(search: SearchReport) -> str:
    """Return the page as text."""
    importance_plot = draw_importances(search.importances)
    slice_plots = dict(draw_slices(search.trials, search.metric, search.space))
    links = {
        "best": "The best",
        "importance": "What mattered" if importance_plot else "",
        "history": "How it went",
        "slices": "Parameter by parameter" if slice_plots else "",
        "trials": "All trials",
    }
    return frame.render(
        "search.html",
        scripts=("table.js",),
        title=search.title,
        subtitle=_counts(search),
        subject="results",
        links={name: heading for name, heading in links.items() if heading},
        sentences=search.sentences,
        line=search.line,
        importance_plot=importance_plot,
        history_plot=draw_history(search.trials, search.metric, search.better),
        curve_plot=draw_curves(search.trials, search.metric),
        slice_plots=slice_plots,
        metric=search.metric,
        fields=list(dict.fromkeys(name for trial in search.trials for name in trial.settings)),
        trials=search.trials,
        best=best_trial(search.trials, search.better),
        format_value=format_value,
    )


def _counts(search: SearchReport) -> str:
    states = [trial.state for trial in search.trials if not trial.idle]
    counts = [f"{states.count(state)} {words}" for state, words in STATES.items() if state in states]
    return f"{len(states)} trials: {', '.join(counts)}. Chosen by {search.metric}, {search.better} is better."


def draw_history(tried: Sequence[TrialResult], figure: str, better: Better) -> Any:
    """The figure of each trial in their order, and the best one so far."""
    picture, (axes,) = new_figure("How it went", SIZE)
    done = [each for each in tried if each.value is not None and not each.idle]
    axes.plot([each.number for each in done], [each.value for each in done], "o", color=GOOD, label="trial")
    bests = [best_trial(done[: count + 1], better) for count in range(len(done))]
    line = [(each.number, top.value) for each, top in zip(done, bests, strict=True) if top is not None]
    if line:
        axes.step(*zip(*line, strict=True), where="post", color=COLOURS[1], linewidth=2, label="best so far")
    stopped = [(each.number, list(each.curve.values())[-1]) for each in tried if each.state == "pruned" and each.curve]
    if stopped:
        axes.plot(*zip(*stopped, strict=True), "x", color=QUIET, label="stopped early, its last figure")
    _baseline(axes, tried)
    return _labelled(picture, axes, "trial", figure)


def draw_curves(tried: Sequence[TrialResult], figure: str) -> Any | None:
    """The figure by step of all trials that told it; None if none did."""
    told = [(each, _whole(each)) for each in tried if each.curve]
    if not told:
        return None
    picture, (axes,) = new_figure("Step by step", SIZE)
    for number, (state, words) in enumerate((("done", "went to the end"), ("pruned", "stopped early"))):
        for each, points in (own := [pair for pair in told if pair[0].state == state]):
            label = words if each is own[0][0] else None
            look = {"color": COLOURS[0] if state == "done" else QUIET, "linewidth": 1.4, "alpha": 0.8, "markersize": 3}
            axes.plot(*zip(*points, strict=True), marker=MARKERS[0], label=label, zorder=2 - number, **look)
    return _labelled(picture, axes, "step", figure)


def draw_importances(shares: Mapping[str, float]) -> Any | None:
    """How much each parameter explains; None if that cannot be told."""
    if not shares:
        return None
    picture, (axes,) = new_figure("What mattered", (SIZE[0], 1.4 + ROW * len(shares)))
    names = list(shares)[::-1]
    axes.barh(range(len(names)), [shares[name] for name in names], color=GOOD, height=0.6)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the differences that it explains", color=INK)
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    return picture


def draw_slices(
    tried: Sequence[TrialResult], figure: str, dimensions: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """The figure over each parameter that several trials have, with its name. dimensions: see `space.facts`."""
    for dimension in dimensions:
        name = dimension["name"]
        points = [(each.params[name], each.value) for each in tried if name in each.params and each.value is not None]
        if len({value for value, _ in points}) > 1:
            picture, (axes,) = new_figure(name, SIZE)
            (_choices if "values" in dimension else _numbers)(axes, points, dimension)
            _baseline(axes, tried)
            yield name, _labelled(picture, axes, name, figure)


def _numbers(axes: Any, points: Sequence[tuple[Any, Any]], dimension: Mapping[str, Any]) -> None:
    axes.plot(*zip(*sorted(points), strict=True), MARKERS[0], color=GOOD, label="trial")
    low, high = dimension["low"], dimension["high"]
    if dimension["log"]:
        axes.set_xscale("log")
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [tick for power in powers for tick in (10.0**power, 3 * 10.0**power) if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)


def _choices(axes: Any, points: Sequence[tuple[Any, Any]], dimension: Mapping[str, Any]) -> None:
    labels = [str(value) for value in dimension["values"]]
    at = [labels.index(str(value)) for value, _ in points]
    axes.plot(at, [value for _, value in points], MARKERS[0], color=GOOD, label="trial")
    turned = {"rotation": 20, "ha": "right"} if max(map(len, labels)) > MOST else {}
    axes.set_xticks(range(len(labels)), labels, parse_math=False, **turned)
    axes.set_xlim(-0.5, len(labels) - 0.5)


def _whole(tried: TrialResult) -> list[tuple[int, float]]:
    """The figure by step, with the one at the end."""
    last = [] if tried.value is None or tried.steps in tried.curve else [(tried.steps, tried.value)]
    return [*tried.curve.items(), *last]


def _baseline(axes: Any, tried: Sequence[TrialResult]) -> None:
    if tried and tried[0].number == 0 and tried[0].value is not None:
        axes.axhline(tried[0].value, label="without a cure", **QUIETLY)


def _labelled(picture: Any, axes: Any, x: str, y: str) -> Any:
    axes.set_xlabel(x, color=INK, parse_math=False)
    axes.set_ylabel(y, color=INK, parse_math=False)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    add_legend_below(picture, axes)
    return picture
