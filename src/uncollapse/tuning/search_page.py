"""HTML page of a search: the best trial, parameter importances, the history, and all trials."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uncollapse.report import frame
from uncollapse.report.canvas import COLORS, INK, LINE, MARKERS, QUIET, add_legend_below, legend_columns, new_figure
from uncollapse.tuning.trial_result import Better, TrialResult, best_trial, format_value

STATES = {"done": "done", "pruned": "stopped early", "failed": "failed", "open": "not done"}
SIZE = (5.6, 3.4)  # inches; narrow, so that the plots fit on a phone
ROW = 0.42  # inches per bar
LONG_LABEL = 12  # letters from which on labels below an axis are rotated
GOOD, DASHED = COLORS[0], {"color": QUIET, "linewidth": 1.0, "linestyle": (0, (4, 3))}


@dataclass(frozen=True)
class SearchReport:
    """The contents of the page of a search.

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
        "best": "Best trial",
        "importance": "Parameter importance" if importance_plot else "",
        "history": "History",
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


def draw_history(trials: Sequence[TrialResult], metric: str, better: Better) -> Any:
    """Return a plot of the metric of each trial in order, and of the best one so far."""
    figure, (axes,) = new_figure("History", SIZE)
    done = [trial for trial in trials if trial.value is not None and not trial.idle]
    axes.plot([trial.number for trial in done], [trial.value for trial in done], "o", color=GOOD, label="trial")
    bests = [best_trial(done[: count + 1], better) for count in range(len(done))]
    line = [(trial.number, top.value) for trial, top in zip(done, bests, strict=True) if top is not None]
    if line:
        axes.step(*zip(*line, strict=True), where="post", color=COLORS[1], linewidth=2, label="best so far")
    pruned = [trial for trial in trials if trial.state == "pruned" and trial.curve]
    if pruned:
        last = [list(trial.curve.values())[-1] for trial in pruned]
        label = f"stopped early, last {metric}"
        axes.plot([trial.number for trial in pruned], last, "x", color=QUIET, label=label)
    _draw_baseline(axes, trials)
    return _add_labels(figure, axes, "trial", metric)


def draw_curves(trials: Sequence[TrialResult], metric: str) -> Any | None:
    """Return a plot of the metric by step of all trials that reported it; None if none did."""
    if not any(trial.curve for trial in trials):
        return None
    figure, (axes,) = new_figure("Step by step", SIZE)
    for number, (state, label) in enumerate((("done", "completed"), ("pruned", "stopped early"))):
        reported = [trial for trial in trials if trial.curve and trial.state == state]
        look = {"color": COLORS[0] if state == "done" else QUIET, "linewidth": 1.4, "alpha": 0.8, "markersize": 3}
        for trial in reported:
            named = label if trial is reported[0] else None
            steps, values = zip(*_whole_curve(trial), strict=True)
            axes.plot(steps, values, marker=MARKERS[0], label=named, zorder=2 - number, **look)
    return _add_labels(figure, axes, "step", metric)


def draw_importances(importances: Mapping[str, float]) -> Any | None:
    """Return a bar plot of the parameter importances; None if there are none."""
    if not importances:
        return None
    figure, (axes,) = new_figure("Parameter importance", (SIZE[0], 1.4 + ROW * len(importances)))
    names = list(importances)[::-1]
    axes.barh(range(len(names)), [importances[name] for name in names], color=GOOD, height=0.6)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the variance that it explains", color=INK)
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    return figure


def draw_slices(
    trials: Sequence[TrialResult], metric: str, space: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """Yield the name of each parameter that varied, and a plot of the metric over it. space: see `space.facts`."""
    for dimension in space:
        name = dimension["name"]
        points = [(t.params[name], t.value) for t in trials if name in t.params and t.value is not None]
        if len({value for value, _ in points}) > 1:
            figure, (axes,) = new_figure(name, SIZE)
            (_draw_choices if "values" in dimension else _draw_numbers)(axes, points, dimension)
            _draw_baseline(axes, trials)
            yield name, _add_labels(figure, axes, name, metric)


def _draw_numbers(axes: Any, points: Sequence[tuple[Any, Any]], dimension: Mapping[str, Any]) -> None:
    axes.plot(*zip(*sorted(points), strict=True), MARKERS[0], color=GOOD, label="trial")
    low, high = dimension["low"], dimension["high"]
    if dimension["log"]:
        axes.set_xscale("log")
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [tick for power in powers for tick in (10.0**power, 3 * 10.0**power) if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)


def _draw_choices(axes: Any, points: Sequence[tuple[Any, Any]], dimension: Mapping[str, Any]) -> None:
    labels = [str(value) for value in dimension["values"]]
    at = [labels.index(str(value)) for value, _ in points]
    axes.plot(at, [value for _, value in points], MARKERS[0], color=GOOD, label="trial")
    rotated = {"rotation": 20, "ha": "right"} if max(map(len, labels)) > LONG_LABEL else {}
    axes.set_xticks(range(len(labels)), labels, parse_math=False, **rotated)
    axes.set_xlim(-0.5, len(labels) - 0.5)


def _whole_curve(trial: TrialResult) -> list[tuple[int, float]]:
    """Return the metric by step, including the final one."""
    last = [] if trial.value is None or trial.steps in trial.curve else [(trial.steps, trial.value)]
    return [*trial.curve.items(), *last]


def _draw_baseline(axes: Any, trials: Sequence[TrialResult]) -> None:
    if trials and trials[0].number == 0 and trials[0].value is not None:
        axes.axhline(trials[0].value, label="without a cure", **DASHED)


def _add_labels(figure: Any, axes: Any, x: str, y: str) -> Any:
    axes.set_xlabel(x, color=INK, parse_math=False)
    axes.set_ylabel(y, color=INK, parse_math=False)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    add_legend_below(figure, axes, legend_columns(SIZE[0], axes.get_legend_handles_labels()[1]))
    return figure
