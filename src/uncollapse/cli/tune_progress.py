"""How a search goes: a bar for it and one for each running trial, or a line a trial where there is no terminal."""

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from uncollapse.cli.outcomes import duration, shown
from uncollapse.cli.sweep_progress import Bars, Lines

if TYPE_CHECKING:
    from uncollapse.lab.runs.sweep import Sweep


class TrialLines(Lines):
    """A line a trial on stderr."""

    def finished(self, sweep: "Sweep", config: Any) -> None:
        """How many are done, what was tried, and its figure or how far it came."""
        agenda: Any = sweep.agenda
        tried = next(tried for tried in agenda.tried if tried.key == agenda.key(config))
        by = agenda.searched.search.by
        figure = f"{by} {shown(by, [tried.value])}, {duration(tried.seconds)}"
        ends = {"done": figure, "pruned": f"stopped after epoch {tried.steps}", "failed": f"failed: {tried.why}"}
        self.note(f"{agenda.done}/{agenda.total} {agenda.label(config)}: {ends.get(tried.state, 'not done')}")


class TrialBars(TrialLines, Bars):
    """The same above bars."""


def teller() -> Lines:
    """Bars on a terminal, lines elsewhere."""
    console = Console(file=sys.stderr)
    return TrialBars(console, "Trials") if console.is_terminal else TrialLines()
