"""A search as one HTML page that needs nothing else: the best, what mattered, how it went, all trials."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uncollapse import __version__
from uncollapse.io import files
from uncollapse.report.canvas import COLOURS, INK, LINE, MARKERS, QUIET, add_legend_below, inline_svg, new_figure
from uncollapse.report.library import asset
from uncollapse.report.markup import Child, Markup, element
from uncollapse.report.page import document, top
from uncollapse.report.sections import scroller
from uncollapse.tuning.trial_result import Better, TrialResult, best_trial, format_value

SCRIPT = "table.js"
MATTERED = (
    "fANOVA: trees are fitted to the trials that are done, and asked how much of the differences each parameter "
    "explains by itself; together that is all that single parameters explain. With few trials this is a hint, no more."
)
SLICES = "Each point is a trial that was done. Points of a slice differ in the other parameters too."


@dataclass(frozen=True)
class SearchReport:
    """What a page is made of.

    figure: what was chosen by. space: see `space.facts`. shares: see `importance`. line: what to copy. sentences: what
    is to be said of it at the top.
    """

    title: str
    figure: str
    better: Better
    tried: Sequence[TrialResult]
    space: Sequence[Mapping[str, Any]]
    shares: Mapping[str, float]
    line: str = ""
    sentences: Sequence[str] = field(default_factory=tuple)


def write_search_page(search: SearchReport, path: str | Path) -> Path:
    """Write the page; the file is there as a whole or not at all."""
    return files.write(Path(path), render_search_page(search).encode("utf-8", errors="replace"))


def render_search_page(search: SearchReport) -> str:
    """The page as text."""
    parts = list(_parts(search))
    links = [element("a", heading, href=f"#{name}") for name, heading, _ in parts]
    script = asset(SCRIPT)
    body: list[Child] = [
        *top("results", links, "Parts of the page"),
        element(
            "main",
            element("div", element("h1", search.title), element("p", _counts(search), class_="meta"), class_="title"),
            [element("section", element("h2", heading), content, id=name) for name, heading, content in parts],
            id="main",
        ),
        element("footer", element("p", f"Written by uncollapse {__version__}. This page sends and loads nothing.")),
        element("script", Markup(script)),
    ]
    return document(search.title, [script], body)


def _parts(search: SearchReport) -> Iterator[tuple[str, str, Child]]:
    """The name, the heading and the content of each part that has something to show."""
    said_first: list[Child] = [element("p", sentence, class_="sentence") for sentence in search.sentences]
    if search.line:
        wraps = "white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 0.6rem"
        said_first.append(element("pre", element("code", search.line), style=wraps))
    yield "best", "The best", element("div", said_first, class_="card")
    if (bars := draw_importances(search.shares)) is not None:
        yield "mattered", "What mattered", [_lead(MATTERED), _card(bars, "Shares of the differences by parameter.")]
    went = _card(draw_history(search.tried, search.figure, search.better), "The figure of each trial.")
    steps = draw_curves(search.tried, search.figure)
    yield "history", "How it went", [went, None if steps is None else _card(steps, "The figure of each trial by step.")]
    cut = list(draw_slices(search.tried, search.figure, search.space))
    if cut:
        cards = [_card(picture, f"The figure of each trial over {name}.") for name, picture in cut]
        yield "slices", "Parameter by parameter", [_lead(SLICES), *cards]
    yield "trials", "All trials", _table(search)


def _counts(search: SearchReport) -> str:
    states = [each.state for each in search.tried if not each.idle]
    words = {"done": "done", "pruned": "stopped early", "failed": "failed", "open": "not done"}
    counted = [f"{states.count(state)} {said_so}" for state, said_so in words.items() if state in states]
    return f"{len(states)} trials: {', '.join(counted)}. Chosen by {search.figure}, {search.better} is better."


def _lead(text: str) -> Markup:
    return element("p", text, class_="lead")


def _card(figure: Any, words: str) -> Markup:
    drawn = element(
        "div", Markup(inline_svg(figure)), role="img", aria_label=words, style="min-width: 32rem; max-width: 58rem"
    )
    return element("div", drawn, class_="card", style="margin-top: 1rem; overflow-x: auto")


def _table(search: SearchReport) -> list[Child]:
    """Every trial; the headings are buttons that sort."""
    fields = list(dict.fromkeys(name for each in search.tried for name in each.settings))
    heads = ["Trial", search.figure, "State", "Steps", "Seconds", *fields]
    winner = best_trial(search.tried, search.better)
    table = element(
        "table",
        element("caption", "All trials", class_="hidden"),
        element("thead", element("tr", [_head(head, number) for number, head in enumerate(heads)])),
        element("tbody", [_row(each, fields, each is winner) for each in search.tried]),
        id="numbers-table",
    )
    csv = element("button", "Download as CSV", type="button", id="csv", class_="action", hidden=True)
    return [element("div", csv, class_="tools"), scroller(table, "All trials")]


def _head(head: str, column: int) -> Markup:
    button = element("button", head, element("span", class_="arrow", aria_hidden="true"), type="button")
    return element("th", button, scope="col", aria_sort="none" if column else "ascending")


def _row(tried: TrialResult, fields: Sequence[str], is_best: bool) -> Markup:
    value = "nan" if tried.value is None else repr(tried.value)
    shown = "–" if tried.value is None else f"{tried.value:.4g}"
    state = "known already" if tried.idle else tried.state
    tag = element("span", "best", class_="tag") if is_best else None
    return element(
        "tr",
        element("th", str(tried.number), " ", tried.role or None, tag, scope="row", data_v=str(tried.number)),
        element("td", shown, data_v=value, class_="number"),
        element("td", state, title=tried.why or None),
        element("td", str(tried.steps), class_="number"),
        element("td", f"{tried.seconds:.1f}", data_v=repr(tried.seconds), class_="number"),
        [element("td", format_value(tried.settings[name]) if name in tried.settings else "–") for name in fields],
        class_="onset" if is_best else None,
    )


SIZE = (8.4, 3.6)
ROW = 0.42  # inches of a bar
GOOD, QUIETLY = COLOURS[0], {"color": QUIET, "linewidth": 1.0, "linestyle": (0, (4, 3))}
MOST = 12  # letters of a label below an axis that still lie flat


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
