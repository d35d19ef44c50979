"""uncollapse sweep. How runs are run is tested with `lab.sweeping`."""

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import Result

from uncollapse.cli.sweep_progress import Bars
from uncollapse.lab.agenda import Agenda
from uncollapse.lab.grids import Grid
from uncollapse.lab.results import Results
from uncollapse.lab.sweeping import Sweep

from ..lab.sweep_recipe import registered  # noqa: TID252

Run = Callable[..., Result]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with registered(monkeypatch) as module:
        yield module


def ending(monkeypatch: pytest.MonkeyPatch, answer: str, why: str = "") -> None:
    """Sweeps do nothing but end like this."""

    def run(self: Sweep) -> str:
        if why:
            self.agenda.fail(self.agenda.take(), why)
        return answer

    monkeypatch.setattr(Sweep, "run", run)


def test_from_nothing_to_all(run: Run, tiny: ModuleType, tmp_path: Path) -> None:
    command = ["sweep", tiny.NAME, "--grid", "size=1,2", "--jobs", 1, "--data-root", ".", "--set", "scale=.5"]
    plan = run(*command, "--dry-run")
    assert plan.stdout == "2 runs: 0 are there, 2 are missing.\nThey take about 3 s. Nothing was run.\n"
    assert not (tmp_path / "results").exists()
    done = run(*command)
    assert (done.exit_code, done.stdout) == (0, "2 of 2 runs are done, 2 of them now.\n")
    assert done.stderr == (
        "1/2 none-size1-s0.5-seed0: validation 0.6, test 0.5, 1 s\n"
        "2/2 none-size2-s0.5-seed0: validation 0.7, test 0.5, 1 s\n"
    )
    assert run(*command).stdout == "2 of 2 runs are done, 0 of them now.\n"
    assert run(*command, "--dry-run").stdout == "All 2 runs are there.\n"


def test_a_plan_with_a_choice(run: Run, tiny: ModuleType) -> None:
    command = ["sweep", tiny.NAME, "--grid", "size=60,120 scale=1,2 seed=0-3", "--choose", "scale", "--jobs", 2]
    words = run(*command, "--dry-run").stdout
    assert words == (
        "10 runs: 0 are there, 4 are missing, and 6 more once it is known which values are best.\n"
        "They take about 8 min in 2 processes, 15 min in one. Nothing was run.\n"
    )
    facts = json.loads(run(*command, "--dry-run", "--json").stdout)
    assert (facts["total"], facts["there"], facts["later"], facts["seconds"]) == (10, 0, 6, 900.0)
    assert [entry["seconds"] for entry in facts["missing"]] == [60.0, 60.0, 120.0, 120.0]
    assert facts["missing"][0]["file"].startswith("results/tiny-sweep/none-size60-s1-seed0--")


def test_named_grids_are_joined(run: Run, tiny: ModuleType) -> None:
    assert run("sweep", tiny.NAME, "--grid", "both", "--dry-run").stdout.startswith("3 runs:")
    assert run("sweep", tiny.NAME, "--grid", "both", "--grid", "one", "--dry-run").stdout.startswith("5 runs:")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Say what to run with --grid: one of both, one, or fields with values"),
        (["--grid", "bothe"], "tiny-sweep has no grid named 'bothe'. Did you mean 'both'? There are: both, one."),
        (["--grid", "siz=1"], "There is no setting 'siz'. Did you mean 'size'?"),
        (["--grid", "size=big"], "size is a whole number, got 'big'."),
        (["--grid", "size=1,2", "--choose", "scale"], "--choose scale: no grid has several values of it"),
        (["--grid", "size=1,2", "--set", "scale"], "--set takes key=value"),
        (["--grid", "size=1,2", "--set", "size=3"], "size is in the grid and fixed too"),
    ],
)
def test_what_cannot_be_swept_is_said(run: Run, tiny: ModuleType, arguments: list[str], words: str) -> None:
    result = run("sweep", tiny.NAME, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


def test_an_unknown_recipe_is_a_usage_error(run: Run, tiny: ModuleType) -> None:
    result = run("sweep", "tiny-swep", "--grid", "one")
    assert result.exit_code == 2
    assert "Did you mean 'tiny-sweep'?" in result.stderr


@pytest.mark.parametrize(
    ("ended", "code", "words"), [("time", 0, "The time is over."), ("interrupted", 130, "Interrupted.")]
)
def test_a_sweep_that_did_not_end(
    run: Run, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, ended: str, code: int, words: str
) -> None:
    ending(monkeypatch, ended)
    result = run("sweep", tiny.NAME, "--grid", "one")
    assert result.exit_code == code
    assert result.stdout == f"{words} 0 of 3 runs are done, 0 of them now. The same command goes on from there.\n"


def test_failures_are_counted_and_one_is_shown(run: Run, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ending(monkeypatch, "done", "broken")
    result = run("sweep", tiny.NAME, "--grid", "scale=1,2 seed=0,1", "--choose", "scale")
    assert result.exit_code == 1
    assert re.search(
        r"\n1 run failed; see runs/tiny-sweep/none-size1-s1-seed0--\w{10}/error.txt. 1 run waits for what failed. "
        r"The same command tries again.\n$",
        result.stdout,
    )
    facts = json.loads(run("sweep", tiny.NAME, "--grid", "one", "--json").stdout)
    assert facts["failed"] == [{"name": "none-size1-s1-seed0", "error": "broken"}]
    assert facts["ended"] == "done"


def test_bars_show_what_runs_and_what_is_left(tiny: ModuleType, tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    agenda = Agenda(tiny.RECIPE, Grid({"size": (60, 120)}).cells(tiny.Config), Results(tmp_path))
    first, second = (type("Worker", (), {"steps": steps})() for steps in ((30, 200), (0, 0)))
    sweep = SimpleNamespace(agenda=agenda, running={first: agenda.take()}, seconds_left=lambda: 240.0)
    with Bars(console) as bars:
        bars.changed(sweep)
        sweep.running[second] = agenda.take()
        bars.changed(sweep)
        del sweep.running[first]
        bars.changed(sweep)
        bars.note("A note [bold].")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    for words in ("Runs", "0/2", "about 4 min left", "A note [bold]."):
        assert words in shown
    last = shown.rpartition("Runs")[2]
    assert re.search(r"none-size120-s1-seed0 .* starting", last)
    assert "none-size60" not in last
