"""How a sweep goes: a bar for it and one for each of its running runs, or a line a run where there is no terminal."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from uncollapse.cli import output
from uncollapse.cli.outcomes import SHARES, duration, shown

if TYPE_CHECKING:
    from uncollapse.lab.runs.sweep import Sweep


class Lines:
    """A line a finished run on stderr."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left to do."""

    def changed(self, sweep: "Sweep") -> None:
        """Steps are not told."""

    def finished(self, sweep: "Sweep", config: Any) -> None:
        """The number of the run, its name, figures and time."""
        agenda = sweep.agenda
        record = agenda.records[agenda.key(config)]
        figures = record["figures"]
        words = [f"{name} {shown(name, [figures[name]])}" for name in SHARES if name in figures]
        words += [duration(record["seconds"])] if "seconds" in record else []
        self.note(f"{agenda.done}/{agenda.total} {agenda.label(config)}: {', '.join(words)}")

    def note(self, words: str) -> None:
        """A line."""
        output.note(words)


class Bars(Lines):
    """Bars on a terminal's stderr, which leave no trace; what is worth a line stands above them."""

    def __init__(self, console: Console, words: str = "Runs") -> None:
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[beside]}", style="dim", markup=False),
            console=console,
            transient=True,
        )
        self._all = self._bar.add_task(words, total=None, beside="")
        self._tasks: dict[Any, TaskID] = {}  # by configuration

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bars away."""
        self._bar.stop()

    def changed(self, sweep: "Sweep") -> None:
        """Move the bars."""
        agenda = sweep.agenda
        left = f"about {duration(sweep.seconds_left())} left" if agenda.done < agenda.total else ""
        beside = ", ".join([left] + [f"{len(agenda.failed)} failed"] * bool(agenda.failed))
        self._bar.update(self._all, completed=agenda.done, total=agenda.total, beside=beside)
        for config in [config for config in self._tasks if config not in sweep.running.values()]:
            self._bar.remove_task(self._tasks.pop(config))
        for worker, config in sweep.running.items():
            if config not in self._tasks:
                name = f"  {agenda.label(config)}"
                self._tasks[config] = self._bar.add_task(name, total=None, beside="starting")
            done, total = worker.steps
            if total:
                self._bar.update(self._tasks[config], completed=done, total=total, beside="")

    def note(self, words: str) -> None:
        """A line above the bars."""
        self._bar.console.print(words, markup=False, highlight=False, soft_wrap=True)


def teller() -> Lines:
    """Bars on a terminal, lines elsewhere."""
    console = Console(file=sys.stderr)
    return Bars(console) if console.is_terminal else Lines()
