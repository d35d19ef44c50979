"""Tables and plots of the page of the hypersphere, from results/.

`website/tables.py` puts the tables in place, and plots if `website/figures.py` has drawn them.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from uncollapse.lab.experiments.contrastive.circle import LEARNED
from uncollapse.lab.experiments.contrastive.encoder_plots import circle_figure, objective_kind, scatter_figure
from uncollapse.lab.experiments.contrastive.objectives import formula
from uncollapse.lab.experiments.contrastive.predictors import (
    comparable_groups,
    correlate_with_accuracy,
    partial_correlations,
)
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.tables.selection import Record
from uncollapse.report.canvas import INK, LINE, add_legend_below, new_figure, series_style
from website.pages import hypersphere_limits, results
from website.pages.results import IMAGES, NOT_RUN, TOGETHER, Row
from website.plots import save

CONTRAST, CIRCLE = RECIPES["contrast"], RECIPES["circle"]
PROBES = {table.metric: table.title.removeprefix("Test accuracy, ") for table in CONTRAST.tables.values()}
LAYERS = ("mean_cosine", "effective_rank")  # measures that show a collapse from layer to layer
NAMES = {"mean_cosine": "a. Mean cosine of two images", "effective_rank": "b. Effective rank of the images"}


def encoders() -> list[Record]:
    """The encoders of the scatter: those of the named grids that have been run."""
    groups = comparable_groups(results.records("contrast"))
    fixed = asdict(CONTRAST.config(**CONTRAST.presets["small"], data="cifar10"))
    return next((group for group in groups if all(group[0]["config"][n] == fixed[n] for n in ("data", "epochs"))), [])


def on_circle() -> dict[str, Record]:
    """The encoders with two outputs, by what they learned from."""
    trials = _trials(CIRCLE, CIRCLE.grids["cifar10"])
    found = {r["config"]["learned"]: r for r in results.records("circle") if r["config"] in trials}
    return {name: found[name] for name in LEARNED if name in found}


def _trials(recipe: Any, grids: Iterable[Grid]) -> list[dict[str, Any]]:
    """The settings of some grids, as results have them."""
    trials = (trial for grid in grids for cell in grid.cells(recipe.config) for trial in cell.trials)
    return [json.loads(json.dumps(asdict(trial))) for trial in trials]


def circle_table() -> tuple[Row, Sequence[Row]]:
    """Linear accuracies of two features, and the two measures."""
    found = on_circle()
    rows: list[Row] = []
    published = {number.cell["learned"]: number.mean for number in CIRCLE.tables["accuracy"].published}
    for name in LEARNED:
        paper = f"{published[name]:.2f}"
        if name not in found:
            rows.append((name, NOT_RUN, "", paper, "", ""))
            continue
        f = found[name]["figures"]
        shares = (f"{100 * f[part]:.2f}" for part in ("validation", "test"))
        rows.append((name, *shares, paper, f"{f['alignment']:.3f}", f"{f['uniformity']:.3f}"))
    head = ("encoder", "linear accuracy, %: validation", "test", "paper", "alignment", "uniformity (optimum −1.575)")
    return head, rows


def limits() -> tuple[Row, Sequence[Row]]:
    """Both slopes, what M · bias tends to, and the terms of the limit, for each encoder and temperature."""
    rows = []
    for r in sorted(
        results.records("asymptotics"), key=lambda r: (-r["config"]["temperature"], r["config"]["encoder"])
    ):
        f, slopes = r["figures"], (r["slopes"][name] for name in ("bias", "fluctuation"))
        told = (f"{s['value']:.3f} ({s['low']:.3f} … {s['high']:.3f})" if s else "none" for s in slopes)
        terms = (f"{f[name]:.3f}" for name in ("alignment_term", "uniformity_term", "limit"))
        constant = (f"{f['bias_times_negatives']:,.4g}", f"{f['bias_constant']:,.4g}")
        rows.append((f"{r['config']['temperature']:g}", r["config"]["encoder"], *told, *constant, *terms))
    head = ("τ", "encoder", "slope of the bias", "slope of the fluctuation", "M · bias, largest M", "limit for large M")
    return (*head, "alignment term", "uniformity term", "limit"), rows


def explained_table(only: str = "") -> tuple[Row, Sequence[Row]]:
    """How well each reading goes along with each judge of the features. only: the encoders of one kind."""
    mine = [record for record in encoders() if not only or objective_kind(record["config"]) == only]
    if len(mine) < 3:
        return ("",), [(NOT_RUN,)]
    judges = {words: metric.replace("test", "validation") for metric, words in PROBES.items()}
    columns = {words: correlate_with_accuracy(mine, figure) for words, figure in judges.items()}
    rows = [
        (one.name, *(f"{columns[words][at].spearman:.2f} (R² {columns[words][at].r_squared:.2f})" for words in judges))
        for at, one in enumerate(next(iter(columns.values())))
    ]
    return (f"{len(mine)} encoders{only and f': {only}'}", *judges), rows


def partial_table() -> tuple[Row, Sequence[Row]]:
    """Rank correlations of each measure with accuracy while the other is held fixed, with 95 % intervals."""
    judges = {words: metric.replace("test", "validation") for metric, words in PROBES.items()}
    columns = [partial_correlations(encoders(), figure) for figure in judges.values()]
    if not all(columns):
        return ("",), [(NOT_RUN,)]
    rows = [
        (cells[0].name, *(f"{one.value:.2f} ({one.low:.2f} … {one.high:.2f})" for one in cells))
        for cells in zip(*columns, strict=True)
    ]
    return (f"{len(encoders())} encoders", *judges), rows


def encoder_table() -> tuple[Row, Sequence[Row]]:
    """All encoders of the scatter, the best on validation first; seeds of the same settings are joined."""
    groups: dict[str, list[Record]] = {}
    for record in encoders():
        same = {name: value for name, value in record["config"].items() if name != "seed"}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    chosen = "validation_output_linear"
    ordered = sorted(groups.values(), key=lambda of: -statistics.fmean(r["figures"][chosen] for r in of))
    figures = {"alignment": 1, "uniformity": 1, "information": 1, chosen: 100, **dict.fromkeys(PROBES, 100)}
    rows = []
    for of in ordered:
        config = of[0]["config"]
        numbers = (_number([unit * r["figures"][name] for r in of], unit) for name, unit in figures.items())
        rows.append((formula(config), str(config["batch"]), str(config["dim"]), str(len(of)), *numbers))
    head = ("objective", "batch", "dim", "seeds", "align", "uniform", "InfoMax", "validation: output", "test: output")
    return (*head, "output, 5-NN", "fc7", "fc7, 5-NN"), rows


def seeds_table() -> tuple[Row, Sequence[Row]]:
    """The best of each of the two ways, chosen on validation, with three seeds: test accuracies."""
    rows: list[Row] = []
    for words, of in _best_of_ways().items():
        if not of:
            rows.append((words, NOT_RUN, "", *[""] * len(PROBES)))
            continue
        numbers = (_number([100 * r["figures"][figure] for r in of], 100) for figure in PROBES)
        rows.append((words, formula(of[0]["config"]), str(len(of)), *numbers))
    return ("", "selected on validation", "seeds", *(f"test, {words}" for words in PROBES.values())), rows


def differences_table() -> tuple[Row, Sequence[Row]]:
    """The two best by seed: differences of test accuracies in points."""
    infonce, both = _best_of_ways().values()
    by_seed = {
        figure: [{r["seed"]: 100 * r["figures"][figure] for r in of} for of in (both, infonce)] for figure in PROBES
    }
    comparison = "alignment and uniformity − InfoNCE alone"
    pairs = {(words, comparison): (by_seed[figure][0], by_seed[figure][1]) for figure, words in PROBES.items()}
    return results.differences(pairs, "test", digits=2)


def _best_of_ways() -> dict[str, list[Record]]:
    """Return the runs of the best objective of each way; none if not all of its trials were run."""
    ways = ("InfoNCE alone", "alignment and uniformity")
    known = {json.dumps(r["config"], sort_keys=True): r for r in results.records("contrast")}
    found: dict[str, list[Record]] = {}
    for words, grid in zip(ways, CONTRAST.grids["cifar10-seeds"], strict=True):
        (cell,) = grid.cells(CONTRAST.config)
        keys = [json.dumps(json.loads(json.dumps(asdict(trial))), sort_keys=True) for trial in cell.trials]
        trials = [known[key] for key in keys if key in known]
        found[words] = []
        if len(trials) == len(keys):
            best = json.loads(json.dumps(asdict(cell.followers(trials)[0])))
            same = {name: value for name, value in best.items() if name != "seed"}
            found[words] = [r for r in known.values() if same.items() <= r["config"].items()]
    return found


def _number(values: Sequence[float], unit: float) -> str:
    digits = 2 if unit == 100 else 3
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return TOGETHER.sub("\u00a0", f"{statistics.fmean(values):.{digits}f}{spread}")


def collapses() -> dict[str, Record]:
    """Alignment alone, uniformity alone, and both: by name."""
    wanted = {"alignment alone": (1.0, 0.0), "uniformity alone": (0.0, 1.0), "both": (1.0, 1.0)}
    found = {}
    for name, weights in wanted.items():
        for r in encoders():
            c = r["config"]
            usual = (c["contrast"], c["batch"], c["dim"], c["seed"]) == (0, 256, 128, 0)
            if usual and (c["align"], c["uniform"]) == weights and c["t"] == c["alpha"] == 2:
                found[name] = r
    untrained = asdict(CONTRAST.config(**{**CONTRAST.presets["small"], "data": "cifar10", "epochs": 0}))
    drawn = [r for r in results.records("contrast") if r["config"] == json.loads(json.dumps(untrained))]
    return found | ({"untrained": drawn[0]} if drawn else {})


def collapse_table() -> tuple[Row, Sequence[Row]]:
    """What each of the three encoders is like at its end, and what the diagnosis says."""
    rows = []
    for name, r in collapses().items():
        f, last = r["figures"], r["diagnosis"]["after"]["layers"][-1]
        verdict = r["diagnosis"]["after"]["verdict"]
        measured = (f"{f['alignment']:.3f}", f"{f['uniformity']:.3f}", f"{last['mean_cosine']:.3f}")
        rank = f"{last['effective_rank']:.1f} of {r['config']['dim']}"
        accuracies = (f"{100 * f[figure]:.2f}" for figure in ("test_output_linear", "test_fc7_linear"))
        rows.append((name, *measured, rank, verdict, *accuracies))
    head = ("objective", "alignment", "uniformity", "mean cosine of the output", "effective rank", "verdict")
    return (*head, "test accuracy, %: output", "fc7"), rows or [(NOT_RUN, *[""] * 7)]


def sentence_table() -> str:
    """Sentence encoders beside the paper's."""
    recipe = RECIPES["sentences"]
    return results.paper_table(next(iter(recipe.tables.values())), results.records("sentences"))


