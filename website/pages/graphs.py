"""Tables and plots of the page of deep graph networks, from results/gcn-depth/.

`website/tables.py` puts the tables in place, and plots if `website/figures.py` has drawn them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from uncollapse.diagnosis.measures import MEASURES
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.tables.markdown import group_cells
from uncollapse.lab.tables.paper_table import PaperTable, TableCell, build_cells
from uncollapse.lab.tables.selection import Record, field_of, metric_of
from uncollapse.report.canvas import INK, LINE, add_legend_below, new_figure, series_color, series_style
from website.pages import results
from website.pages.results import IMAGES, NOT_RUN, Row
from website.plots import save, save_group

RECIPE = RECIPES["gcn-depth"]
TABLE_3 = RECIPE.tables["table3"]

BY_LAYER = ("effective_rank", "mean_cosine", "dirichlet_energy")  # what the plot of a deep network shows
DATA, DEPTH = "cora", 32  # of which network
VARIED = ("data", "layers", "norm", "scale", "identity", "self_loops", "sample", "seed")  # fields of correlated runs
DEEP, FEW = 8, 6  # layers from which on measures are compared with accuracy, and runs that this needs


records = partial(results.records, RECIPE.name)


def table(name: str) -> str:
    """A table of the recipe; words instead where nothing was run."""
    laid_out = RECIPE.tables[name]
    mine = [r for r in records() if all(field_of(r, key) == value for key, value in laid_out.where.items())]
    mine = _with_papers_data(laid_out, mine) if laid_out.published else mine
    return results.paper_table(laid_out, _run_with(name, mine) if name in ("sample", "residual") else mine)


def _with_papers_data(laid_out: PaperTable, mine: Sequence[Record]) -> list[Record]:
    """Those of the data sets that the paper has numbers for: the others are in the other tables."""
    there = {number.cell[laid_out.groups] for number in laid_out.published}
    return [r for r in mine if field_of(r, laid_out.groups) in there]


def _run_with(field: str, mine: Sequence[Record]) -> list[Record]:
    """Those of the networks that were run with this setting: the others have nothing to be compared with."""
    there = {(field_of(r, "data"), field_of(r, "layers")) for r in mine if field_of(r, field)}
    return [r for r in mine if (field_of(r, "data"), field_of(r, "layers")) in there]


def depth_plots() -> str:
    """Accuracy over depth, a plot for each data set that was run."""
    drawn = ((data, _depth_image(data)) for data in _groups_run())
    shown = [
        f"![Test accuracy over depth on {TABLE_3.name(data)}](images/{path.name})"
        for data, path in drawn
        if path.exists()
    ]
    return "\n".join(shown) or NOT_RUN


def layers_picture() -> str:
    """Measures by layer of the deep network, if that was drawn."""
    where = f"{DEPTH} layers on {TABLE_3.name(DATA)}"
    said = f"Rank, similarity and Dirichlet energy by layer for each norm, {where}, and the accuracy"
    return f"![{said}](images/{_layers_image().name})" if _layers_image().exists() else NOT_RUN


def correlations() -> tuple[Row, Sequence[Row]]:
    """Rank correlation of each measure of the last hidden layer with the test accuracy, over all deep runs."""
    runs = [r for r in _published_protocol() if field_of(r, "layers") >= DEEP]
    by_data = {data: [r for r in runs if field_of(r, "data") == data] for data in _groups_run()}
    enough = {data: group for data, group in by_data.items() if len(group) >= FEW}
    head = ("measure", "further from collapse", *(f"{data} ({len(group)} runs)" for data, group in enough.items()))
    if not enough:
        return head, []
    found = {}
    for name in MEASURES:
        values = [_correlation(name, group) for group in enough.values()]
        if not all(map(math.isnan, values)):
            found[name] = [*values, float(np.nanmean(values))]
    ranked = sorted(found, key=lambda name: -abs(found[name][-1]))
    rows = [(f"`{name}`", MEASURES[name].better or "neither", *map(_signed, found[name])) for name in ranked]
    return (*head, "mean"), rows


def _correlation(measure: str, group: Sequence[Record]) -> float:
    """Spearman's; NaN where one of both is the same in all runs."""
    pairs = [(_last_hidden(r).get(measure), metric_of(r, TABLE_3.metric)) for r in group]
    known = np.array([pair for pair in pairs if None not in pair], dtype=float).reshape(-1, 2)
    if len(known) < FEW or (known == known[:1]).all(0).any():
        return math.nan
    return float(np.corrcoef(_ranks(known[:, 0]), _ranks(known[:, 1]))[0, 1])


