"""Hit rates of a rule that says from the geometry whether acting helps: counted, and on encoders it was not fitted to.

A case is one layer of one encoder on one task. Acting (removing the top directions) helps if the interval of its gain
is above 0, hurts if it is below 0, and makes no clear difference otherwise; such cases count for no rule.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from uncollapse.embeddings.geometry import Geometry, advise

QUANTILE = 1.959963984540054  # of the normal distribution, for 95 %


class Outcome(Protocol):
    """Anything that shows whether acting helped."""

    @property
    def helps(self) -> bool | None:
        """Return whether acting helps; None without a clear difference."""


Known = TypeVar("Known", bound=Outcome)
Rule = Callable[[Known], bool]  # whether to act


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
    def model(self) -> str:
        """Return the encoder without its pooling: what is left out as one, as are its random weights."""
        return self.encoder.split(",")[0]

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


def evaluate(acts: Rule[Known], found: Iterable[Known]) -> Rate:
    """Count how often a rule is right where acting clearly helps or hurts."""
    clear = [(acts(case), case.helps) for case in found if case.helps is not None]
    alarms = sum(act and not helps for act, helps in clear)
    misses = sum(bool(helps) and not act for act, helps in clear)
    return Rate(len(clear) - alarms - misses, len(clear), alarms, misses)


def leave_one_out(
    found: Sequence[Known], by: Callable[[Known], str], fit: Callable[[Sequence[Known]], Rule[Known]]
) -> Rate:
    """Return the rate of a rule that is fitted without the group, such as the encoder, that it then decides about."""
    parts = []
    for name in dict.fromkeys(map(by, found)):
        others, own = [case for case in found if by(case) != name], [case for case in found if by(case) == name]
        if others:
            parts.append(evaluate(fit(others), own))
    totals = (sum(getattr(part, name) for part in parts) for name in ("right", "cases", "alarms", "misses"))
    return Rate(*totals)


def act_from(bound: float) -> Rule[Case]:
    """Return the rule that acts from this mean cosine on."""
    return lambda case: case.geometry.mean_cosine >= bound


def fit_bound(found: Sequence[Case]) -> float:
    """Return the mean cosine from which acting is right most often; of equals, the largest."""
    bounds = sorted({0.0, 1.1, *(case.geometry.mean_cosine for case in found)})
    return max(bounds, key=lambda bound: (evaluate(act_from(bound), found).right, bound))


def fit_rule(found: Sequence[Case]) -> Rule[Case]:
    """Return the rule with the fitted bound."""
    return act_from(fit_bound(found))


def hit_rates(found: Sequence[Case]) -> dict[str, Rate]:
    """Return the rates of the shipped rule, of the trivial rules, and of fitted bounds on what was left out."""
    return {
        "auto, as shipped": evaluate(lambda case: advise(case.geometry).method != "none", found),
        "always act": evaluate(lambda case: True, found),
        "never act": evaluate(lambda case: False, found),
        "fitted, one encoder left out": leave_one_out(found, lambda case: case.model, fit_rule),
        "fitted, one task left out": leave_one_out(found, lambda case: case.task, fit_rule),
    }
