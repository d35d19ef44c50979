"""A progress bar for what takes longer than a second."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from uncollapse import distributed
from uncollapse.cli import console as output
from uncollapse.cli.outcomes import ACCURACIES, format_duration, format_metric, format_rate

if TYPE_CHECKING:
    from uncollapse.lab.runs.sweep import Sweep

T = TypeVar("T")

PATIENCE = 1.0  # seconds without a bar
WINDOW = 600.0  # seconds whose steps tell the time that is left: a step of a large model may take a minute


class ProgressBar:
    """A bar on a terminal's stderr, which comes after a second and leaves no trace."""

    def __init__(self) -> None:
        console = Console(file=sys.stderr)  # also while a library's chatter is turned away from stderr
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),  # on a narrow terminal it is what gives way
            TaskProgressColumn(table_column=Column(min_width=4, no_wrap=True)),
            TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
            TextColumn("{task.fields[beside]}", markup=False, style="dim"),
            console=console,
            transient=True,
            redirect_stdout=False,  # it would restore what it finds when it starts, from a thread of its own
            redirect_stderr=False,
            speed_estimate_period=WINDOW,
        )
        self._task = self._bar.add_task("", total=None, beside="")
        self._silent = not distributed.is_launch_rank_zero()  # the first of several processes tells
        self._lock, self._over = threading.Lock(), self._silent or not console.is_terminal
        self._timer = threading.Timer(PATIENCE, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._bar.live.is_started:
                self._bar.stop()

    def stage(self, words: str, total: int | None = None) -> Callable[[int], None]:
        """What is being done now, in how many steps if that is known; call the answer with the steps done."""
        self._bar.remove_task(self._task)  # a task that once had a number of steps cannot be without one again
        self._task = self._bar.add_task(words, total=total, beside="")

        def done(steps: int) -> None:
            self._bar.update(self._task, completed=steps)

        return done

    def training(self, words: str) -> Callable[[int, int, Mapping[str, float]], None]:
        """The same for a training: call the answer with the steps done, the steps in all and the newest figures."""
        begun = False
        self.stage(words)

        def done(steps: int, total: int, figures: Mapping[str, float]) -> None:
            nonlocal begun
            if not begun:  # the first steps may be those of an earlier run, which say nothing of the time that is left
                self._bar.reset(self._task, total=total, completed=steps, description=words)
            begun = True
            self._bar.update(self._task, completed=steps, total=total, beside=_format_metrics(figures))

        return done

    def within(self, words: str) -> Callable[[str], None]:
        """For what comes before and after the steps of a training: call the answer with what is done."""

        def tell(doing: str) -> None:
            self.stage(f"{words}: {doing}")

        return tell

    def note(self, words: str) -> None:
        """A line on stderr, above the bar."""
        if not self._silent:
            self._bar.console.print(words, markup=False, highlight=False, soft_wrap=True)

    def _show(self) -> None:
        with self._lock:
            if not self._over:
                self._bar.start()


def count_steps(items: Iterable[T], done: Callable[[int], None]) -> Iterator[T]:
    """Yield the items, and report how many are done after each to what `ProgressBar.stage` returned."""
    for number, item in enumerate(items, 1):
        yield item
        done(number)


def _format_metrics(figures: Mapping[str, float]) -> str:
    """The epoch, the loss, the validation figure and speeds such as images/s, as far as there are any."""
    shown = {"epoch": "d", "loss": ".3g", "validation": ".3f"}
    words = [f"{name} {figures[name]:{form}}" for name, form in shown.items() if name in figures]
    return "  ".join(words + [f"{format_rate(value)} {name}" for name, value in figures.items() if name.endswith("/s")])


class SweepLines:
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
        words = [f"{name} {format_metric(name, [figures[name]])}" for name in ACCURACIES if name in figures]
        words += [format_duration(record["seconds"])] if "seconds" in record else []
        self.note(f"{agenda.done}/{agenda.total} {agenda.label(config)}: {', '.join(words)}")

    def note(self, words: str) -> None:
        """A line."""
        output.print_note(words)


class SweepBars(SweepLines):
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
        left = f"about {format_duration(sweep.seconds_left())} left" if agenda.done < agenda.total else ""
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


def sweep_progress() -> SweepLines:
    """Bars on a terminal, lines elsewhere."""
    console = Console(file=sys.stderr)
    return SweepBars(console) if console.is_terminal else SweepLines()


class TrialLines(SweepLines):
    """A line a trial on stderr."""

    def finished(self, sweep: "Sweep", config: Any) -> None:
        """How many are done, what was tried, and its figure or how far it came."""
        agenda: Any = sweep.agenda
        tried = next(tried for tried in agenda.tried if tried.key == agenda.key(config))
        by = agenda.searched.search.by
        figure = f"{by} {format_metric(by, [tried.value])}, {format_duration(tried.seconds)}"
        ends = {"done": figure, "pruned": f"stopped after epoch {tried.steps}", "failed": f"failed: {tried.why}"}
        self.note(f"{agenda.done}/{agenda.total} {agenda.label(config)}: {ends.get(tried.state, 'not done')}")


class TrialBars(TrialLines, SweepBars):
    """The same above bars."""


def tune_progress() -> SweepLines:
    """Bars on a terminal, lines elsewhere."""
    console = Console(file=sys.stderr)
    return TrialBars(console, "Trials") if console.is_terminal else TrialLines()
