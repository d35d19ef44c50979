"""uncollapse sweep. How runs are run is tested with `lab.sweeping`."""

import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console
from tests.lab.sweep_recipe import registered
from typer.testing import Result

from uncollapse.cli import console
from uncollapse.cli.progress import SweepBars
from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.checkpoints import Checkpoints
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import Results, build_record
from uncollapse.lab.runs.run_one import with_run_folder
from uncollapse.lab.runs.run_queue import RunQueue
from uncollapse.lab.runs.sweep import Sweep
from uncollapse.lab.tables.paper_table import PaperTable

Run = Callable[..., Result]
WHERE = "Results are in results/tiny-sweep.\n"  # a recipe without tables has no table


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with registered(monkeypatch) as module:
        yield module


def ending(monkeypatch: pytest.MonkeyPatch, answer: str, why: str = "") -> None:
    """Sweeps do nothing but end like this."""

    def run(self: Sweep) -> str:
        if why:
            self.queue.fail(self.queue.take(), why)
        return answer

    monkeypatch.setattr(Sweep, "run", run)


def save_result(tiny: ModuleType, config: object, validation: float = 0.5, folder: str = "results") -> None:
    record = build_record(tiny.NAME, config, 1.0, (), figures={"validation": validation})
    Results(Path(folder)).save(tiny.RECIPE, config, record)


def test_from_nothing_to_all(run: Run, tiny: ModuleType, tmp_path: Path) -> None:
    command = ["sweep", tiny.NAME, "--grid", "size=1,2", "--jobs", 1, "--data-root", ".", "--set", "scale=.5"]
    plan = run(*command, "--dry-run")
    assert plan.stdout.endswith("\n2 runs: 0 are done, 2 are missing. They take about 3 s. Nothing was run.\n")
    rows = [line.split() for line in plan.stdout.splitlines() if "size" in line]
    assert [(row[0][:21], *row[1:]) for row in rows] == [
        ("none-size1-s0.5-seed0", "missing", "about", "1", "s"),
        ("none-size2-s0.5-seed0", "missing", "about", "2", "s"),
    ]
    assert not (tmp_path / "results").exists()
    done = run(*command)
    assert (done.exit_code, done.stdout) == (0, f"2 of 2 runs are done, 2 of them now.\n{WHERE}")
    assert re.sub(r"--\w{10}:", ":", done.stderr) == (
        "1/2 none-size1-s0.5-seed0: validation 60.00 %, test 50.00 %, 1 s\n"
        "2/2 none-size2-s0.5-seed0: validation 70.00 %, test 50.00 %, 1 s\n"
    )
    assert len(set(re.findall(r"--(\w{10}):", done.stderr))) == 2
    assert run(*command).stdout == f"2 of 2 runs are done, 0 of them now.\n{WHERE}"
    assert run(*command, "--dry-run").stdout == "All 2 runs have results.\n"


def test_a_plan_with_a_choice(run: Run, tiny: ModuleType) -> None:
    command = ["sweep", tiny.NAME, "--grid", "size=60,120 scale=1,2 seed=0-3", "--choose", "scale", "--jobs", 2]
    words = run(*command, "--dry-run").stdout
    assert words.splitlines()[-1] == (
        "10 runs: 0 are done, 4 are missing, and 6 more once the best values are known. "
        "They take about 8 min in 2 processes, 15 min in one. Nothing was run."
    )
    facts = json.loads(run(*command, "--dry-run", "--json").stdout)
    assert (facts["total"], facts["there"], facts["later"], facts["seconds"]) == (10, 0, 6, 900.0)
    assert [entry["seconds"] for entry in facts["missing"]] == [60.0, 60.0, 120.0, 120.0]
    assert facts["missing"][0]["file"].startswith("results/tiny-sweep/none-size60-s1-seed0--")


def test_names_that_do_not_fit_are_not_broken(run: Run, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "stdout_console", lambda: Console(width=30, highlight=False))
    first, second, *_ = run("sweep", tiny.NAME, "--grid", "size=60", "--dry-run").stdout.splitlines()
    assert first == "none-size60-s1-seed0--" + first[-10:]
    assert second == " · missing, about 60 s on one core"


def test_named_grids_are_joined(run: Run, tiny: ModuleType) -> None:
    assert "\n3 runs: 0 are" in run("sweep", tiny.NAME, "--grid", "both", "--dry-run").stdout
    assert "\n5 runs: 0 are" in run("sweep", tiny.NAME, "--grid", "both", "--grid", "one", "--dry-run").stdout


