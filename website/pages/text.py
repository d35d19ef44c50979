"""Tables and plots of the page of text, from results/glue/, results/bert-depth/ and results/text/.

`website/tables.py` puts the tables in place, and plots if `website/figures.py` has drawn them.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from uncollapse.diagnosis.measures import MEASURES
from uncollapse.lab.experiments.glue.config import MINILM
from uncollapse.lab.experiments.glue.recipe import variant
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.tables.selection import Record, field_of
from uncollapse.report.canvas import INK, LINE, add_legend_below, new_figure
from website.pages import results
from website.pages.results import IMAGES, NOT_RUN, RESULTS, Row
from website.plots import save, save_group

DEPTH = RECIPES["bert-depth"].tables["depth"]
BY_LAYER = ("token_variance", "effective_rank", "mean_cosine")
SHADES = ("#a9c7dd", "#0068a8"), ("#eec3a6", "#c44d08")  # from the first epoch to the last: without a cure, with it
WAYS = ("none", "contra_norm")
PAPER_DEPTH, PAPER_AT = (
    72,
    (0, 12, 35, 71),
)  # blocks of the paper's deepest BERT, and those that were read off its figure
PAPER_LAYERS = {
    "none": {"feature_variance": (8.7, 8.2, 32.9, 42.6), "effective_rank": (24.6, 22.7, 14.4, 12.2)},
    "contra_norm": {"feature_variance": (24.8, 33.1, 95.7, 99.5), "effective_rank": (26.6, 30.3, 29.8, 27.7)},
}

glue = partial(results.records, "glue")
depth = partial(results.records, "bert-depth")


def table_1() -> str:
    """GLUE beside the paper."""
    return results.paper_table(RECIPES["glue"].tables["table1"], glue())


def rates() -> tuple[Row, Sequence[Row]]:
    """Vanilla runs with several learning rates and the first seed: what chose the rate."""
    runs = [r for r in glue() if field_of(r, "model") == MINILM and field_of(r, "cure") == "none" and r["seed"] == 0]
    tasks = sorted({field_of(r, "task") for r in runs})
    by_rate: dict[float, dict[str, str]] = {}
    for r in runs:
        if "validation" in r["figures"]:
            by_rate.setdefault(field_of(r, "lr"), {})[field_of(r, "task")] = f"{100 * r['figures']['validation']:.2f}"
    rows = [(f"{rate:g}", *(found.get(task, "–") for task in tasks)) for rate, found in sorted(by_rate.items())]
    return ("learning rate", *tasks), rows


def depths() -> str:
    """Encoders of growing depth."""
    return results.paper_table(DEPTH, depth())


def slower() -> str:
    """Depths that were run with several learning rates."""
    mine = [r for r in depth() if field_of(r, "task") == "sst2"]
    several = {d for d in {field_of(r, "depth") for r in mine} if len({field_of(r, "lr") for r in _deep(mine, d)}) > 1}
    return results.paper_table(
        RECIPES["bert-depth"].tables["rates"], [r for r in mine if field_of(r, "depth") in several]
    )


def _deep(mine: Sequence[Record], layers: int) -> list[Record]:
    return [r for r in mine if field_of(r, "depth") == layers]


def plots() -> str:
    """Accuracy over depth, and what happens layer by layer, where they are drawn."""
    paths = [_image("depth"), *(_image(f"layers_{way}") for way in WAYS)]
    said = ["Accuracy over depth", *(f"Variance, effective rank and similarity by layer, {way}" for way in WAYS)]
    shown = [f"![{s}](images/{p.name})" for s, p in zip(said, paths, strict=True) if p.exists()]
    return "\n".join(shown) or NOT_RUN


def deepest() -> tuple[Row, Sequence[Row]]:
    """Variance over features and effective rank of the deepest pair of runs, beside the paper's 72 blocks."""
    pair = deepest_pair()
    if not pair:
        return (), []
    layers = int(pair[WAYS[0]]["config"]["depth"])
    at = [round(number / (PAPER_DEPTH - 1) * (layers - 1)) for number in PAPER_AT]
    rows: list[Row] = []
    for way, record in pair.items():
        for measure, paper in PAPER_LAYERS[way].items():
            found = [f"{record['layers'][measure][-1][number]:.1f}" for number in at]
            rows.append((way, measure, f"ours, {layers} blocks", *found))
            rows.append((way, measure, f"paper, {PAPER_DEPTH} blocks", *map(str, paper)))
    shares = (f"{number / (PAPER_DEPTH - 1):.0%} of the way" for number in PAPER_AT)
    return ("", "", "", *shares), rows


