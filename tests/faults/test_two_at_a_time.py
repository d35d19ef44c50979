"""Two processes in the same folders at the same moment, and locks that the dead have left."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_queue import RunQueue
from uncollapse.lab.runs.sweep import Limits, Sweep

from ..lab.sweep_recipe import registered  # noqa: TID252
from .machine import Machine, litter
from .remains import check_whole, said
from .scenes import NEEDED, SCENES, TRAIN, furnish

Count = Callable[[str, object], None]


def test_the_same_run(machine: Machine, tmp_path: Path, record_property: Count) -> None:
    """One runs it; the other is told to wait, or comes late and finds the result."""
    whole, cases = furnish(tmp_path / "whole"), 2
    assert machine.run(whole, *TRAIN).code == 0
    for number in range(cases):
        folder = furnish(tmp_path / f"pair-{number}")
        answers = machine.run_together(folder, TRAIN, TRAIN)
        assert 0 in {answer.code for answer in answers}
        for answer in answers:
            assert answer.code == 0 or "Another process is currently running csbm" in answer.sentence, answer.err
        check_whole(folder)
        assert said(folder) == said(whole)
        assert litter(folder) == []
    record_property("cases", cases)


def test_other_runs(machine: Machine, tmp_path: Path, record_property: Count) -> None:
    whole, folder = (furnish(tmp_path / name) for name in ("whole", "pair"))
    commands = [[*TRAIN, "--seed", seed] for seed in ("1", "2")]
    assert [machine.run(whole, *command).code for command in commands] == [0, 0]
    for answer in machine.run_together(folder, *commands):
        assert answer.code == 0, answer.err
    check_whole(folder)
    assert said(folder) == said(whole)
    assert litter(folder) == []
    record_property("cases", 1)


def test_the_same_study(machine: Machine, tmp_path: Path, record_property: Count) -> None:
    folder = furnish(tmp_path / "it")
    answers = machine.run_together(folder, *2 * [SCENES["tune"]])
    assert 0 in {answer.code for answer in answers}
    for answer in answers:
        assert answer.code == 0 or "Another process has the study in study open" in answer.sentence, answer.err
    assert litter(folder) == []
    record_property("cases", 1)


@pytest.mark.parametrize("name", ["diagnose", "report", "embeddings"])
def test_the_same_output(machine: Machine, tmp_path: Path, name: str, record_property: Count) -> None:
    """The last one wins, with whole files."""
    folder = furnish(tmp_path / "it")
    for needed in NEEDED.get(name, ()):
        assert machine.run(folder, *needed).code == 0
    answers = machine.run_together(folder, *3 * [SCENES[name]])
    assert [answer.code for answer in answers] == [0, 0, 0]
    check_whole(folder)
    assert litter(folder) == []
    record_property("cases", 1)


def test_a_lock_of_the_dead(machine: Machine, tmp_path: Path, record_property: Count) -> None:
    """Whatever it says: that somebody holds it is what counts. One has the number of this process, which does not."""
    folder, contents = furnish(tmp_path / "it"), ("123456789\n", f"{os.getpid()}\n")
    assert machine.run(folder, *TRAIN).code == 0
    (result,) = folder.rglob("*--*.json")
    lock = result.with_suffix(".lock")
    for content in contents:
        lock.write_text(content)
        assert machine.run(folder, *TRAIN).code == 0
        assert not lock.exists()
        lock.write_text(content)
        assert machine.run(folder, *TRAIN, "--again").code == 0
        assert litter(folder) == []
    record_property("cases", 2 * len(contents))


class Silent:
    """Hears what a sweep tells, and keeps it."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def handle_change(self, sweep: Sweep) -> None:
        pass

    def handle_end(self, sweep: Sweep, config: object) -> None:
        self.done.append(config)

    def note(self, words: str) -> None:
        assert "is being run by another process" in words


def test_two_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Count) -> None:
    """They share the work: each run is begun once, and both end with all results."""
    with registered(monkeypatch) as tiny:
        made = []
        for _ in range(2):
            cells = Grid({"size": (1, 2, 3, 4), "steps": (20,), "slow": (9,)}).cells(tiny.Config)
            queue = RunQueue(tiny.RECIPE, cells, Results(tmp_path / "results"))
            made.append(Sweep(queue, tmp_path / "runs", Runtime(tmp_path), Limits(1), Silent()))
        ends: list[str] = []
        threads = [threading.Thread(target=lambda sweep=sweep: ends.append(sweep.run())) for sweep in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert ends == ["done", "done"]
    assert len((tmp_path / "log").read_text().splitlines()) == 4
    assert [len(sweep.queue.records) for sweep in made] == [4, 4]
    assert litter(tmp_path) == []
    record_property("cases", 1)
