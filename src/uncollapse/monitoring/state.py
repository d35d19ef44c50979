"""What a monitor knows: one measurement, what carries over to the next, and what it has cost."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.monitoring.layer_curves import Curves
from uncollapse.monitoring.rules import FINITE, Rule


@dataclass(frozen=True)
class Record:
    """One measurement during training.

    seconds: what it cost. curves: measure -> layer -> value. met: sentences of the rules that were met here for the
    first time. stop, save: whether one of them asks for it. error: why there are no numbers; `diagnosis` is then None.
    """

    step: int
    epoch: float | None
    seconds: float
    curves: Curves
    met: tuple[str, ...] = ()
    stop: bool = False
    save: bool = False
    error: str | None = None
    diagnosis: Diagnosis | None = field(default=None, repr=False)  # pages long

    def line(self) -> dict[str, Any]:
        """The record for a line of JSON."""
        facts: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "seconds": round(self.seconds, 4)}
        if self.diagnosis is not None:
            facts |= {"verdict": self.diagnosis.verdict.kind, "onset": self.diagnosis.verdict.onset}
        if self.error is not None:
            facts["error"] = self.error
        return facts | {"curves": self.curves, "met": list(self.met)}


@dataclass(frozen=True)
class Cost:
    """What the measurements have cost: their number, their seconds, and their share of the time since the first step.

    skipped: how many were due and left out because of `max_share`.
    """

    measurements: int
    seconds: float
    share: float
    skipped: int

    def __str__(self) -> str:
        left_out = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.measurements} measurements in {self.seconds:.2f} s, {self.share:.1%} of the time{left_out}"


@dataclass
class State:
    """What carries over from one measurement to the next, also when the training is interrupted and taken up again.

    reference: layer -> measure -> value at the first measurement. streaks: how often in a row each rule has held. met:
    the step at which each rule was met. last: the step of the last measurement. seconds, elapsed: for the cost.
    """

    reference: dict[str, dict[str, float]] = field(default_factory=dict)
    streaks: dict[str, int] = field(default_factory=dict)
    met: dict[str, int] = field(default_factory=dict)
    last: int | None = None
    measured: int = 0
    skipped: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0

    def brief(self, elapsed: float) -> dict[str, Any]:
        """It as plain values, with the time until now, and without the reference, which does not change."""
        return {name: value for name, value in asdict(self).items() if name != "reference"} | {"elapsed": elapsed}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """It from plain values."""
        own: dict[str, Any] = {n: dict(value) if isinstance(value, Mapping) else value for n, value in plain.items()}
        return cls(**own)

    def copy(self) -> Self:
        """Another one that can be changed without changing this."""
        return replace(self, streaks=dict(self.streaks), met=dict(self.met))

    def judged(
        self, rules: Sequence[Rule], found: Diagnosis | None, error: Exception | None, step: int
    ) -> list[tuple[Rule, str]]:
        """The rules that are met at this measurement and were not before, each with a sentence; they are noted here."""
        met = []
        for rule in rules:
            if found is None and rule.measure != FINITE:
                continue  # nothing is known about it
            told = None if error is None else rule.failed(error)
            if found is not None:
                told = rule.met(found.layers, self.reference)
            name = rule.name
            self.streaks[name] = self.streaks.get(name, 0) + 1 if told is not None else 0
            if told is not None and self.streaks[name] >= rule.patience and name not in self.met:
                self.met[name] = step
                met.append((rule, told))
        return met
