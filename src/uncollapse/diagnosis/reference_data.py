"""Stored results that a diagnosis is compared with: gains of cures, outcomes of acting on a verdict, healthy models.

Each is a JSON file in this folder that is counted from `results/`:

- `measured_gains.json`: gains of cures in the arena by kind of model and depth, from which advice is taken; written by
  `python -m website.pages.arena`.
- `outcomes.json`: how often acting on a verdict has helped; written by `python -m experiments.outcomes`. docs/trust.md
  shows the cases behind it.
- `healthy.json`: metrics of pretrained models of a kind by relative depth; written by `python -m
  website.pages.real_models`. docs/models.md shows the models.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

GAINS_FILE, OUTCOMES_FILE, HEALTHY_FILE = "measured_gains.json", "outcomes.json", "healthy.json"
NEAR = 2.0  # a model is like a measured one up to this ratio of their depths
PAGE = "docs/which-cure.md"
DATA = {"csbm": "a random graph", "bert": "SST-2", "decoder": "WikiText-2"}  # as results call data -> words
ENOUGH, VARIED = 5, 3  # cases, and the data sets that they are on: seeds of one network are alike
NETWORKS = {"pyg": "graph networks", "huggingface": "transformers", "timm": "transformers", "torch": "transformers"}
CLEAR = "2 points"
HEALTHY_STEPS = 20  # between the first layer and the last
HEALTHY_MEASURES = ("mean_cosine", "robust_cosine", "rank_share", "dataset_rank_share")  # do not depend on the width


def format_points(points: float) -> str:
    """Return a difference in points with its sign: "+1.5", "−0.3"."""
    return f"{points:+.1f}".replace("-", "−")


@dataclass(frozen=True)
class Gain:
    """The gain of a row over the plain model in points of test accuracy, with its 95 % interval.

    cure: its registered name; empty if it is not a cure to attach. code: a line that does it, or a comment.
    """

    row: str
    cure: str
    place: str
    code: str
    mean: float
    low: float
    high: float
    seeds: int

    @property
    def text(self) -> str:
        """The number in words."""
        return f"{format_points(self.mean)} points (95 %: {format_points(self.low)} to {format_points(self.high)})"

    @property
    def numbers(self) -> str:
        """The numbers alone, for a table whose heading names the unit; a line is not broken inside the interval."""
        low, high = format_points(self.low), format_points(self.high)
        return f"{format_points(self.mean)} ({low}\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}{high})"


@dataclass(frozen=True)
class Measured:
    """All rows that were measured on one kind of model at one depth, the best lower bound first.

    data: the datasets, over which each seed's gains are averaged. cause: the verdict of the plain model. score: its
    test accuracy in percent.
    """

    kind: str
    depth: int
    data: tuple[str, ...]
    cause: str
    score: float
    gains: tuple[Gain, ...]

    def where(self, verdict: str) -> str:
        """Return the measured models in words, with their verdict where it is not that of the diagnosed model."""
        *others, last = (DATA.get(name, name) for name in self.data)
        data = f"{', '.join(others)} and {last}" if others else last
        other = "" if self.cause == verdict else f", with the verdict {self.cause}"
        return f"a {self.kind} of {self.depth} blocks on {data}{other}"

    @property
    def helpful(self) -> tuple[Gain, ...]:
        """The rows whose whole interval is above 0."""
        return tuple(gain for gain in self.gains if gain.low > 0)


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))
    return found


@cache
def all_measured() -> tuple[Measured, ...]:
    """Return everything that was measured."""
    return tuple(
        Measured(**entry | {"data": tuple(entry["data"]), "gains": tuple(Gain(**gain) for gain in entry["gains"])})
        for entry in _read(GAINS_FILE)["measured"]
    )


def find_measured(kind: str, depth: int, cause: str = "", among: Iterable[Measured] | None = None) -> Measured | None:
    """Return what was measured on such a model; None if nothing was, within a factor of two of its depth.

    cause: the verdict of the model; what was measured on models with another verdict says nothing about it. "both"
    includes the two kinds of collapse. Of several, one with the same verdict is preferred, then the nearest depth.
    """
    there = all_measured() if among is None else among
    same = (each for each in there if each.kind == kind and (not cause or _overlaps(cause, each.cause)))
    ratios = {each: abs(math.log(each.depth / max(depth, 1))) for each in same}
    near = [each for each, ratio in ratios.items() if ratio <= math.log(NEAR)]
    return min(near, key=lambda each: (each.cause != cause, ratios[each]), default=None)


def _overlaps(cause: str, other: str) -> bool:
    """Return whether two verdicts name a common kind of collapse, or are the same."""
    return cause == other or ("both" in (cause, other) and "none" not in (cause, other))


@dataclass(frozen=True)
class Outcome:
    """What acting brought in like cases: how many there are, where it clearly helped or hurt, and the median gain.

    sources: from how many datasets or encoders. median: in points of the score.
    """

    cases: int
    sources: int
    helped: int
    hurt: int
    median: float


@cache
def read_outcomes() -> dict[str, dict[str, Outcome]]:
    """Return the outcomes by what was mended ("graph networks", "transformers", "embeddings") and by the verdict."""
    return {what: {kind: Outcome(**of) for kind, of in kinds.items()} for what, kinds in _read(OUTCOMES_FILE).items()}


def outlook(family: str, kind: str) -> str:
    """Return in words how often acting has helped models of a family with this verdict; "" without models of the kind.

    >>> outlook("embeddings", "none")
    ''
    """
    what = NETWORKS.get(family)
    if what is None:
        return ""
    found = read_outcomes().get(what, {}).get(kind)
    if found is None or found.cases < ENOUGH or found.sources < VARIED:
        few = f"Too few {what} with exactly this verdict were measured to say how often a cure helps."
        return "" if kind == "none" else few
    counts = f"of {found.cases} trained {what} with this verdict, on {found.sources} datasets, the best cure"
    median = format_points(found.median)
    counts += f" gained at least {CLEAR} in {found.helped} and lost as much in {found.hurt} (median {median})"
    likely = found.helped > 2 * max(found.hurt, found.cases - found.helped)
    return f"{'A cure is likely to help' if likely else 'Whether a cure helps is open'}: {counts}."


def embedding_outlook(acts: bool) -> str:
    """Return in words how often all_but_the_top raised scores by cosine of embeddings like these.

    "" without enough cases. acts: whether the geometry advises it.
    """
    found = read_outcomes().get("embeddings", {}).get("act" if acts else "leave")
    if found is None or found.cases < ENOUGH:
        return ""
    who = f"of {found.cases} such layers of {found.sources} encoders"
    helped = f"{found.helped} and lowered that of {found.hurt} (median {format_points(found.median)} points)"
    return f"{who}, removing common directions raised the score of {helped}"


@dataclass(frozen=True)
class HealthyModels:
    """Pretrained models of one kind, such as "text encoder".

    curves: by model and measure, the values at even steps of depth from the first layer to the last.
    """

    kind: str
    curves: Mapping[str, Mapping[str, Sequence[float]]]

    @property
    def label(self) -> str:
        """The kind and the models in words."""
        return f"healthy {self.kind}s ({', '.join(self.curves)})"

    def range_at(self, measure: str, depth: float) -> tuple[float, float] | None:
        """Return the lowest and the highest value at a relative depth; None if the measure was not taken."""
        values = [interpolate(of[measure], depth) for of in self.curves.values() if measure in of]
        return (min(values), max(values)) if values else None


@cache
def read_healthy() -> Mapping[str, HealthyModels]:
    """Return all healthy models by kind."""
    return {kind: HealthyModels(kind, models) for kind, models in _read(HEALTHY_FILE).items()}


def healthy_like(settings: Mapping[str, Any]) -> HealthyModels | None:
    """Return the healthy models of the kind that the settings of a diagnosis name; None of some blocks only."""
    return None if "layers" in settings else read_healthy().get(str(settings.get("kind")))


def interpolate(values: Sequence[float], depth: float) -> float:
    """Return the value at a relative depth between 0 and 1, on the line between its neighbors.

    >>> interpolate([0.0, 1.0, 3.0], 0.75)
    2.0
    """
    at = depth * (len(values) - 1)
    left = min(int(at), len(values) - 2)
    return values[left] + (at - left) * (values[left + 1] - values[left])
