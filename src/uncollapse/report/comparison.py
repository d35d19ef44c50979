"""Compare diagnoses with the first of them: in a notebook, a terminal, a page or a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uncollapse.diagnosis.measures import MEASURES
from uncollapse.diagnosis.result import Diagnosis, Layer
from uncollapse.io import display
from uncollapse.report import page, plots, words
from uncollapse.report.tracks import diagnosis_names, main_layers

SHOWN = ("mean_cosine", "robust_cosine", "effective_rank", "rank_share", "dataset_rank_share")


@dataclass(frozen=True, repr=False)
class Comparison:
    """Diagnoses next to each other; the first is the reference. It shows itself in a notebook."""

    diagnoses: tuple[Diagnosis, ...]

    @property
    def names(self) -> list[str]:
        """The names of the models, each different."""
        return diagnosis_names(self.diagnoses)

    @property
    def differences(self) -> dict[str, list[str]]:
        """What distinguishes each of the others from the first, in sentences."""
        first, *others = self.diagnoses
        return {name: words.difference(first, d) for name, d in zip(self.names[1:], others, strict=True)}

    def grid(self) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of a table: the verdicts, and the main measures at the last blocks."""
        lasts = [last_block(d) for d in self.diagnoses]
        shown = [name for name in SHOWN if any(name in last.measures for last in lasts)]
        head = ["model", "verdict", "from", "last block", *(MEASURES[name].short for name in shown)]
        rows = [
            [name, d.verdict.kind, d.verdict.onset or "–", last.name]
            + [display.format_value(last[m]) if m in last.measures else "–" for m in shown]
            for name, d, last in zip(self.names, self.diagnoses, lasts, strict=True)
        ]
        return head, rows

    def report(self, path: str | Path = "comparison.html") -> Path:
        """Write an HTML report of all of them; needs the extra `report`."""
        return page.write(self.diagnoses, path)

    def plot(self, measure: str = "effective_rank", path: str | Path | None = None) -> Any:
        """Draw a measure of all of them by layer, see `Diagnosis.plot`."""
        return plots.plot(self.diagnoses, measure, path)

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.names)}>"

    def __str__(self) -> str:
        return "\n".join(
            line for name, lines in self.differences.items() for line in (f"{self.names[0]} → {name}", *lines)
        )

    def _repr_html_(self) -> str:
        lines = ((f"{self.names[0]} → {name}", *found) for name, found in self.differences.items())
        return display.html_table(*self.grid()) + "".join(map(display.html_lines, lines))


def compare(diagnoses: Sequence[Diagnosis]) -> Comparison:
    """Return the comparison of diagnoses with the first one."""
    if len(diagnoses) < 2:
        raise ValueError(f"A comparison needs at least two diagnoses, got {len(diagnoses)}.")
    return Comparison(tuple(diagnoses))


def last_block(diagnosis: Diagnosis) -> Layer:
    """Return the residual stream after the last block."""
    blocks = main_layers(diagnosis)
    return next((layer for layer in reversed(blocks) if layer.name != "final"), blocks[-1])