def moco_table() -> tuple[Row, Sequence[Row]]:
    """What came of the small runs of MoCo."""
    found = [
        r for r in results.records("moco") if r["config"] in _trials(RECIPES["moco"], RECIPES["moco"].grids["small"])
    ]
    names = ("alignment", "uniformity", "test", "test_top5")
    rows = [
        (formula(r["config"]), str(r["data"]["train"]), *(f"{r['figures'][name]:.3f}" for name in names)) for r in found
    ]
    head = ("objective", "training images", "alignment", "uniformity", "top-1, linear, of 20 classes", "top-5")
    return head, rows or [(NOT_RUN, *[""] * 5)]


def leak_table() -> tuple[Row, Sequence[Row]]:
    """How well batch norm statistics mark the partner of a view, by the number of groups of a batch."""
    trials = _trials(RECIPES["moco"], RECIPES["moco"].grids["leak"])
    found = sorted((r for r in results.records("moco") if r["config"] in trials), key=lambda r: r["config"]["groups"])
    rows = [
        (str(r["config"]["groups"]), f"{r['figures']['leak']:.3f}", f"{r['epochs'][-1]['loss']:.3f}") for r in found
    ]
    return ("groups of a batch", "leak (0.5: none, 1: all)", "training loss, last epoch"), rows or [(NOT_RUN, "", "")]