def test_a_long_plan_shows_what_comes_first(run: Run, tiny: ModuleType, tmp_path: Path) -> None:
    runs = with_run_folder(Runtime(), tiny.RECIPE, tiny.Config(2), tmp_path / "runs").checkpoints
    Checkpoints(runs, f"{identity(tiny.NAME, tiny.Config(2))}-data").save(7, {}, {})
    words = run("sweep", tiny.NAME, "--grid", "size=1-12", "--dry-run").stdout
    rows = [line.split()[:2] for line in words.splitlines() if "size" in line]
    assert [row[0].partition("-s1-")[0] for row in rows] == [f"none-size{size}" for size in range(1, 11)]
    assert [row[1] for row in rows] == ["missing", "begun"] + 8 * ["missing"]
    assert "\n… and 2 more.\n12 runs: " in words


def test_one_run_is_no_plural(run: Run, tiny: ModuleType) -> None:
    command = ["sweep", tiny.NAME, "--grid", "size=1", "--jobs", 1]
    words = run(*command, "--dry-run").stdout.splitlines()[-1]
    assert words == "1 run: 0 are done, 1 is missing. It takes about 1 s. Nothing was run."
    save_result(tiny, tiny.Config(1))
    assert run(*command, "--dry-run").stdout == "The only run has a result.\n"
    assert run(*command).stdout == f"1 of 1 run is done, 0 of them now.\n{WHERE}"


