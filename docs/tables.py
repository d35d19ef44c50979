"""Tables of the documentation, made from the registries and from results/: an mkdocs hook.

A comment `<!-- table: NAME -->` on a page is replaced by the table called NAME, and `<!-- printed -->` by what the code
above it printed.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import uncollapse
from uncollapse.backbones import BACKBONES
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.lab.experiments.calibration.analysis import Case, cases, hit_rates
from uncollapse.lab.experiments.calibration.config import PAIRS, PROBES
from uncollapse.registry import CURES, LOSSES, METRICS

sys.path.insert(0, str(Path(__file__).parent))  # a hook is not run from its folder, and that is no package

import commands
import comparisons
import hyperspheres
import judging
import printed
import real_models
import scales
import texts
import tunings
import visions

import concepts
import graphs

RESULTS = Path(__file__).parents[1] / "results"
PLACE = re.compile(r"<!-- table: (\w+) -->")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the tables of a page. An unknown name fails the build."""
    filled = printed.fill(markdown, page.file.src_uri)
    return PLACE.sub(lambda found: TABLES[found[1]](), filled)


def metrics() -> str:
    """Name, needs, direction, bounds and paper of each metric."""
    rows = (
        (f"`{m.name}`", ", ".join(m.needs), m.better or "neither", _bounds(m.bounds), m.paper) for m in METRICS.values()
    )
    return _table(("metric", "needs", "further from collapse", "bounds", "paper"), rows)


def cures() -> str:
    """Name, default place, use, cost, options and paper of each cure."""
    rows = ((f"`{c.name}`", c.default_places(), c.use, c.cost, _code(c.options()), c.paper) for c in CURES.values())
    return _table(("cure", "place", "for", "cost", "options when attached", "paper"), rows)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def losses() -> str:
    """Name, needs and paper of each loss."""
    return _table(("loss", "needs", "paper"), ((f"`{x.name}`", ", ".join(x.needs), x.paper) for x in LOSSES.values()))


def presets() -> str:
    """Arguments of each preset of ContraNorm."""
    rows = (
        (f"`{name}`", ", ".join(f"`{key}={value!r}`" for key, value in options.items()))
        for name, options in uncollapse.ContraNorm.PRESETS.items()
    )
    return _table(("preset", "arguments that differ from `contra_norm`'s and `ContraNorm`'s defaults"), rows)


def measures() -> str:
    """Name, scope, direction and meaning of each measure of a diagnosis."""
    rows = ((f"`{m.name}`", m.scope, m.better or "neither", m.says) for m in MEASURES.values())
    return _table(("measure", "of", "further from collapse", "what it says"), rows)


def backbones() -> str:
    """The families of models that are known."""
    return _table(("backbone", "library", "models"), ((b.name, b.library, b.models) for b in BACKBONES.values()))


def benchmarks() -> str:
    """The targets of results/benchmarks.json beside what was measured; nothing if there is no such file."""
    return _benchmarks("benchmarks.json")


def overhead() -> str:
    """What a diagnosis costs beside a forward pass."""
    return _benchmarks("benchmarks_diagnose.json")


def attaching() -> str:
    """What an attached ContraNorm adds to a training step."""
    return _benchmarks("benchmarks_attach.json")


def graph_costs() -> str:
    """What training a deep graph network costs beside the published form of ContraNorm."""
    return _benchmarks("benchmarks_graphs.json") or graphs.NOT_RUN


def text_costs() -> str:
    """What training with a cure costs beside training without one."""
    return _benchmarks("benchmarks_text.json") or graphs.NOT_RUN


def vision_costs() -> str:
    """What a training step on images costs with a cure or with losses on patches, and how fast images are read."""
    return _benchmarks("benchmarks_vision.json") or graphs.NOT_RUN


def hypersphere_speed() -> str:
    """What the contrastive losses take beside those of other libraries, and in a training step."""
    return _benchmarks("benchmarks_hypersphere.json") or graphs.NOT_RUN


def gathering() -> str:
    """What a loss over the rows of two processes takes beside gathering all keys."""
    return _benchmarks("benchmarks_gather.json") or graphs.NOT_RUN


def streaming() -> str:
    """How fast a large file of embeddings is measured, and in how much memory."""
    return _benchmarks("benchmarks_streaming.json") or graphs.NOT_RUN


def mending() -> str:
    """The deep vision transformer as it is and with ContraNorm attached; nothing if it was not run."""
    file = RESULTS / "mend_vit.json"
    if not file.exists():
        return ""
    runs = json.loads(file.read_text(encoding="utf-8"))
    rows = (
        (
            name,
            f"{run['effective_rank']:.2f}",
            f"{run['mean_cosine']:.2f}",
            f"{run['figures']['test']:.1%}",
            f"{run['seconds']:.0f} s",
            run["verdict"],
        )
        for name, run in runs.items()
    )
    head = ("", "effective rank after the last block", "mean cosine there", "test accuracy", "training", "verdict")
    return f"{_table(head, rows)}\n\nBy `python examples/mend_vit.py --out results/mend_vit.json`."