def padding() -> tuple[Row, Sequence[Row]]:
    """How far embeddings move when the same sentence is filled up."""
    result = _read("padding")
    lengths = sorted({row["length"] for row in result["shifts"]})
    rows: dict[Row, dict[int, str]] = {}
    for row in result["shifts"]:
        form = {"tokens": "", "features": ", over features"}.get(row.get("axis", ""), "")
        name = f"ContraNorm{form}" if "scale" in row else "no cure"
        key = name, f"{row['scale']:g}" if "scale" in row else "", row.get("padding", "")
        cosine = f"{row['cosine_min']:.3f}"
        rows.setdefault(key, {})[row["length"]] = f"{row['embedding_mean']:.1e} ({cosine})"
    filled = [(*key, *(found.get(length, "–") for length in lengths)) for key, found in rows.items()]
    return ("", "scale", "padding", *(f"padded to {length}" for length in lengths)), filled


def padding_batched() -> tuple[Row, Sequence[Row]]:
    """What the size of a batch does to Spearman's correlation."""
    result = _read("padding")
    ways = list(dict.fromkeys(row["way"] for row in result["batched"]))
    rows: dict[Row, dict[str, str]] = {}
    for row in result["batched"]:
        name = "no cure" if "scale" not in row else f"ContraNorm, scale {row['scale']:g}, {row['padding']}"
        rows.setdefault((name,), {})[row["way"]] = f"{100 * row['spearman']:.2f}"
    heads = (way.replace("filled up", "padded") for way in ways)
    return ("", *heads), [(*key, *(found.get(way, "–") for way in ways)) for key, found in rows.items()]


FIGURES = ("alignment", "uniformity", "spearman")


def embeddings() -> tuple[Row, Sequence[Row]]:
    """Sentence embeddings of the last block that were not trained here."""
    result = _read("sts_embeddings")
    last = max(row["blocks"] for row in result["untrained"])
    rows = []
    for row in result["untrained"]:
        cure = {"none": "as it is", "bert": "ContraNorm", "bert_v2": "ContraNorm v2"}[row["cure"]]
        scale = "" if row["scale"] is None else f", scale {row['scale']:g}"
        where = "" if row["blocks"] == last else f", after block {row['blocks']}"
        rows.append((f"{row['weights']}, {cure}{scale}{where}", *_qualities([row])))
    return _embedding_head(), rows


def embeddings_trained() -> tuple[Row, Sequence[Row]]:
    """The same after an epoch on STS-B's pairs."""
    result = _read("sts_embeddings")
    ways = list(dict.fromkeys(run["way"] for run in result["trained"]))
    groups = {way: [run for run in result["trained"] if run["way"] == way] for way in ways}
    return _embedding_head(), [(f"{way} ({len(group)} seeds)", *_qualities(group)) for way, group in groups.items()]


def _embedding_head() -> Row:
    return ("", *(f"{name}, {part}" for part in ("dev", "test") for name in FIGURES))


def _qualities(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    for part in ("dev", "test"):
        for name in FIGURES:
            values = [row[part][name] for row in rows]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            found.append(f"{statistics.fmean(values):.3f}{spread}")
    return found


def albert() -> tuple[Row, Sequence[Row]]:
    """ALBERT on molecules."""
    result = _read("albert_smiles")
    rows = []
    for way, row in result["summary"].items():
        figures = []
        for name in ("spearman", "pearson"):
            found = row[name]
            spread = f" ± {100 * found['std']:.2f}" if "std" in found else ""
            figures.append(f"{100 * found['mean']:.2f}{spread} ({found['n']} seeds)")
        scale = f"{row['scale']:g}" if way.startswith("contra_norm") else ""
        rows.append((way, f"{row['lr']:g}", scale, *figures, *_ends(result, way)))
    head = ("", "learning rate", "scale", "Spearman", "Pearson", "cosine, last pass", "effective rank, last pass")
    return head, rows


def albert_differences() -> tuple[Row, Sequence[Row]]:
    """Each cure against no cure by seed: differences of correlations in points."""
    result = _read("albert_smiles")
    by_seed = {
        (way, words): {r["seed"]: 100 * r["figures"][figure] for r in _chosen_runs(result, way)}
        for way in result["summary"]
        for words, figure in (("Spearman", "dev"), ("Pearson", "dev_pearson"))
    }
    pairs = {
        (words, f"{way} − none"): (seeds, by_seed["none", words])
        for (way, words), seeds in by_seed.items()
        if way != "none"
    }
    return results.differences(pairs, "correlation", digits=2)


def embedding_differences() -> tuple[Row, Sequence[Row]]:
    """Each cure against no cure by seed: differences of Spearman's correlation."""
    trained = _read("sts_embeddings")["trained"]
    pairs = {
        (part, f"{way} − none"): (_spearman_by_seed(trained, way, part), _spearman_by_seed(trained, "none", part))
        for part in ("dev", "test")
        for way in dict.fromkeys(run["way"] for run in trained)
        if way != "none"
    }
    return results.differences(pairs, "Spearman", digits=4)


def _spearman_by_seed(trained: Sequence[dict[str, Any]], way: str, part: str) -> dict[int, float]:
    return {run["seed"]: run[part]["spearman"] for run in trained if run["way"] == way}


def _ends(result: dict[str, Any], way: str) -> list[str]:
    """Measures of the last pass after training, a mean over the runs with the chosen settings."""
    runs = _chosen_runs(result, way)
    means = (
        statistics.fmean(r["diagnosis"]["after"][name][-1] for r in runs) for name in ("mean_cosine", "effective_rank")
    )
    return [f"{value:.2f}" for value in means]


def _chosen_runs(result: dict[str, Any], way: str) -> list[dict[str, Any]]:
    """Return the runs of a way with the chosen settings."""
    chosen = result["summary"][way]
    asked = {name: chosen[name] for name in ("lr", "scale") if name in chosen}
    return [r for r in result["runs"] if r["way"] == way and asked.items() <= r["config"].items()]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_file(name).read_text(encoding="utf-8"))
    return found


