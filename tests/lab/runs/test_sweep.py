"""Sweeps with real processes: each of these tests starts a few, which takes a second or two apiece."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.lab.sweep_recipe import registered

from uncollapse.errors import UsageError
from uncollapse.io.files import try_lock
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.runs import sweep as sweeping
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_queue import RunQueue
from uncollapse.lab.runs.sweep import Limits, Sweep


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with registered(monkeypatch) as module:
        yield module


@dataclass
class Ear:
    """Hears all that a sweep tells, and may do something about it."""

    on_change: Callable[[Sweep], None] = lambda sweep: None
    on_note: Callable[[str], None] = lambda words: None
    done: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def handle_change(self, sweep: Sweep) -> None:
        self.on_change(sweep)

    def handle_end(self, sweep: Sweep, config: Any) -> None:
        self.done.append(config)

    def note(self, words: str) -> None:
        self.notes.append(words)
        self.on_note(words)


def sweep(tiny: ModuleType, folder: Path, *grids: Grid, ear: Ear, **limits: Any) -> Sweep:
    cells = [cell for grid in grids for cell in grid.cells(tiny.Config)]
    queue = RunQueue(tiny.RECIPE, cells, Results(folder / "results"))
    return Sweep(queue, folder / "runs", Runtime(folder), Limits(**{"jobs": 1, **limits}), ear)


def log(folder: Path) -> list[str]:
    """The runs that were begun: name, step, threads."""
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_sweep_does_what_it_can(tiny: ModuleType, tmp_path: Path) -> None:
    """Cheapest first; one fails, one is killed, one is run elsewhere; what follows a choice comes in the same sweep."""
    foreign, other = tiny.Config(2), ExitStack()
    results = Results(tmp_path / "results")

    def finish_elsewhere(words: str) -> None:
        if "another process" in words:
            record = tiny.build_record(tiny.NAME, foreign, 1.0, (), figures={"validation": 0.1})
            results.save(tiny.RECIPE, foreign, record)
            other.close()

    ear = Ear(on_note=finish_elsewhere)
    other.enter_context(try_lock(results.path(tiny.RECIPE, foreign).with_suffix(".lock")))
    chosen = Grid({"size": (5,), "scale": (0.6, 0.8), "seed": (0, 1)}, choose=("scale",))
    faulty = Grid({"fault": ("raise", "kill"), "size": (3,)})
    made = sweep(tiny, tmp_path, Grid({"size": (4, 2, 1)}), faulty, chosen, ear=ear)
    assert made.run() == "done"
    assert log(tmp_path) == [
        "none-size1-s1-seed0 0 1",
        "raise-size3-s1-seed0 0 1",
        "kill-size3-s1-seed0 0 1",
        "none-size4-s1-seed0 0 1",
        "none-size5-s0.6-seed0 0 1",
        "none-size5-s0.8-seed0 0 1",
        "none-size5-s0.6-seed1 0 1",
    ]
    assert [config.size for config in ear.done] == [1, 4, 5, 5, 5]
    assert len(made.queue.records) == 6  # with the one that was run elsewhere
    assert (made.queue.open, made.queue.later) == ({}, 0)
    why = list(made.queue.failed.values())
    assert why == [
        "The loss became nan. Try another one.",
        "The process of the run ended by signal 9, maybe because memory ran out.",
    ]
    texts = [made.error_file(tiny.Config(3, fault=fault)).read_text() for fault in ("raise", "kill")]
    assert texts[0].startswith(f"{why[0]}\n\nTraceback")
    assert "tiny_sweep.py" in texts[0]
    assert texts[1] == f"{why[1]}\n"
    assert len(files(tmp_path / "results")) == 6
    assert files(tmp_path / "runs") == {"error.txt"}


def test_a_reason_that_runs_share_is_printed_once(tiny: ModuleType, tmp_path: Path) -> None:
    ear = Ear()
    made = sweep(tiny, tmp_path, Grid({"fault": ("raise",), "size": (1, 2, 3)}), ear=ear)
    assert made.run() == "done"
    assert len(made.queue.failed) == 3
    first, second = ear.notes
    assert "failed: The loss became nan. Try another one. (" in first
    label = made.queue.label(tiny.Config(1, fault="raise"))
    alike = made.queue.label(tiny.Config(2, fault="raise"))
    assert second == f"{alike} failed for the same reason as {label}; other such runs are only counted."
    for size in (2, 3):
        assert made.error_file(tiny.Config(size, fault="raise")).read_text().startswith("The loss became nan.")


def test_a_missing_library_ends_the_sweep(tiny: ModuleType, tmp_path: Path) -> None:
    """All other runs would fail for the same reason."""
    made = sweep(tiny, tmp_path, Grid({"fault": ("library",), "size": (1, 2, 3)}), ear=Ear())
    with pytest.raises(UsageError, match="no_such_library is required: pip install"):
        made.run()
    assert len(log(tmp_path)) == 1
    assert (made.queue.failed, len(made.queue.open)) == ({}, 3)
    assert files(tmp_path / "runs") == set()


def test_a_run_is_stopped_and_goes_on(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, then since time is over, then it is left alone."""
    grid = Grid({"steps": (5000,), "slow": (2,)})
    hour = 0.0
    monkeypatch.setattr(sweeping, "time", SimpleNamespace(monotonic=lambda: hour + time.monotonic()))

    def moved(made: Sweep) -> bool:
        return any(worker.steps[0] > 0 for worker in made.running)

    def interrupt(made: Sweep) -> None:
        if moved(made):
            ear.on_change = lambda _: None
            signal.raise_signal(signal.SIGINT)

    def jump(made: Sweep) -> None:
        nonlocal hour
        if moved(made):
            hour = 3600.0

    ear = Ear(interrupt)
    made = sweep(tiny, tmp_path, grid, ear=ear)
    assert made.run() == "interrupted"
    assert len(made.queue.open) == 1
    (folder,) = (tmp_path / "runs" / tiny.NAME).iterdir()
    (folder / "step-000009999").mkdir()  # a torn one, of which the worker warns
    ear = Ear(jump)
    made = sweep(tiny, tmp_path, grid, ear=ear, seconds=3600.0)
    assert made.run() == "time"
    assert "step-000009999" in ear.notes[0]
    assert ear.notes[1:] == ["Stopping; running experiments write a checkpoint first."]
    assert (len(made.queue.open), made.queue.failed) == (1, {})
    assert files(tmp_path / "results") == set()
    made = sweep(tiny, tmp_path, grid, ear=Ear(), seconds=3600.0)
    assert made.run() == "done"
    steps = [int(line.split()[1]) for line in log(tmp_path)]
    assert 0 == steps[0] < steps[1] < steps[2] < 5000
    assert not (tmp_path / "runs" / tiny.NAME).exists() or not files(tmp_path / "runs")


