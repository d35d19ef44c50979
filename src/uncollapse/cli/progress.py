"""A progress bar for what takes longer than a second."""

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from uncollapse import distributed
from uncollapse.cli.outcomes import speed

PATIENCE = 1.0  # seconds without a bar
WINDOW = 600.0  # seconds whose steps tell the time that is left: a step of a large model may take a minute


class Waiting:
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
            self._bar.update(self._task, completed=steps, total=total, beside=_beside(figures))

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


def _beside(figures: Mapping[str, float]) -> str:
    """The epoch, the loss, the validation figure and speeds such as images/s, as far as there are any."""
    shown = {"epoch": "d", "loss": ".3g", "validation": ".3f"}
    words = [f"{name} {figures[name]:{form}}" for name, form in shown.items() if name in figures]
    return "  ".join(words + [f"{speed(value)} {name}" for name, value in figures.items() if name.endswith("/s")])
