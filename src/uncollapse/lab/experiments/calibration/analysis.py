"""Hit rates of a rule that says from the geometry whether acting helps: counted, and on encoders it was not fitted to.

A case is one layer of one encoder on one task. Acting (removing the top directions) helps if the interval of its gain
is above 0, hurts if it is below 0, and makes no clear difference otherwise; such cases count for no rule.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uncollapse.embeddings.choice import Geometry, advise

Rule = Callable[[Geometry], bool]  # whether to act
QUANTILE = 1.959963984540054  # of the normal distribution, for 95 %


@dataclass(frozen=True)
class Case:
    """A layer of an encoder on a task: its geometry, and the gain of acting with its interval, as a share."""

    encoder: str
    task: str
    layer: int
    geometry: Geometry
    gain: float
    low: float
    high: float

    @property
    def helps(self) -> bool | None:
        """Return whether acting helps; None if the interval contains 0."""
        return True if self.low > 0 else False if self.high < 0 else None


@dataclass(frozen=True)
class Rate:
    """How often a rule was right, with Wilson's 95 % interval. alarms: acted where it hurt. misses: left what helps."""

    right: int
    cases: int
    alarms: int
    misses: int

    @property
    def interval(self) -> tuple[float, float]:
        """Return Wilson's interval of the share of right decisions.

        >>> [round(end, 3) for end in Rate(6, 6, 0, 0).interval]
        [0.61, 1.0]
        """
        n, z = self.cases, QUANTILE
        if n == 0:
            return 0.0, 1.0
        share, room = self.right / n, z * z / n
        middle = (share + room / 2) / (1 + room)
        half = z / (1 + room) * math.sqrt(share * (1 - share) / n + room / (4 * n))
        return max(0.0, middle - half), min(1.0, middle + half)


def cases(records: Iterable[Mapping[str, Any]]) -> list[Case]:
    """Return the cases of stored runs."""
    found = []
    for record in records:
        config = record["config"]
        encoder = f"{config['model']}{', random' if config['random'] else ''}, {config['pooling']}"
        for layer in record["layers"]:
            geometry, gain = Geometry(**layer["geometry"]), layer["gain"]
            ends = (gain["value"], gain["low"], gain["high"])
            found.append(Case(encoder, config["task"], layer["layer"], geometry, *ends))
    return found


def evaluate(rule: Rule, found: Iterable[Case]) -> Rate:
    """Count how often a rule is right where acting clearly helps or hurts."""
    clear = [(rule(case.geometry), case.helps) for case in found if case.helps is not None]
    alarms = sum(acts and not helps for acts, helps in clear)
    misses = sum(helps and not acts for acts, helps in clear)
    return Rate(len(clear) - alarms - misses, len(clear), alarms, misses)


def act_from(bound: float) -> Rule:
    """Return the rule that acts from this mean cosine on."""
    return lambda geometry: geometry.mean_cosine >= bound


def fit_bound(found: Sequence[Case]) -> float:
    """Return the mean cosine from which acting is right most often; of equals, the largest."""
    bounds = sorted({0.0, 1.1, *(case.geometry.mean_cosine for case in found)})
    return max(bounds, key=lambda bound: (evaluate(act_from(bound), found).right, bound))


def leave_one_out(found: Sequence[Case], by: Callable[[Case], str]) -> Rate:
    """Return the rate of a bound that is fitted without the encoder, or the task, that it then decides about."""
    parts = []
    for name in dict.fromkeys(map(by, found)):
        others, own = [case for case in found if by(case) != name], [case for case in found if by(case) == name]
        if others:
            parts.append(evaluate(act_from(fit_bound(others)), own))
    totals = (sum(getattr(part, name) for part in parts) for name in ("right", "cases", "alarms", "misses"))
    return Rate(*totals)


def hit_rates(found: Sequence[Case]) -> dict[str, Rate]:
    """Return the rates of the shipped rule, of the trivial rules, and of fitted bounds on what was left out."""
    return {
        "auto, as shipped": evaluate(lambda geometry: advise(geometry).method != "none", found),
        "always act": evaluate(lambda geometry: True, found),
        "never act": evaluate(lambda geometry: False, found),
        "fitted, one encoder left out": leave_one_out(found, lambda case: case.encoder),
        "fitted, one task left out": leave_one_out(found, lambda case: case.task),
    }
