"""Tables and plots of the page of vision, from results/vit/ and results/benchmarks_vision.json.

`website/tables.py` puts the tables in place, and plots if `website/figures.py` has drawn them.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from uncollapse.lab.config.fields import identity
from uncollapse.lab.experiments.vit.recipe import DIVERSE, variant
from uncollapse.lab.experiments.vit.start_weights import PUBLISHED, SCRATCH
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.tables.contrasts import compare_rows
from uncollapse.lab.tables.markdown import cell_notes, contrast_table, format_published, format_result, group_cells
from uncollapse.lab.tables.paper_table import PaperTable, TableCell, build_cells
from uncollapse.lab.tables.selection import Record, field_of
from website.pages import results
from website.pages.results import IMAGES, NOT_RUN, RESULTS, TOGETHER, Row

RECIPE = RECIPES["vit"]
ACCURACY = RECIPE.tables["accuracy"]
PLACES = {"24": ("cifar10", 24), "12": ("cifar10", 12), "tiny": ("tinyimagenet20", 12)}  # data and blocks of each table
FREE = ("cure", "scale", "seed", *DIVERSE)  # settings in which the runs of a table may differ
LAST = {"mean_cosine": ".3f", "attention_std": ".4f", "effective_rank": ".1f"}  # of the last block, beside the accuracy
ENDS = ("similarity of patches", "deviation of attention", "effective rank")
SHARES = (0.5, 0.9, 0.95)  # of the sum of singular values
COSTS = {  # ways -> what the benchmark calls them
    "contra_norm": "ContraNorm at every norm",
    "DiversePatch": "the three losses of DiversePatch",
    "cosine loss": "its cosine loss",
    "contrast loss": "its contrastive loss",
    "mixing loss": "its mixing loss",
    "contra_norm + DiversePatch": "ContraNorm and DiversePatch",
    "attn_scale": "AttnScale",
    "feat_scale": "FeatScale",
}

vit = partial(results.records, RECIPE.name)


@cache
def planned(data: str, depth: int) -> tuple[dict[str, Any], ...]:
    """The settings that the named grids have for a table."""
    of = (grid for grids in RECIPE.grids.values() for grid in grids)
    trials = (trial for grid in of for cell in grid.cells(RECIPE.config) for trial in cell.trials)
    return tuple(asdict(trial) for trial in trials if (trial.data, trial.depth) == (data, depth))


def runs(data: str, depth: int) -> list[Record]:
    """The results of a table: all that differ from the grids in nothing but a few fields."""
    fixed = {name: value for name, value in planned(data, depth)[0].items() if name not in FREE}
    return [r for r in vit() if fixed.items() <= r["config"].items()]


def ways(data: str, depth: int) -> list[str]:
    """The rows of a table: what is planned, and what was run besides."""
    return list(dict.fromkeys(map(variant, (*planned(data, depth), *(r["config"] for r in runs(data, depth))))))


def _by_way(data: str, depth: int, figure: str = ACCURACY.metric) -> dict[str, TableCell]:
    """The cells of a table with a figure, by way, as far as they were run."""
    table = replace(ACCURACY, metric=figure, percent=figure == ACCURACY.metric)
    return {cell.row: cell for cell in build_cells(table, runs(data, depth)) if cell.run}


def compared(data: str, depth: int) -> tuple[Row, Sequence[Row]]:
    """A row for each way: its accuracy, what its last block is like, and what a step costs."""
    accuracy, *others = (_by_way(data, depth, figure) for figure in (ACCURACY.metric, *LAST))
    rows: list[Row] = []
    for way in ways(data, depth):
        if way not in accuracy:
            rows.append((way, "not run yet", *[""] * (len(LAST) + 1)))
            continue
        found = (_number(of[way].figures.values(), form) for of, form in zip(others, LAST.values(), strict=True))
        rows.append((way, _joined(format_result(ACCURACY, accuracy[way])), *found, _cost(way, data, depth)))
    return ("", "test accuracy, % (seeds)", *ENDS, "time of a step"), rows


def says(data: str, depth: int) -> str:
    """Each way compared with none, seed by seed, and what has to be known of single cells."""
    cells = list(_by_way(data, depth).values())
    notes = "\n".join(f"- {_joined(words)}" for words in cell_notes(ACCURACY, cells))
    found = compare_rows(ACCURACY, cells)
    return "\n\n".join(filter(None, (contrast_table(ACCURACY, found) if found else "", notes)))


def _number(values: Iterable[float], form: str) -> str:
    found = list(values)
    if not found:
        return "–"
    spread = f" ± {statistics.stdev(found):{form}}" if len(found) > 1 else ""
    return _joined(f"{statistics.fmean(found):{form}}{spread}")


def _joined(words: str) -> str:
    return TOGETHER.sub("\u00a0", words)


def _cost(way: str, data: str, depth: int) -> str:
    """Beside a step without anything, where that was measured."""
    file = RESULTS / "benchmarks_vision.json"
    if way == "none":
        return "1 ×"
    if data != "cifar10" or way not in COSTS or not file.exists():
        return "–"
    measured = {t["name"].strip(): t["measured"] for t in json.loads(file.read_text(encoding="utf-8"))["targets"]}
    name = f"{COSTS[way]}, CIFAR-10's model, {depth} blocks, bf16"
    return f"{measured[name]:.2f} ×" if name in measured else "–"


def dimensions() -> tuple[Row, Sequence[Row]]:
    """How many dimensions hold most of the singular values of the last block, for each way."""
    rows: list[Row] = []
    for data, depth in PLACES.values():
        for way, of in grouped(data, depth).items():
            dims = [_number([held(r["spectrum"], share) for r in of], ".0f") for share in SHARES]
            rank = _number([r["figures"]["dataset_rank"] for r in of], ".1f")
            width = f"{len(of[0]['spectrum'])}"
            rows.append((f"{data}, {depth}\u00a0blocks", way, *dims, width, rank))
    first, *others = (f"{share:.0%}" for share in SHARES)
    return ("", "", f"dimensions that hold {first} of the sum", *others, "of", "effective rank of all patches"), rows


def held(spectrum: Sequence[float], share: float) -> int:
    """The least number of singular values that hold a share of their sum. They come largest first."""
    sums = list(accumulate(spectrum))
    return 1 + next(number for number, value in enumerate(sums) if value >= share * sums[-1])


def grouped(data: str, depth: int) -> dict[str, list[Record]]:
    """The results behind each row of a table that was run."""
    found = {}
    for way, cell in _by_way(data, depth).items():
        mine = (r for r in runs(data, depth) if variant(r["config"]) == way)
        found[way] = [r for r in mine if cell.chosen.items() <= r["config"].items() and r["seed"] in cell.figures]
    return {way: found[way] for way in ways(data, depth) if found.get(way)}


def tuned() -> tuple[Row, Sequence[Row]]:
    """Runs that began with one of our own models, before and after."""
    rows: list[Row] = []
    for r in (r for r in vit() if field_of(r, "start") not in (SCRATCH, PUBLISHED)):
        begun, config = _begun(r), r["config"]
        layers = [_last(r["diagnosis"][when]["layers"]) for when in ("before", "after")]
        measured = (" → ".join(f"{layer[name]:{LAST[name]}}" for layer in layers) for name in LAST)
        accuracies = " → ".join("–" if one is None else f"{100 * one['figures']['test']:.2f}" for one in (begun, r))
        came = "another model" if begun is None else variant(begun["config"])
        way = f"{came}, then {variant(config)} for {config['epochs']} epochs at {config['lr']:g}"
        rows.append((way, str(r["seed"]), accuracies, *measured))
    return ("", "seed", "test accuracy, %", *ENDS), rows


def _begun(record: Record) -> Record | None:
    """The result of the run that kept the model with which another one began; None if there is no such result."""
    folder = Path(field_of(record, "start")).parent.name
    return next((r for r in vit() if folder == _kept_as(r)), None)


def _kept_as(record: Record) -> str:
    """The folder that `--save` makes for a run."""
    config = RECIPE.config(**{name: record["config"][name] for name in asdict(RECIPE.config())})
    return f"{RECIPE.name_of(config)}--{identity(RECIPE.name, config)}"


def _last(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(layer for layer in reversed(layers) if layer["name"].startswith("block"))


def papers() -> tuple[Row, Sequence[Row]]:
    """The papers' numbers, with ours where there are any."""
    printed = [table for table in RECIPE.tables.values() if table.published]
    depths = sorted({number.cell[table.columns] for table in printed for number in table.published})
    rows: list[Row] = []
    for table in printed:
        (group,) = group_cells(build_cells(table, vit())).values()  # each has one data set
        for way, along in group.items():
            found = {cell.column: cell for cell in along}
            rows.append((table.title, way, *(_beside(table, found.get(depth)) for depth in depths)))
    return ("", "", *(f"{depth} blocks" for depth in depths)), rows


def _beside(table: PaperTable, cell: TableCell | None) -> str:
    """A number of a paper, and what came here."""
    if cell is None:
        return ""
    return _joined(f"{format_published(table, cell)}{f' (here {format_result(table, cell)})' if cell.run else ''}")


def plot(name: str, said: str) -> str:
    """A plot, if it was drawn."""
    return f"![{said}](images/{image(name).name})" if image(name).exists() else NOT_RUN


def image(name: str) -> Path:
    """Where a plot is."""
    return IMAGES / f"vision_{name}.svg"


PLOTS = {
    **dict.fromkeys((f"layers_{name}" for name in PLACES), "Similarity, deviation of attention and rank by block"),
    "spectrum_24": "Singular values of the patches after the last block, and their sums",
}
TEXTS: dict[str, Callable[[], str]] = {
    **{f"vision_{name}_says": partial(says, *place) for name, place in PLACES.items()},
    **{f"vision_{name}": partial(plot, name, said) for name, said in PLOTS.items()},
}
PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    **{f"vision_{name}": partial(compared, *place) for name, place in PLACES.items()},
    "vision_dimensions": dimensions,
    "vision_papers": papers,
    "vision_tuned": tuned,
    "vision_grids": partial(results.grids, RECIPE.name),
}
