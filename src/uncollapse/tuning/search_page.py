"""A search as one HTML page that needs nothing else: the best, what mattered, how it went, all trials."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uncollapse import __version__
from uncollapse.io import files
from uncollapse.report.inline import svg
from uncollapse.report.library import asset
from uncollapse.report.markup import Child, Markup, element
from uncollapse.report.page import document, top
from uncollapse.report.sections import scroller
from uncollapse.tuning import search_plots
from uncollapse.tuning.trial_result import Better, Tried, best, said

SCRIPT = "table.js"
MATTERED = (
    "fANOVA: trees are fitted to the trials that are done, and asked how much of the differences each parameter "
    "explains by itself; together that is all that single parameters explain. With few trials this is a hint, no more."
)
SLICES = "Each point is a trial that was done. Points of a slice differ in the other parameters too."


@dataclass(frozen=True)
class Search:
    """What a page is made of.

    figure: what was chosen by. space: see `space.facts`. shares: see `importance`. line: what to copy. sentences: what
    is to be said of it at the top.
    """

    title: str
    figure: str
    better: Better
    tried: Sequence[Tried]
    space: Sequence[Mapping[str, Any]]
    shares: Mapping[str, float]
    line: str = ""
    sentences: Sequence[str] = field(default_factory=tuple)


def write(search: Search, path: str | Path) -> Path:
    """Write the page; the file is there as a whole or not at all."""
    return files.write(Path(path), page(search).encode("utf-8", errors="replace"))


def page(search: Search) -> str:
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


def _parts(search: Search) -> Iterator[tuple[str, str, Child]]:
    """The name, the heading and the content of each part that has something to show."""
    said_first: list[Child] = [element("p", sentence, class_="sentence") for sentence in search.sentences]
    if search.line:
        wraps = "white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 0.6rem"
        said_first.append(element("pre", element("code", search.line), style=wraps))
    yield "best", "The best", element("div", said_first, class_="card")
    if (bars := search_plots.mattered(search.shares)) is not None:
        yield "mattered", "What mattered", [_lead(MATTERED), _card(bars, "Shares of the differences by parameter.")]
    went = _card(search_plots.history(search.tried, search.figure, search.better), "The figure of each trial.")
    steps = search_plots.curves(search.tried, search.figure)
    yield "history", "How it went", [went, None if steps is None else _card(steps, "The figure of each trial by step.")]
    cut = list(search_plots.slices(search.tried, search.figure, search.space))
    if cut:
        cards = [_card(picture, f"The figure of each trial over {name}.") for name, picture in cut]
        yield "slices", "Parameter by parameter", [_lead(SLICES), *cards]
    yield "trials", "All trials", _table(search)


def _counts(search: Search) -> str:
    states = [each.state for each in search.tried if not each.idle]
    words = {"done": "done", "pruned": "stopped early", "failed": "failed", "open": "not done"}
    counted = [f"{states.count(state)} {said_so}" for state, said_so in words.items() if state in states]
    return f"{len(states)} trials: {', '.join(counted)}. Chosen by {search.figure}, {search.better} is better."


def _lead(text: str) -> Markup:
    return element("p", text, class_="lead")


def _card(figure: Any, words: str) -> Markup:
    drawn = element(
        "div", Markup(svg(figure)), role="img", aria_label=words, style="min-width: 32rem; max-width: 58rem"
    )
    return element("div", drawn, class_="card", style="margin-top: 1rem; overflow-x: auto")


def _table(search: Search) -> list[Child]:
    """Every trial; the headings are buttons that sort."""
    fields = list(dict.fromkeys(name for each in search.tried for name in each.settings))
    heads = ["Trial", search.figure, "State", "Steps", "Seconds", *fields]
    winner = best(search.tried, search.better)
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


def _row(tried: Tried, fields: Sequence[str], is_best: bool) -> Markup:
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
        [element("td", said(tried.settings[name]) if name in tried.settings else "–") for name in fields],
        class_="onset" if is_best else None,
    )