def test_what_was_chosen_is_said(run: Run, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ending(monkeypatch, "done")
    for size in range(1, 13):
        for scale in (0.1, 1.2):
            save_result(tiny, tiny.Config(size, scale), 1 - abs(scale - size / 10))
    command = ["sweep", tiny.NAME, "--choose", "scale", "--grid"]
    lines = run(*command, "size=1-12 scale=0.1,1.2 seed=0-1").stdout.splitlines()
    assert lines[0] == "24 of 36 runs are done, 0 of them now."
    assert lines[1] == "Chosen for size=1: scale=0.1 (validation 100.00 %)."
    assert lines[10] == "Chosen for size=10: scale=1.2 (validation 80.00 %)."
    assert lines[11:] == ["… and 2 more.", WHERE.strip()]
    lines = run(*command, "size=2 scale=0.1,1.2", "--results", "results").stdout.splitlines()
    assert lines[1] == "Chosen: scale=0.1 (validation 90.00 %)."


def test_where_the_results_are(run: Run, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    table = PaperTable("All", {}, "fault", "size", "scale")
    monkeypatch.setitem(RECIPES._entries, tiny.NAME, dataclasses.replace(tiny.RECIPE, tables={"all": table}))
    for folder, flags in (("results", ""), ("my results", " --results 'my results'")):
        save_result(tiny, tiny.Config(), folder=folder)
        words = run("sweep", tiny.NAME, "--grid", "size=1", "--results", folder).stdout.splitlines()[-1]
        assert words == f"Results are in {folder}/tiny-sweep. To see them: uncollapse table tiny-sweep{flags}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--results", "/proc/x"], "Results cannot go to /proc/x/tiny-sweep: No such file or directory. Name"),
        (["--runs", "/proc/x"], "Checkpoints cannot go to /proc/x: No such file or directory. Name"),
        (["--results", "models.py"], "models.py is a file; --results names a folder.\n"),
        (["--runs", "models.py"], "models.py is a file; --runs names a folder.\n"),
    ],
)
def test_folders_are_looked_at_before_workers_start(
    run: Run, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.setattr(Sweep, "run", None)  # must not be reached
    result = run("sweep", tiny.NAME, "--grid", "one", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {sentence}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Say what to run with --grid: one of both, one, or fields with values"),
        (["--grid", "bothe"], "tiny-sweep has no grid named 'bothe'. Did you mean 'both'? There are: both, one."),
        (["--grid", "siz=1"], "There is no setting 'siz'. Did you mean 'size'?"),
        (["--grid", "size=big"], "size must be a whole number, got 'big'."),
        (["--grid", "size=1,2", "--choose", "sclae"], "There is no setting 'sclae'. Did you mean 'scale'? There are: "),
        (["--grid", "size=1, 2"], "--grid 'size=1, 2': leave out the spaces next to commas: 'size=1,2'."),
        (["--grid", "size=1,2", "--choose", "scale"], "--choose scale: no grid has several values of it"),
        (["--grid", "size=1,2", "--set", "scale"], "--set takes key=value"),
        (["--grid", "size=1,2", "--set", "size=3"], "No experiment of the grid has size=3"),
        (["--grid", "size=1,2 seed=0-2", "--choose", "size", "--set", "seed=1"], "part of the grid's choice"),
    ],
)
def test_what_cannot_be_swept_is_said(run: Run, tiny: ModuleType, arguments: list[str], words: str) -> None:
    result = run("sweep", tiny.NAME, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


@pytest.mark.parametrize(("value", "total"), [(1, 3), (2, 1)])
def test_a_field_that_one_grid_varies_narrows_the_others_too(
    run: Run, tiny: ModuleType, value: int, total: int
) -> None:
    """The second grid has the size 1 of the defaults: it belongs to that sweep and to no other."""
    grids = ["--grid", "size=1,2", "--grid", "scale=.5,2"]
    result = run("sweep", tiny.NAME, *grids, "--set", f"size={value}", "--dry-run", "--json")
    assert json.loads(result.stdout)["total"] == total


def test_an_unknown_recipe_is_a_usage_error(run: Run, tiny: ModuleType) -> None:
    result = run("sweep", "tiny-swep", "--grid", "one")
    assert result.exit_code == 2
    assert "Did you mean 'tiny-sweep'?" in result.stderr


@pytest.mark.parametrize(
    ("ended", "code", "words"), [("time", 0, "The time limit was reached."), ("interrupted", 130, "Interrupted.")]
)
def test_a_sweep_that_did_not_end(
    run: Run, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, ended: str, code: int, words: str
) -> None:
    ending(monkeypatch, ended)
    result = run("sweep", tiny.NAME, "--grid", "one")
    assert result.exit_code == code
    assert result.stdout == f"{words} 0 of 3 runs are done, 0 of them now. The same command continues from there.\n"


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
    queue = RunQueue(tiny.RECIPE, Grid({"size": (60, 120)}).cells(tiny.Config), Results(tmp_path))
    first, second = (type("Worker", (), {"steps": steps})() for steps in ((30, 200), (0, 0)))
    sweep = SimpleNamespace(queue=queue, running={first: queue.take()}, seconds_left=lambda: 240.0)
    with SweepBars(console) as bars:
        bars.handle_change(sweep)
        sweep.running[second] = queue.take()
        bars.handle_change(sweep)
        del sweep.running[first]
        bars.handle_change(sweep)
        bars.note("A note [bold].")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    for words in ("Runs", "0/2", "about 4 min left", "A note [bold]."):
        assert words in shown
    last = shown.rpartition("Runs")[2]
    assert re.search(r"none-size120-s1-seed0--\w{10} .* starting", last)
    assert "none-size60" not in last


def test_counts_stand_on_a_narrow_terminal_too(tiny: ModuleType, tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60, color_system=None)
    queue = RunQueue(tiny.RECIPE, Grid({"size": tuple(range(1, 200))}).cells(tiny.Config), Results(tmp_path))
    queue.fail(queue.take(), "why")
    worker = type("Worker", (), {"steps": (30, 200)})()
    sweep = SimpleNamespace(queue=queue, running={worker: queue.take()}, seconds_left=lambda: 24000.0)
    with SweepBars(console) as bars:
        bars.handle_change(sweep)
    assert re.search(r"0/199 about 6\.7 h left, 1 failed", stream.getvalue())


def test_pictures_are_drawn_where_the_recipe_has_some(
    run: Run, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from uncollapse.lab.tables.table_page import ResultPlot
    from uncollapse.report.canvas import new_figure

    def pictures(records: list[dict[str, object]]) -> Iterator[ResultPlot]:
        yield ResultPlot("Dots", f"{len(records)} dots.", new_figure("", (2, 2))[0])

    table = PaperTable("Sizes", where={}, groups="scale", rows="size", columns="seed", metric="validation")
    recipe = dataclasses.replace(tiny.RECIPE, tables={"sizes": table}, plots=pictures)
    monkeypatch.setitem(RECIPES._entries, tiny.NAME, recipe)
    save_result(tiny, tiny.RECIPE.config(size=1))
    result = run("sweep", tiny.NAME, "--grid", "size=1")
    assert result.stdout.endswith("Drawn: results/tiny-sweep/plots.html\n")
    assert "1 dots." in (tmp_path / "results" / tiny.NAME / "plots.html").read_text(encoding="utf-8")