def calibration_rates() -> str:
    """How often each rule was right about acting on embeddings; nothing before the recipe has run."""
    found = _calibration_cases()
    if not found:
        return "*Not run yet.*"
    rows = []
    for use, tasks in (("cosine", PAIRS), ("linear probe", PROBES)):
        for name, rate in hit_rates([case for case in found if case.task in tasks]).items():
            low, high = rate.interval
            share = f"{rate.right} of {rate.cases} ({100 * low:.0f}–{100 * high:.0f} %)"
            rows.append((use, name, share, str(rate.alarms), str(rate.misses)))
    unclear = sum(case.helps is None for case in found)
    head = (
        "used by",
        "rule",
        "right, with Wilson's 95 % interval",
        "acted where it hurt",
        "left what would have helped",
    )
    note = f"{len(found)} cases, of which {unclear} show no clear difference and count for no rule."
    return f"{_table(head, rows)}\n\n{note}"


def calibration_layers() -> str:
    """Scores of each layer of the encoders on STS-B: as they are, with all-but-the-top, and what auto did."""
    folder = sorted((RESULTS / "calibration").glob("*-stsb--*.json"))
    rows = []
    for record in (json.loads(path.read_text()) for path in folder):
        config = record["config"]
        own = config["model"].startswith("package:")
        model = config["model"].removeprefix("package:").split("/")[0 if own else -1]
        name = f"{model}{', random' if config['random'] else ''}"
        for layer in record["layers"]:
            scores, gain = layer["scores"], layer["gain"]
            interval = f"{100 * gain['low']:+.1f} … {100 * gain['high']:+.1f}"
            numbers = (f"{100 * scores[key]:.1f}" for key in ("none", "all_but_the_top"))
            geometry = f"{layer['geometry']['mean_cosine']:.2f}"
            rows.append(
                (f"{name}, {config['pooling']}", str(layer["layer"]), geometry, *numbers, interval, layer["auto"])
            )
    head = ("encoder", "layer", "mean cosine", "as it is", "top removed", "gain, 95 % interval", "auto chose")
    return _table(head, rows) if rows else "*Not run yet.*"


def _calibration_cases() -> list[Case]:
    paths = sorted((RESULTS / "calibration").glob("*.json"))
    return cases(json.loads(path.read_text()) for path in paths)


def _benchmarks(name: str) -> str:
    file = RESULTS / name
    if not file.exists():
        return ""
    result = json.loads(file.read_text(encoding="utf-8"))
    said = {True: "yes", False: "no", None: "no target"}
    rows = (
        (t["name"], t["target"], f"{t['measured']:.3g} {t['unit']}", said[t["reached"]], t["detail"])
        for t in result["targets"]
    )
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    table = _table(("what", "target", "measured", "reached", "detail"), rows)
    machine = f"{result['processor']}, {result['config']['threads']} threads"
    return f"{table}\n\nMeasured on {result['date']} with {versions}, on {machine}, by `make bench`."


def diverse_patch() -> str:
    """What became of the four ways of examples/diverse_patch.py; nothing before it has run."""
    file = RESULTS / "diverse_patch.json"
    if not file.exists():
        return ""
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = (
        (
            run["way"],
            f"{100 * run['test_accuracy']:.1f} %",
            f"{run['mean_cosine']:.2f}",
            f"{run['effective_rank']:.1f}",
            f"{run['cpu_seconds']:.0f} s",
        )
        for run in result["runs"]
    )
    head = ("way", "test accuracy", "cosine, last block", "effective rank, last block", "CPU time of training")
    vit, versions = result["config"]["vit"], result["versions"]
    return (
        f"{_table(head, rows)}\n\n{vit['depth']} blocks, {vit['epochs']} epochs, seed {result['seed']}; "
        f"{result['date'][:10]}, torch {versions['torch']}, timm {versions['timm']}."
    )


def _of(parts: dict[str, Callable[[], Any]], name: str) -> Callable[[], str]:
    def filled() -> str:
        head, rows = parts[name]()
        return _table(head, rows) if rows else graphs.NOT_RUN

    return filled


def _bounds(bounds: tuple[float | None, float | None]) -> str:
    low, high = bounds
    return f"{'−∞' if low is None else low:} … {'∞' if high is None else high}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = tuple(head)
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "metrics": metrics,
    "cures": cures,
    "losses": losses,
    "presets": presets,
    "benchmarks": benchmarks,
    "overhead": overhead,
    "attaching": attaching,
    "graph_costs": graph_costs,
    "mending": mending,
    "measures": measures,
    "backbones": backbones,
    "diverse_patch": diverse_patch,
    **{name: _of(real_models.PARTS, name) for name in real_models.PARTS},
    **{name: _of(concepts.PARTS, name) for name in concepts.PARTS},
    **{name: _of(comparisons.PARTS, name) for name in comparisons.PARTS},
    **{name: _of(judging.PARTS, name) for name in judging.PARTS},
    **{name: _of(graphs.PARTS, name) for name in graphs.PARTS},
    **{name: _of(scales.PARTS, name) for name in scales.PARTS},
    **{name: _of(texts.PARTS, name) for name in texts.PARTS},
    **{name: _of(visions.PARTS, name) for name in visions.PARTS},
    **{name: _of(tunings.PARTS, name) for name in tunings.PARTS},
    **{name: _of(hyperspheres.PARTS_OF_PAGE, name) for name in hyperspheres.PARTS_OF_PAGE},
    **graphs.TEXTS,
    **texts.TEXTS,
    **visions.TEXTS,
    **tunings.TEXTS,
    **hyperspheres.TEXTS,
    "text_costs": text_costs,
    "vision_costs": vision_costs,
    "hypersphere_speed": hypersphere_speed,
    "gathering": gathering,
    "streaming": streaming,
    "calibration_rates": calibration_rates,
    "calibration_layers": calibration_layers,
    "commands": commands.commands,
}
