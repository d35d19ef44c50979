"""Progress of a measurement, a training, a sweep and a search: bars on a terminal, lines elsewhere."""

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
from uncollapse.cli.console import escape_controls, print_note, wrap_lines
from uncollapse.cli.run_tables import ACCURACIES, format_duration, format_metric, format_rate

if TYPE_CHECKING:
    from uncollapse.lab.runs.sweep import Sweep

T = TypeVar("T")

PATIENCE = 1.0  # seconds before a bar appears
WINDOW = 600.0  # seconds that the remaining time is estimated from: a step of a large model may take a minute


class ProgressBar:
    """A bar on a terminal's stderr. It appears after a second and is erased at the end."""

    def __init__(self) -> None:
        console = Console(file=sys.stderr)  # kept while `silence_libraries` redirects stderr
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),  # shrinks first on a narrow terminal
            TaskProgressColumn(table_column=Column(min_width=4, no_wrap=True)),
            TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
            TextColumn("{task.fields[details]}", markup=False, style="dim"),
            console=console,
            transient=True,
            redirect_stdout=False,  # rich would later restore the stream of another thread
            redirect_stderr=False,
            speed_estimate_period=WINDOW,
        )
        self._task = self._bar.add_task("", total=None, details="")
        self._silent = not distributed.is_launch_rank_zero()  # only the first of several processes prints
        self._lock, self._over = threading.Lock(), self._silent or not console.is_terminal
        self._timer = threading.Timer(PATIENCE, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Erase the bar; what is printed from now on stands where it was."""
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._bar.live.is_started:
                self._bar.stop()

    def stage(self, words: str, total: int | None = None) -> Callable[[int], None]:
        """Start a stage and return a function to call with the number of steps done. total: steps, None if unknown."""
        self._bar.remove_task(self._task)  # rich cannot reset the total of a task to None
        self._task = self._bar.add_task(words, total=total, details="")

        def done(steps: int) -> None:
            self._bar.update(self._task, completed=steps)

        return done

    def start_training(self, words: str) -> Callable[[int, int, Mapping[str, float]], None]:
        """Start a training stage; call the returned function with the steps done, all steps and the newest metrics."""
        begun = False
        self.stage(words)

        def done(steps: int, total: int, metrics: Mapping[str, float]) -> None:
            nonlocal begun
            if not begun:  # steps of an earlier run must not count for the remaining time
                self._bar.reset(self._task, total=total, completed=steps, description=words)
            begun = True
            self._bar.update(self._task, completed=steps, total=total, details=_format_metrics(metrics))

        return done

    def substage(self, words: str) -> Callable[[str], None]:
        """Return a function that starts a stage before or after the steps of a training."""

        def start(name: str) -> None:
            self.stage(f"{words}: {name}")

        return start

    def note(self, words: str) -> None:
        """Print a line on stderr, above the bar."""
        if not self._silent:
            _print_above(self._bar, words)

    def _show(self) -> None:
        with self._lock:
            if not self._over:
                self._bar.start()


def _print_above(bar: Progress, words: str) -> None:
    """Print a sentence above a bar; it is wrapped between words on a terminal."""
    said = escape_controls(words)
    lines = wrap_lines(said) if bar.console.is_terminal else said
    bar.console.print(lines, markup=False, highlight=False, soft_wrap=True)


def count_steps(items: Iterable[T], done: Callable[[int], None]) -> Iterator[T]:
    """Yield the items, and report how many are done after each to what `ProgressBar.stage` returned."""
    for number, item in enumerate(items, 1):
        yield item
        done(number)


def _format_metrics(metrics: Mapping[str, float]) -> str:
    """Return the epoch, the loss, the validation metric and rates such as images/s, where they are known."""
    formats = {"epoch": "d", "loss": ".3g", "validation": ".3f"}
    words = [f"{name} {metrics[name]:{form}}" for name, form in formats.items() if name in metrics]
    return "  ".join(words + [f"{format_rate(value)} {name}" for name, value in metrics.items() if name.endswith("/s")])


class SweepLines:
    """One line on stderr per finished run."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the printed lines as they are."""

    def handle_change(self, sweep: "Sweep") -> None:
        """Print nothing while a run goes on."""

    def handle_end(self, sweep: "Sweep", config: Any) -> None:
        """Print the number of the run, its name, metrics and time."""
        queue = sweep.queue
        record = queue.records[queue.key(config)]
        figures = record["figures"]
        words = [f"{name} {format_metric(name, [figures[name]])}" for name in ACCURACIES if name in figures]
        words += [format_duration(record["seconds"])] if "seconds" in record else []
        self.note(f"{queue.done}/{queue.total} {queue.label(config)}: {', '.join(words)}")

    def note(self, words: str) -> None:
        """Print a line on stderr."""
        print_note(words)


class SweepBars(SweepLines):
    """One bar for the sweep and one per running experiment, on a terminal's stderr; finished runs are printed above."""

    def __init__(self, console: Console, words: str = "Runs") -> None:
        names = Column(no_wrap=True, max_width=max(8, console.width - 46))  # counts and times need the rest
        self._bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=names),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[details]}", style="dim", markup=False),
            console=console,
            transient=True,
        )
        self._all = self._bar.add_task(words, total=None, details="")
        self._tasks: dict[Any, TaskID] = {}  # by configuration

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Erase the bars."""
        self._bar.stop()

    def handle_change(self, sweep: "Sweep") -> None:
        """Update the bars."""
        queue = sweep.queue
        left = f"about {format_duration(sweep.seconds_left())} left" if queue.done < queue.total else ""
        details = ", ".join([left] + [f"{len(queue.failed)} failed"] * bool(queue.failed))
        self._bar.update(self._all, completed=queue.done, total=queue.total, details=details)
        for config in [config for config in self._tasks if config not in sweep.running.values()]:
            self._bar.remove_task(self._tasks.pop(config))
        for worker, config in sweep.running.items():
            if config not in self._tasks:
                name = f"  {queue.label(config)}"
                self._tasks[config] = self._bar.add_task(name, total=None, details="starting")
            done, total = worker.steps
            if total:
                self._bar.update(self._tasks[config], completed=done, total=total, details="")

    def note(self, words: str) -> None:
        """Print a line above the bars."""
        _print_above(self._bar, words)


def sweep_progress() -> SweepLines:
    """Return bars for a sweep on a terminal, lines elsewhere."""
    console = Console(file=sys.stderr)
    return SweepBars(console) if console.is_terminal else SweepLines()


class TrialLines(SweepLines):
    """One line on stderr per finished trial."""

    def handle_end(self, sweep: "Sweep", config: Any) -> None:
        """Print how many trials are done, what was tried, and its metric or where it stopped."""
        queue: Any = sweep.queue
        trial = next(trial for trial in queue.trials if trial.key == queue.key(config))
        by = queue.plan.search.by
        metric = f"{by} {format_metric(by, [trial.value])}, {format_duration(trial.seconds)}"
        ends = {"done": metric, "pruned": f"stopped after epoch {trial.steps}", "failed": f"failed: {trial.why}"}
        self.note(f"{queue.done}/{queue.total} {queue.label(config)}: {ends.get(trial.state, 'not done')}")


class TrialBars(TrialLines, SweepBars):
    """One bar for the search and one per running trial."""


def tune_progress() -> SweepLines:
    """Return bars for a search on a terminal, lines elsewhere."""
    console = Console(file=sys.stderr)
    return TrialBars(console, "Trials") if console.is_terminal else TrialLines()
