"""Gains of cures that were measured in the arena, by kind of model and depth: what advice is taken from.

`measured_gains.json` is written from results/arena by `python -m website.pages.arena`.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources

FILE = "measured_gains.json"
NEAR = 2.0  # a model is like a measured one up to this ratio of their depths
PAGE = "docs/which-cure.md"
DATA = {"csbm": "a random graph"}  # names of data sets that say little -> words


def signed(points: float) -> str:
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
        return f"{signed(self.mean)} points (95 %: {signed(self.low)} to {signed(self.high)})"


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

    @property
    def where(self) -> str:
        """The measured models in words."""
        data = (DATA.get(name, name) for name in self.data)
        return f"a {self.kind} of {self.depth} blocks on {', '.join(data)}"

    @property
    def helpful(self) -> tuple[Gain, ...]:
        """The rows whose whole interval is above 0."""
        return tuple(gain for gain in self.gains if gain.low > 0)


@cache
def all_measured() -> tuple[Measured, ...]:
    """Return everything that was measured."""
    content = json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return tuple(
        Measured(**entry | {"data": tuple(entry["data"]), "gains": tuple(Gain(**gain) for gain in entry["gains"])})
        for entry in content["measured"]
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
