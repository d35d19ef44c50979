"""The folder of a monitored run: a line a measurement, the first diagnosis, and that of the collapse.

Each line carries the state after it. So a run is taken up from its lines alone: those later than where the training
takes up are dropped, and the last one left says the rest.
"""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.io import files, typed_json
from uncollapse.monitoring.layer_curves import values
from uncollapse.monitoring.state import State

LINES, FIRST, COLLAPSE = "monitor.jsonl", "first.json", "collapse.json"


class Journal:
    """What is in the folder of a run. Nothing is made before there is something to write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines = folder / LINES

    def read(self) -> list[dict[str, Any]]:
        """The lines. A last one that was cut off while it was written is left out with a warning."""
        if not self.lines.exists():
            return []
        found: list[dict[str, Any]] = []
        texts = self.lines.read_bytes().removesuffix(b"\n").split(b"\n")  # a cut may go through a character
        for number, text in enumerate(texts, 1):
            try:
                found.append(_record(text))
            except (ValueError, RecursionError) as error:
                if number < len(texts):
                    raise ValueError(
                        f"{self.lines}, line {number} is no measurement ({error}); mend or remove it."
                    ) from error
                warnings.warn(f"The last line of {self.lines} was cut off and is dropped.", stacklevel=2)
        return found

    def take_up(self, done: int, overwrite: bool) -> State:
        """The state of a run that goes on after `done` steps. A run of the folder is not replaced unless told to."""
        lines = self.read()
        kept = [line for line in lines if line["step"] <= done] if done > 0 else []
        if lines and not kept and not overwrite:
            raise FileExistsError(
                f"{self.folder} holds a run that was monitored from step {lines[0]['step']} to {lines[-1]['step']}, "
                "and this one starts before that. Give another folder, or overwrite=True to replace it."
            )
        if kept and len(kept) < len(lines):  # what is trained again; or a new run, which cannot be told from it
            warnings.warn(
                f"The run in {self.folder} goes on after step {done}: its later measurements, up to step "
                f"{lines[-1]['step']}, are dropped. If this is a new run, give it another folder.",
                stacklevel=2,
            )
        reference = values(Diagnosis.load(self.folder / FIRST)) if kept else {}
        self.restart(kept)
        return State.of(kept[-1]["state"] | {"reference": reference}) if kept else State()

    def go_on(self, state: State) -> None:
        """Go on from a state that was kept elsewhere: later lines are dropped."""
        last = -1 if state.last is None else state.last
        self.restart([line for line in self.read() if line["step"] <= last])

    def restart(self, lines: list[dict[str, Any]]) -> None:
        """Go on after these lines; with none of them nothing of an earlier run is left."""
        if not self.lines.exists():
            return  # no run was here, so no file is ours
        if lines:
            files.write(self.lines, "".join(map(_line, lines)))
        else:
            for name in (LINES, FIRST):
                (self.folder / name).unlink(missing_ok=True)
        if not lines or not lines[-1]["state"]["met"]:
            (self.folder / COLLAPSE).unlink(missing_ok=True)  # of a measurement that was dropped

    def append(self, line: dict[str, Any]) -> None:
        """Write a line; it is in the file when this returns, or nothing of it: a part would spoil the next one."""
        with files.telling(self.lines):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.lines.open("ab", buffering=0) as file:
                before, text = file.seek(0, os.SEEK_END), _line(line).encode("utf-8")
                try:
                    while text:
                        text = text[file.write(text) :]
                except OSError:
                    file.truncate(before)
                    raise

    def keep(self, name: str, diagnosis: Diagnosis, facts: dict[str, Any]) -> None:
        """Write a diagnosis with facts of the run among its settings; never half a file."""
        replace(diagnosis, settings={**diagnosis.settings, "monitor": facts}).save(self.folder / name)


def _record(text: bytes) -> dict[str, Any]:
    """What a line says. ValueError if that is no measurement: a torn one may still be JSON."""
    record = typed_json.parsed(text.decode("utf-8"))
    if not isinstance(record, dict) or type(record.get("step")) is not int or "state" not in record:
        raise ValueError("it has no step, or no state")
    typed_json.read(State, record["state"], "its state")
    return record


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