def depth_table() -> tuple[Row, Sequence[Row]]:
    """Errors of depth on rendered scenes, layer by layer."""
    recipe = RECIPES["depth-probe"]
    found = [r for r in results.records("depth-probe") if r["config"] in _trials(recipe, recipe.grids["rendered"])]
    names = ("mse", "mean_map_mse", "mse_metres")
    rows = [
        (r["config"]["start"], r["config"]["layer"], *(f"{r['figures'][name]:.3f}" for name in names)) for r in found
    ]
    head = ("encoder", "layer", "MSE, normalized depths", "of the mean depth map", "MSE, m²")
    return head, rows or [(NOT_RUN, *[""] * 4)]


def draw() -> list[Path]:
    """Draw all plots that the results allow."""
    drawn = hypersphere_limits.draw()
    if len(encoders()) >= 3:
        drawn.append(save(scatter_figure(encoders()), image("scatter")))
    if found := on_circle():
        drawn.append(save(circle_figure(found), image("circle")))
    if found := collapses():
        drawn.append(_draw_collapse(found))
    return drawn


def _draw_collapse(found: dict[str, Record]) -> Path:
    """How alike the images are, and in how many dimensions they differ, from layer to layer."""
    figure, panels = new_figure("From layer to layer, trained for one thing and for both", (8.6, 3.4), len(LAYERS))
    for axes, measure in zip(panels, LAYERS, strict=True):
        for number, (name, record) in enumerate(found.items()):
            layers = record["diagnosis"]["after"]["layers"]
            values = [layer[measure] for layer in layers]
            axes.plot(values, marker="o", markersize=4, label=name, **series_style(number))
        axes.set_xticks(range(len(layers)), [layer["name"] for layer in layers])
        axes.set_title(NAMES[measure], fontsize=10, color=INK, loc="left")
        axes.grid(axis="y", color=LINE, linewidth=0.8)
    panels[1].set_yscale("log")
    add_legend_below(figure, panels[0])
    return save(figure, image("collapse"))


