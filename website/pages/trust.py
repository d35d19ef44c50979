"""Tables and figures of the page "Can I trust the verdict?", from results/."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from uncollapse.diagnosis.reference_data import format_points
from uncollapse.diagnosis.verdict import ALIKE
from uncollapse.embeddings.geometry import ALIKE as ACT_FROM
from uncollapse.lab.experiments.calibration import analysis, model_outcomes
from uncollapse.lab.experiments.calibration.analysis import Rate
from uncollapse.lab.experiments.calibration.model_outcomes import ModelCase
from uncollapse.lab.experiments.calibration.recipe import PAIRS, PROBES
from uncollapse.report.canvas import QUIET, add_legend_below, new_figure, series_color, series_marker
from website.pages.results import IMAGES, RESULTS, Row
from website.plots import save

HEAD = ("rule", "right, with Wilson's 95 % interval", "acted but hurt", "missed a gain")
VERDICTS = {"none": "no collapse", "complete": "complete", "dimensional": "dimensional", "both": "both"}
Point = tuple[float, float]


@cache
def networks() -> tuple[ModelCase, ...]:
    """Cases of trained networks."""
    return tuple(model_outcomes.read(RESULTS))


@cache
def embeddings() -> tuple[analysis.Case, ...]:
    """Cases of embeddings."""
    paths = sorted((RESULTS / "calibration").glob("*.json"))
    return tuple(analysis.cases(json.loads(path.read_text()) for path in paths))


def network_rates() -> tuple[Row, Sequence[Row]]:
    """How often each rule was right about acting on a network: all of them, and those of more than three layers."""
    rows = []
    for name, rate in model_outcomes.hit_rates(networks()).items():
        deep = model_outcomes.hit_rates([case for case in networks() if case.depth > 3])[name]
        rows.append((*_row(name, rate), f"{deep.right} of {deep.cases}"))
    return (*HEAD, "right, more than 3 layers"), rows


def network_verdicts() -> tuple[Row, Sequence[Row]]:
    """What the best cure brought, by family and verdict."""
    head = ("trained networks", "verdict", "cases", "datasets", "cure helped", "cure hurt", "median gain in points")
    rows = []
    for family, kinds in model_outcomes.summarize(networks()).items():
        for kind, of in kinds.items():
            counts = (f"{of[name]:.0f}" for name in ("cases", "sources", "helped", "hurt"))
            rows.append((family, VERDICTS[kind], *counts, format_points(of["median"])))
    return head, rows


def embedding_rates() -> tuple[Row, Sequence[Row]]:
    """How often each rule was right about acting on embeddings, by their use."""
    rows = []
    for use, tasks in (("cosine", PAIRS), ("linear probe", PROBES)):
        mine = [case for case in embeddings() if case.task in tasks]
        rows += [(use, *_row(name, rate)) for name, rate in analysis.hit_rates(mine).items()] if mine else []
    return ("used by", *HEAD), rows


def shipped_rates() -> tuple[Row, Sequence[Row]]:
    """How often the rule that ships was right about embeddings, next to acting always and never."""
    head, rows = embedding_rates()
    return head, [row for row in rows if not row[1].startswith("fitted")]


def embedding_counts() -> str:
    """How many cases there are, and of which encoders."""
    found = embeddings()
    unclear = sum(case.helps is None for case in found)
    encoders = len({case.model for case in found})
    counted = f"{len(found)} cases from {encoders} encoders"
    return f"{counted}. {unclear} of them show no clear difference and are not counted below."


def _row(name: str, rate: Rate) -> Row:
    low, high = rate.interval
    share = f"{rate.right} of {rate.cases} ({100 * low:.0f}–{100 * high:.0f} %)"
    return name, share, str(rate.alarms), str(rate.misses)


def draw() -> Iterator[Path]:
    """Draw both scatters: the measure that the rule reads, and the gain of acting."""
    encoders: dict[str, list[Point]] = {}
    for case in embeddings():
        if case.task in PAIRS:
            encoders.setdefault(_model(case), []).append((case.geometry.mean_cosine, 100 * case.gain))
    yield _scatter(
        "trust_embeddings", "Layers of encoders, used by cosine", "mean cosine of two rows", encoders, ACT_FROM
    )
    verdicts: dict[str, list[Point]] = {}
    for network in networks():
        verdicts.setdefault(VERDICTS[network.verdict], []).append((network.cosine, 100 * network.gain))
    place = "robust cosine after the last hidden layer"
    yield _scatter("trust_networks", "Trained networks without a cure, by verdict", place, verdicts, ALIKE)


def _model(case: analysis.Case) -> str:
    """Return an encoder's name for a legend: the package's, or the last part of the hub's."""
    model, _, rest = case.encoder.partition(",")
    own = model.startswith("package:")
    name = model.removeprefix("package:").split("/")[0 if own else -1]
    return f"{name}, random weights" if "random" in rest else name


def _scatter(name: str, title: str, measure: str, groups: Mapping[str, Sequence[Point]], bound: float) -> Path:
    figure, (axes,) = new_figure(title, (6.4, 4.0), 1)
    for number, (label, points) in enumerate(sorted(groups.items())):
        color = series_color(number)
        axes.scatter(
            *zip(*points, strict=True),
            s=16,
            alpha=0.7,
            label=label,
            color=color,
            marker=series_marker(number),
        )
    axes.axhline(0, color=QUIET, linewidth=0.8)
    axes.axvline(bound, color=QUIET, linewidth=1, linestyle="--")
    axes.set_xlabel(f"{measure} (dashed: acts from here on)")
    axes.set_ylabel("gain of acting, in points")
    add_legend_below(figure, axes, columns=2)
    return save(figure, IMAGES / f"{name}.svg")


PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {
    "trust_network_rates": network_rates,
    "trust_network_verdicts": network_verdicts,
    "trust_embedding_rates": embedding_rates,
    "trust_shipped_rates": shipped_rates,
}
TEXTS: dict[str, Callable[[], str]] = {"trust_embedding_counts": embedding_counts}