def _ranks(values: Any) -> Any:
    """From 1 on; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


def _last_hidden(record: Record) -> dict[str, Any]:
    """The measures of what enters the last convolution."""
    *hidden, _ = record["diagnosis"]["after"]["layers"]  # the last one has the logits
    return dict(hidden[-1]) if hidden else {}


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def _published_protocol() -> list[Record]:
    """Results that differ from the published protocol in nothing but a few fields."""
    defaults = dataclasses.asdict(RECIPE.config())
    return [r for r in records() if all(r["config"][name] == defaults[name] for name in defaults if name not in VARIED)]


def _groups_run() -> list[Any]:
    """The data sets of Table 3 that were run."""
    made = build_cells(TABLE_3, _with_papers_data(TABLE_3, records()))
    return [group for group, rows in group_cells(made).items() if any(c.run for along in rows.values() for c in along)]


def draw() -> Iterator[Path]:
    """Draw all plots that the results allow."""
    for data in _groups_run():
        yield save_group(TABLE_3, _with_papers_data(TABLE_3, records()), data, _depth_image(data))
    cells = build_cells(TABLE_3, _with_papers_data(TABLE_3, records()))
    if deep := [cell for cell in cells if cell.run and (cell.group, cell.column) == (DATA, DEPTH)]:
        yield _draw_layers(deep)


def _runs_of(cell: TableCell) -> list[Record]:
    """Return the results behind a cell of Table 3."""
    place = dict(zip(TABLE_3.axes, (cell.group, cell.row, cell.column), strict=True))
    usual = {**TABLE_3.protocol, **TABLE_3.row_protocol.get(cell.row, {})}
    asked = {**usual, **TABLE_3.where, **cell.unusual, **cell.chosen, **place}
    return [r for r in records() if all(field_of(r, name) == asked[name] for name in asked if name != "seed")]


def _name_of(cell: TableCell) -> str:
    """Return what a cell's line is called: its row, and settings that differ from the protocol."""
    return ", ".join(
        [TABLE_3.name(cell.row), *(TABLE_3.name(f"{name} {value}") for name, value in cell.unusual.items())]
    )


def _draw_layers(made: Sequence[TableCell]) -> Path:
    """A panel for each measure with a line for each norm, and one with the accuracy."""
    title = f"{TABLE_3.name(DATA)}, {DEPTH} layers: after each hidden layer, and what came of it"
    figure, (*panels, last) = new_figure(title, (10.1, 3.2), len(BY_LAYER) + 1)
    for number, cell in enumerate(made):
        runs = [r for r in _runs_of(cell) if r["seed"] in cell.figures]
        for axes, measure in zip(panels, BY_LAYER, strict=True):
            values = [[layer.get(measure) for layer in r["diagnosis"]["after"]["layers"][:-1]] for r in runs]
            line = np.array(values, dtype=float).mean(0)
            axes.plot(np.arange(1, len(line) + 1), line, label=_name_of(cell), **series_style(number))
        figures = list(cell.figures.values())
        last.barh([number], [cell.mean or 0.0], color=series_color(number), height=0.6)
        last.plot(figures, [number] * len(figures), "o", color=INK, markersize=4)
    for axes, measure in zip(panels, BY_LAYER, strict=True):
        axes.set_title(MEASURES[measure].title, fontsize=10, color=INK)
        axes.set_xlabel("layer", color=INK)
        axes.grid(axis="y", color=LINE, linewidth=0.8)
    add_legend_below(figure, panels[0])
    last.set_yticks(range(len(made)), [_name_of(cell) for cell in made])
    last.invert_yaxis()
    last.set_title("Test accuracy, %", fontsize=10, color=INK)
    return save(figure, _layers_image())


def _depth_image(data: Any) -> Path:
    return IMAGES / f"graphs_depth_{data}.svg"


def _layers_image() -> Path:
    return IMAGES / "graphs_layers.svg"


def arxiv(name: str) -> str:
    """A table of the recipe `arxiv`."""
    return results.paper_table(RECIPES["arxiv"].tables[name], results.records("arxiv"))


TEXTS: dict[str, Callable[[], str]] = {
    **{f"graphs_{name}": partial(table, name) for name in RECIPE.tables},
    "graphs_arxiv": partial(arxiv, "accuracy"),
    "graphs_arxiv_temperature": partial(arxiv, "temperature"),
    "graphs_arxiv_teacher": partial(arxiv, "teacher"),
    "graphs_depth": depth_plots,
    "graphs_layers": layers_picture,
}
PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "graphs_correlations": correlations,
    "graphs_grids": partial(results.grids, RECIPE.name),
}