def test_time_that_is_over_starts_nothing(tiny: ModuleType, tmp_path: Path) -> None:
    assert sweep(tiny, tmp_path, Grid({"size": (1,)}), ear=Ear(), seconds=0.0).run() == "time"
    assert sweep(tiny, tmp_path, Grid({"size": (1,)}), ear=Ear(), seconds=0.01).run() == "time"
    assert log(tmp_path) == []


def test_a_sweep_that_is_killed_is_taken_over(tiny: ModuleType, tmp_path: Path) -> None:
    """Two sweeps on one folder; the first is killed with -9, and the second goes on with its run."""
    grid = "steps=5000 slow=1"
    code = "import tiny_sweep; from uncollapse.cli import app; app()"
    command = [sys.executable, "-c", code, "sweep", tiny.NAME, "--grid", grid, "--jobs", "1", "--data-root", "."]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not log(tmp_path) and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        ear = Ear(on_note=lambda _: os.kill(first.pid, signal.SIGKILL))
        made = sweep(tiny, tmp_path, Grid({"steps": (5000,), "slow": (1,)}), ear=ear)
        assert made.run() == "done"
    finally:
        first.kill()
        _, said = first.communicate()
    assert said == ""
    assert ear.notes == ["none-size1-s1-seed0--0ef5c83a95 is being run by another process."]
    begun, resumed = (int(line.split()[1]) for line in log(tmp_path))
    assert 0 == begun < resumed < 5000
    assert len(ear.done) == 1
    assert files(tmp_path / "results") == {made.queue.results.path(tiny.RECIPE, ear.done[0]).name}


def test_workers_that_cannot_start_end_the_sweep(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    made = sweep(tiny, tmp_path, Grid({"size": (1, 2)}), ear=Ear())
    with pytest.raises(RuntimeError, match="exit code"):
        made.run()
    assert made.queue.failed == {}
