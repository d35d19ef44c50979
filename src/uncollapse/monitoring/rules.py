"""Decide when a measurement during training is a collapse, and what happens then."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Layer
from uncollapse.errors import NotFiniteError, did_you_mean

FINITE = "finite"  # not a measure: met when a layer has NaN or infinite values
ACTIONS = ("warn", "stop", "save")
ENDS = ("embed", "final")  # layers that are not blocks
EARLY_SHARE, EARLY_COSINE = 0.25, 0.9999  # bounds of an early alarm, chosen by `experiments.early_alarm`
WINDOW = 25, 20  # an early alarm is given from a 25th to a 20th of the steps


@dataclass(frozen=True)
class Rule:
    """A condition on a metric of a layer that counts as a collapse, and what to do then.

    Args:
        measure: a name of `diagnosis.measures.MEASURES`; or "finite", met when a layer has NaN or infinite values,
            which takes no layer and no limit.
        layer: the number of a block (-1 is the last), a name ("block 9", "embed", "final"), "last" for the last block,
            "last hidden" for the last block that does not narrow to outputs, as graph networks do, or "any" for each
            layer at the place.
        above, below: met when the value is beyond this number. Give exactly one of the four limits.
        falls_by, rises_by: met when the value has changed by this share of its first measurement, 0.5 is half. For a
            negative value the share of its magnitude counts.
        place: where in the block, one of the monitor's `at`.
        then: "warn", "stop" (the training ends) or "save" (a checkpoint is written). All three warn.
        patience: for how many measurements in a row it must hold.
        steps: the first and the last step at which it is checked; at all if not given.

    >>> print(Rule("effective_rank", 9, falls_by=0.5, then="stop"))
    effective_rank of block 9 falls by half
    >>> print(Rule("uniformity", above=-1.5))
    uniformity of the last block is above -1.5
    """

    measure: str
    layer: int | str = "last"
    _: KW_ONLY
    above: float | None = None
    below: float | None = None
    falls_by: float | None = None
    rises_by: float | None = None
    place: str = OUTPUT
    then: Literal["warn", "stop", "save"] = "warn"
    patience: int = 1
    steps: tuple[int, int] | None = None

    @classmethod
    def early(cls, steps: int, *, then: Literal["warn", "stop", "save"] = "stop") -> "tuple[Rule, ...]":
        """Return rules that give an alarm, at a 25th to a 20th of a training, if it is likely to fail.

        Met when the last hidden block spans less than a quarter of the available dimensions, or when its tokens are
        alike, with a mean cosine above 0.9999. It must be measured in that window, see `Monitor.early`. The bounds were
        chosen on one half of short trainings of GCNs, vision transformers and BERTs and evaluated on the other half:
        alarms were almost never false, and about half of the failing runs were missed. docs/monitor.md has the numbers.

        Args:
            steps: of the whole training.
            then: what happens.

        >>> [str(rule) for rule in Rule.early(1000)][0]
        'rank_share of the last hidden block is below 0.25, from step 40 to 50'
        """
        if steps < WINDOW[1]:
            raise ValueError(f"steps must be those of the whole training, at least {WINDOW[1]}, got {steps}.")
        window = max(1, steps // WINDOW[0]), max(1, steps // WINDOW[1])
        return (
            cls("rank_share", "last hidden", below=EARLY_SHARE, then=then, steps=window),
            cls("robust_cosine", "last hidden", above=EARLY_COSINE, then=then, steps=window),
        )

    def __post_init__(self) -> None:
        if self.measure not in (*MEASURES, FINITE):
            hint = did_you_mean(self.measure, (*MEASURES, FINITE))
            raise ValueError(f"No measure is named {self.measure!r}.{hint} There are: {', '.join(MEASURES)}, {FINITE}.")
        if self.then not in ACTIONS:
            raise ValueError(
                f"then must be one of {', '.join(ACTIONS)}, got {self.then!r}.{did_you_mean(self.then, ACTIONS)}"
            )
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}.")
        if self.steps is not None and not 0 <= self.steps[0] <= self.steps[1]:
            raise ValueError(f"steps must be the first and the last step of a window, got {self.steps}.")
        if self.measure == FINITE:
            if self.limits or self.layer != "last" or self.place != OUTPUT:
                raise ValueError('Rule("finite") covers all layers: it takes no layer, no place and no limit.')
            return
        if len(self.limits) != 1:
            given = ", ".join(self.limits) or "none"
            raise ValueError(f"A rule has exactly one of above, below, falls_by and rises_by, got {given}.")
        self._check_limit()

    @property
    def name(self) -> str:
        """The rule and what happens then; a monitor identifies it by this name."""
        return f"{self}, then {self.then}"

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are given."""
        named = {"above": self.above, "below": self.below, "falls_by": self.falls_by, "rises_by": self.rises_by}
        return {name: value for name, value in named.items() if value is not None}

    def _check_limit(self) -> None:
        """Raise ValueError for a limit that no value can cross."""
        (name, value), (least, most) = next(iter(self.limits.items())), MEASURES[self.measure].bounds
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value}.")
        if name in ("falls_by", "rises_by") and value <= 0:
            raise ValueError(f"{name} is a share of the first value and must be positive, got {value}.")
        beyond = (name == "above" and most is not None and value >= most) or (
            name == "below" and least is not None and value <= least
        )
        if beyond or (name == "falls_by" and least is not None and least >= 0 and value > 1):
            span = f"lies between {_bound(least)} and {_bound(most)}"
            raise ValueError(f"{self.measure} {span}: {name}={value} can never be met.")

    def __str__(self) -> str:
        if self.measure == FINITE:
            return "a layer holds NaN or infinite numbers"
        words = {"last": "the last block", "last hidden": "the last hidden block", "any": "any layer"}
        where = words.get(str(self.layer), str(self.layer))
        where = f"block {self.layer}" if isinstance(self.layer, int) else where
        where = where if self.place == OUTPUT else f"{where} {self.place}"
        name, value = next(iter(self.limits.items()))
        share = "half" if value == 0.5 else f"{100 * value:g}%"
        how = f"{name.replace('_', ' ')} {share}" if name.endswith("_by") else f"is {name} {value:g}"
        often = "" if self.patience == 1 else f", {self.patience} times in a row"
        window = "" if self.steps is None else f", from step {self.steps[0]} to {self.steps[1]}"
        return f"{self.measure} of {where} {how}{often}{window}"

    def is_due(self, step: int) -> bool:
        """Return whether the rule is checked at a step."""
        return self.steps is None or self.steps[0] <= step <= self.steps[1]

    def select(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return the layers that the rule applies to. ValueError, with what exists, if there are none."""
        if self.measure == FINITE:
            return []
        here = [layer for layer in layers if layer.place == self.place]
        if not here:
            places = ", ".join(dict.fromkeys(layer.place for layer in layers))
            raise ValueError(f"{self!r}: nothing was measured at {self.place!r}, only at: {places}. Pass at=(…).")
        found = [layer for layer in self._select_among(here) if self.measure in layer.measures]
        if not found:
            taken = ", ".join(dict.fromkeys(name for layer in self._select_among(here) for name in layer.measures))
            raise ValueError(f"{self!r}: this measure was not taken there. There are: {taken}.")
        return found

    def _select_among(self, here: list[Layer]) -> list[Layer]:
        if self.layer == "any":
            return here
        blocks = [layer for layer in here if layer.name not in ENDS] or here
        if self.layer == "last":
            return blocks[-1:]
        if self.layer == "last hidden":
            narrows = len(blocks) > 3 and blocks[-1].dim < blocks[-2].dim
            return blocks[-2:-1] if narrows else blocks[-1:]
        name = f"block {self.layer}" if isinstance(self.layer, int) else self.layer
        named = [layer for layer in here if layer.name == name]
        if named:
            return named
        numbered = any(layer.name.startswith("block ") for layer in blocks)  # one that is not there was not measured
        if isinstance(self.layer, int) and -len(blocks) <= self.layer < (0 if numbered else len(blocks)):
            return [blocks[self.layer]]  # from the end, or among layers with other names
        names = ", ".join(layer.name for layer in here)
        hint = did_you_mean(name, (layer.name for layer in here)) if isinstance(self.layer, str) else ""
        raise ValueError(f"{self!r}: there is no such layer.{hint} There are: {names}; blocks count from 0.")

    def check(self, layers: Sequence[Layer], reference: Mapping[str, Mapping[str, float]]) -> str | None:
        """Return what happened, as a sentence, if the rule holds for these layers. reference: the first values."""
        for layer in self.select(layers):
            first = reference.get(layer.label, {}).get(self.measure, math.nan)
            sentence = self._describe(layer.label, layer[self.measure], first)
            if sentence is not None:
                return sentence
        return None

    def check_error(self, error: BaseException) -> str | None:
        """Return a sentence if a measurement failed because of NaN or infinite values and the rule is about them."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, NotFiniteError):
            cause = cause.__cause__  # the error that names the layer is raised from the one about the values
        return None if cause is None or self.measure != FINITE else f"{self} ({type(error).__name__}: {error})"

    def _describe(self, where: str, value: float, first: float) -> str | None:
        what = f"{self.measure} of {where}"
        if self.above is not None:
            return f"{what} is above {self.above:g}: {value:.4g}" if value > self.above else None
        if self.below is not None:
            return f"{what} is below {self.below:g}: {value:.4g}" if value < self.below else None
        share = (self.falls_by or self.rises_by or 0.0) * abs(first)
        change = first - value if self.falls_by is not None else value - first
        if not (change > 0 and change >= share):  # NaN, if the measure was not taken at first, is not a change
            return None
        by = f" by {change / abs(first):.0%}" if first else ""
        return f"{what} {'fell' if self.falls_by is not None else 'rose'}{by}: {first:.4g} → {value:.4g}"


def check_rules(rules: Sequence[Rule]) -> None:
    """Raise ValueError if something is not a rule, or a rule is given twice."""
    wrong = next((rule for rule in rules if not isinstance(rule, Rule)), None)
    if wrong is not None:
        raise ValueError(f"rules must be a list of uc.Rule, got {type(wrong).__name__} in it.")
    names = [rule.name for rule in rules]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"A rule is given twice: {twice[0]}. Leave one out.")


def _bound(value: float | None) -> str:
    return "any number" if value is None else f"{value:g}"
