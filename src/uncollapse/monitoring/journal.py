"""The records and the state of a monitored run, and the folder in which they are stored.

The folder has one line per measurement, the first diagnosis, and that of the collapse. Each line holds the state after
it, so a run can be resumed from its lines alone: lines after the step from which the training resumes are dropped, and
the last remaining one holds the state.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.io import files, typed_json
from uncollapse.monitoring.layer_curves import Curves, layer_values
from uncollapse.monitoring.rules import FINITE, Rule


@dataclass(frozen=True)
class Record:
    """One measurement during training.

    seconds: how long it took. curves: measure -> layer -> value. met: sentences of the rules that were first met here.
    stop, save: whether one of them asks for it. error: why nothing was measured; `diagnosis` is then None.
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
        """Return the record as values for a line of JSON."""
        facts: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "seconds": round(self.seconds, 4)}
        if self.diagnosis is not None:
            facts |= {"verdict": self.diagnosis.verdict.kind, "onset": self.diagnosis.verdict.onset}
        if self.error is not None:
            facts["error"] = self.error
        return facts | {"curves": self.curves, "met": list(self.met)}


@dataclass(frozen=True)
class Cost:
    """What the measurements cost: their number, their seconds, and their share of the time since the first step.

    skipped: how many were due but left out because of `max_share`.
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
    """What carries over from one measurement to the next, also when the training is interrupted and resumed.

    reference: layer -> measure -> value at the first measurement. streaks: how many times in a row each
    rule has held. met: the step at which each rule was met. last: the step of the last measurement. seconds, elapsed:
    for the cost.
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
        """Return plain values, with the time until now, but without the reference, which does not change."""
        return {name: value for name, value in asdict(self).items() if name != "reference"} | {"elapsed": elapsed}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Return the state that plain values describe."""
        own: dict[str, Any] = {n: dict(value) if isinstance(value, Mapping) else value for n, value in plain.items()}
        return cls(**own)

    def copy(self) -> Self:
        """Return a copy that can be changed independently."""
        return replace(self, streaks=dict(self.streaks), met=dict(self.met))

    def apply_rules(
        self, rules: Sequence[Rule], found: Diagnosis | None, error: Exception | None, step: int
    ) -> list[tuple[Rule, str]]:
        """Return the rules that are met for the first time, each with a sentence, and record them."""
        met = []
        for rule in rules:
            if not rule.is_due(step) or (found is None and rule.measure != FINITE):
                continue  # nothing is known about it
            sentence = None if error is None else rule.check_error(error)
            if found is not None:
                sentence = rule.check(found.layers, self.reference)
            name = rule.name
            self.streaks[name] = self.streaks.get(name, 0) + 1 if sentence is not None else 0
            if sentence is not None and self.streaks[name] >= rule.patience and name not in self.met:
                self.met[name] = step
                met.append((rule, sentence))
        return met


LINES, FIRST, COLLAPSE = "monitor.jsonl", "first.json", "collapse.json"


class Journal:
    """The folder of a monitored run; it is created when there is something to write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = folder / LINES

    def read(self) -> list[dict[str, Any]]:
        """Return the lines. A last line that was cut off while it was written is left out with a warning."""
        if not self.lines.exists():
            return []
        found: list[dict[str, Any]] = []
        texts = self.lines.read_bytes().removesuffix(b"\n").split(b"\n")  # a cut may go through a character
        for number, text in enumerate(texts, 1):
            try:
                found.append(_parse_line(text))
            except (ValueError, RecursionError) as error:
                if number < len(texts):
                    raise ValueError(
                        f"{self.lines}, line {number} is not a measurement ({error}); fix or remove it."
                    ) from error
                warnings.warn(f"The last line of {self.lines} was cut off and is dropped.", stacklevel=2)
        return found

    def resume(self, done: int, overwrite: bool) -> State:
        """Return the state of a run that continues after `done` steps. Replace another run only with `overwrite`."""
        lines = self.read()
        earlier = [line for line in lines if line["step"] <= done] if done > 0 else []
        if lines and not earlier and not overwrite:
            raise FileExistsError(
                f"{self.folder} holds a run that was monitored from step {lines[0]['step']} to {lines[-1]['step']}, "
                "and this one starts before that. Give another folder, or overwrite=True to replace it."
            )
        if earlier and len(earlier) < len(lines):  # trained again, or a new run: both look the same
            warnings.warn(
                f"The run in {self.folder} continues after step {done}: its later measurements, up to step "
                f"{lines[-1]['step']}, are dropped. If this is a new run, give it another folder.",
                stacklevel=2,
            )
        reference = layer_values(Diagnosis.load(self.folder / FIRST)) if earlier else {}
        self.restart(earlier)
        return State.of(earlier[-1]["state"] | {"reference": reference}) if earlier else State()

    def resume_from(self, state: State) -> None:
        """Continue from a state that was stored elsewhere: later lines are dropped."""
        last = -1 if state.last is None else state.last
        self.restart([line for line in self.read() if line["step"] <= last])

    def restart(self, lines: list[dict[str, Any]]) -> None:
        """Continue after these lines; without any, remove an earlier run."""
        if not self.lines.exists():
            return  # there was no run, so no file is ours
        if lines:
            files.write(self.lines, "".join(map(_line, lines)))
        else:
            for name in (LINES, FIRST):
                (self.folder / name).unlink(missing_ok=True)
        if not lines or not lines[-1]["state"]["met"]:
            (self.folder / COLLAPSE).unlink(missing_ok=True)  # of a measurement that was dropped

    def append(self, line: dict[str, Any]) -> None:
        """Append a line, completely or not at all: a partial line would spoil the next one."""
        with files.write_errors(self.lines):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.lines.open("ab", buffering=0) as file:
                before, text = file.seek(0, os.SEEK_END), _line(line).encode("utf-8")
                try:
                    while text:
                        text = text[file.write(text) :]
                except OSError:
                    file.truncate(before)
                    raise

    def save(self, name: str, diagnosis: Diagnosis, facts: dict[str, Any]) -> None:
        """Write a diagnosis with facts about the run in its settings; the file is never half written."""
        replace(diagnosis, settings={**diagnosis.settings, "monitor": facts}).save(self.folder / name)


def _parse_line(text: bytes) -> dict[str, Any]:
    """Return the measurement of a line. ValueError if it is not one: a torn line may still be JSON."""
    record = typed_json.parse(text.decode("utf-8"))
    if not isinstance(record, dict) or type(record.get("step")) is not int or "state" not in record:
        raise ValueError("it has no step, or no state")
    typed_json.build(State, record["state"], "its state")
    return record


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