def _file(name: str) -> Path:
    return RESULTS / "text" / f"{name}.json"


def _if_run(name: str, table: Callable[[], tuple[Row, Sequence[Row]]]) -> Callable[[], tuple[Row, Sequence[Row]]]:
    """A table of a demonstration; without rows where that was not run."""
    return lambda: table() if _file(name).exists() else ((), [])


def draw() -> Iterator[Path]:
    """Draw all plots that the results allow."""
    mine = [r for r in depth() if field_of(r, "task") == "sst2"]
    if mine:
        yield save_group(DEPTH, mine, "sst2", _image("depth"))
    for (way, record), shades in zip(deepest_pair().items(), SHADES, strict=False):
        yield _draw_layers(way, record, shades)


def deepest_pair() -> dict[str, Record]:
    """Return the runs of each way with the most blocks, the same learning rate and the same, lowest seed, by way."""
    found: dict[tuple[int, float, int], dict[str, Record]] = {}
    for r in (r for r in depth() if field_of(r, "task") == "sst2"):
        alike = field_of(r, "depth"), field_of(r, "lr"), -int(r["seed"])
        found.setdefault(alike, {})[variant(r["config"])] = r
    pairs = [alike for alike, ways in found.items() if ways.keys() >= set(WAYS)]
    return {way: found[max(pairs)][way] for way in WAYS} if pairs else {}


def _draw_layers(way: str, record: Record, shades: tuple[str, str]) -> Path:
    """A panel for each measure with a line for each epoch, the later the darker."""
    from matplotlib.colors import LinearSegmentedColormap

    config = record["config"]
    cure = "no cure" if way == "none" else f"ContraNorm, scale {config['scale']:g}"
    where = f"{config['depth']} blocks, {cure}, learning rate {config['lr']:g}"
    title = f"{where}: after each block, from the start to the last epoch"
    figure, panels = new_figure(title, (10.1, 3.2), len(BY_LAYER))
    shade: Any = LinearSegmentedColormap.from_list("epochs", shades)
    for axes, measure in zip(panels, BY_LAYER, strict=True):
        rows = record["layers"][measure]
        for epoch, row in enumerate(rows):
            label = "start" if epoch == 0 else f"epoch {epoch}"
            dash = (0, (3, 2)) if epoch == 0 else "-"
            axes.plot(row, color=shade(epoch / (len(rows) - 1)), linewidth=1.8, linestyle=dash, label=label)
        axes.set_title(MEASURES[measure].title, fontsize=10, color=INK)
        axes.set_xlabel("block", color=INK)
        axes.grid(axis="y", color=LINE, linewidth=0.8)
    add_legend_below(figure, panels[0])
    return save(figure, _image(f"layers_{way}"))


def _image(name: str) -> Path:
    return IMAGES / f"text_{name}.svg"


TEXTS: dict[str, Callable[[], str]] = {
    "text_table1": table_1,
    "text_depths": depths,
    "text_plots": plots,
    "text_slower": slower,
}
PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "text_rates": rates,
    "text_deepest": deepest,
    "text_padding": _if_run("padding", padding),
    "text_padding_batched": _if_run("padding", padding_batched),
    "text_embeddings": _if_run("sts_embeddings", embeddings),
    "text_embeddings_trained": _if_run("sts_embeddings", embeddings_trained),
    "text_embedding_differences": _if_run("sts_embeddings", embedding_differences),
    "text_albert": _if_run("albert_smiles", albert),
    "text_albert_differences": _if_run("albert_smiles", albert_differences),
    "text_grids": partial(results.grids, "glue", "bert-depth"),
}