def plot(name: str, said: str) -> str:
    """A plot, if it was drawn, with the figure of the paper that it re-makes."""
    if not image(name).exists():
        return NOT_RUN
    source = f"\n\n*Re-made after Figure {REMADE[name]} of Wang & Isola (2020).*" if name in REMADE else ""
    return f"![{said}](images/{image(name).name}){source}"


def image(name: str) -> Path:
    """Where a plot is."""
    return IMAGES / f"hypersphere_{name}.svg"


REMADE = {"points_circle": 4, "points_sphere": 4, "circle": 3, "scatter": 5}  # plot -> number of the paper's figure
PLOTS = {
    "points_circle": "Point sets on the circle with their mean potentials",
    "points_sphere": "Point sets on the sphere with their mean potentials",
    "estimators": "Bias of the two estimators of uniformity over the number of points",
    "circle": "Features on the circle: distances of views, densities, angles of all and of single classes",
    "asymptotics_bias": "Bias of InfoNCE minus log M over the number of negatives",
    "asymptotics_fluctuation": "Deviation of a single draw over the number of negatives",
    "asymptotics_terms": "The two terms of the limit for each encoder",
    "scatter": "Encoders by alignment and uniformity, colored by accuracy; accuracy over their sum and over InfoMax",
    "collapse": "Mean cosine and effective rank by layer for alignment alone, uniformity alone and both",
}
TEXTS: dict[str, Callable[[], str]] = {
    **{f"hypersphere_{name}": partial(plot, name, said) for name, said in PLOTS.items()},
    "hypersphere_sentences": sentence_table,
}
PARTS_OF_PAGE: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "hypersphere_circle_table": circle_table,
    "hypersphere_explained": explained_table,
    "hypersphere_explained_infonce": partial(explained_table, "InfoNCE alone"),
    "hypersphere_limits": limits,
    "hypersphere_partial": partial_table,
    "hypersphere_moco": moco_table,
    "hypersphere_leak": leak_table,
    "hypersphere_depth": depth_table,
    "hypersphere_encoders": encoder_table,
    "hypersphere_seeds": seeds_table,
    "hypersphere_differences": differences_table,
    "hypersphere_collapse_table": collapse_table,
    "hypersphere_grids": partial(
        results.grids, "potentials", "circle", "asymptotics", "contrast", "sentences", "moco", "depth-probe"
    ),
}
