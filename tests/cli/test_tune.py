"""uncollapse tune. How trials are run is tested with `lab.tuning`."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console
from tests.cli.test_json import documented
from tests.lab.sweep_recipe import registered
from typer.testing import Result

from uncollapse.cli import tune
from uncollapse.cli.progress import TrialBars
from uncollapse.tuning.trial_result import TrialResult

Run = Callable[..., Result]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with registered(monkeypatch, "tiny_tune") as module:
        yield module


def test_from_nothing_to_the_best(run: Run, tiny: ModuleType, tmp_path: Path) -> None:
    command = ["tune", tiny.NAME, "--data-root", ".", "--cure", "good", "--budget", "2h"]
    plan = run(*command, "--trials", 4, "--dry-run")
    assert plan.exit_code == 0, plan.stderr
    assert "scale (good): 0.01 to 10, log scale\n4 trials: 0 done, 4 missing." in plan.stdout
    assert not (tmp_path / "studies").exists()
    done = run(*command, "--trials", 4)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "4 of 4 trials: 4 done. They cost as much as 4.0 full trainings, 2 s."
    assert lines[1].startswith("Best: trial ")
    assert lines[1].endswith("Without a cure: 30.00 %.")
    assert lines[2] == "Not used by the search: test 50.00 % (without a cure 50.00 %)."
    assert any(line.startswith('In your own code:  uc.attach(model, "contra_norm", scale=') for line in lines)
    assert any(line.startswith("The same run:      uncollapse train tiny-tune ") for line in lines)
    assert lines[-2:] == ["Written: studies/tiny-tune/tuned.json", "Written: studies/tiny-tune/tuned.html"]
    told = done.stderr.splitlines()
    assert told[0] == "1/4 trial 0 (without a cure): validation 30.00 %, 1 s"
    assert told[1].startswith("2/4 trial 1 (scale=0.1): validation ")
    again = run(*command, "--trials", 4, "--json")
    facts = json.loads(again.stdout)
    assert set(facts) == documented("tune")
    assert facts["ended"] == "done"
    assert [trial["number"] for trial in facts["trials"]] == [0, 1, 2, 3]
    assert facts["baseline"]["value"] == 0.3
    assert len((tmp_path / "log").read_text().splitlines()) == 4  # nothing was run a second time
    assert "4 trials: 4 done, 0 missing." in run(*command, "--trials", 4, "--dry-run").stdout
    other = run(*command, "--trials", 4, "--epochs", 9)
    assert (other.exit_code, other.stdout) == (2, "")
    assert "is a study of something else: it has epochs=5, and now it is 9." in other.stderr
    planned = run(*command, "--trials", 4, "--epochs", 9, "--dry-run")  # it does not count trials of another study
    assert (planned.exit_code, planned.stdout) == (2, "")
    assert "tuned.json is a study of something else: it has epochs=5, and now it is 9." in planned.stderr
    assert "--study" in planned.stderr


@pytest.mark.parametrize(("ended", "tells"), [("done", True), ("interrupted", False), ("time", False)])
def test_test_figures_are_told_at_the_end_only(ended: str, tells: bool) -> None:
    tried = TrialResult(0, {}, 0.25, "done", 3, 12.0)
    plan = SimpleNamespace(search=SimpleNamespace(by="validation"))
    made = SimpleNamespace(
        best=tried, baseline=tried, plan=plan, ended=ended, shares={}, unseen_metrics=lambda trial: {"test": 0.5}
    )
    lines = tune._findings(made)  # type: ignore[arg-type]
    assert lines == [
        "No cure was better than none: validation 25.00 %.",
        *["Not used by the search: test 50.00 %."] * tells,
    ]


def test_failures(run: Run, tiny: ModuleType) -> None:
    done = run("tune", tiny.NAME, "--data-root", ".", "--fault", "raise", "--trials", 9, "--study", "here")
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("0 of 9 trials: 3 not done.")
    assert lines[1] == (
        "3 trials failed; the first was trial 0 (without a cure): It broke. See here/runs. "
        "The same command tries again."
    )
    assert lines[-1] == "Written: here/tuned.json"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny-tune", "--budget", "soon"], "--budget takes a time such as 90s, 45min or 2h, got 'soon'."),
        (["tiny-tune", "--pruner", "often"], "--pruner must be one of median, hyperband, none, got 'often'."),
        (["tiny-tune", "--vary", "scale"], "--vary takes FIELD=LOW..HIGH or FIELD=A,B,…"),
        (["tiny-tune", "--scale", "1", "--vary", "scale=1,2"], "scale is both fixed and varied"),
        (["tiny-tune", "--holdout", "0"], "Nothing is held out to choose on: --holdout 0.1."),
        (["tiny-tune", "--study", "models.py"], "models.py is a file"),
        (["potentials"], "potentials has no search space. Recipes that can be tuned: gcn-depth, "),
        (["gcn-deep"], "Did you mean 'gcn-depth'?"),
    ],
)
def test_what_cannot_be_had(run: Run, tiny: ModuleType, arguments: list[str], words: str) -> None:
    done = run("tune", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_under_a_launcher(run: Run, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uncollapse.cli.tune.launch_size", lambda: 2)
    assert "tune starts its own processes with --jobs" in run("tune", tiny.NAME).stderr


def test_bars() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    trials = (
        TrialResult(0, {}, 0.25, "done", 3, 12.0, key="a"),
        TrialResult(2, {"scale": 0.5}, None, "pruned", 2, 3.0, key="b"),
        TrialResult(3, {"scale": 9.0}, None, "failed", 1, 3.0, key="c", why="its figure is nan"),
    )
    queue = SimpleNamespace(
        trials=trials, key=str, label=lambda config: f"trial {config}", done=3, total=5, failed={},
        plan=SimpleNamespace(search=SimpleNamespace(by="validation")),
    )  # fmt: skip
    sweep = SimpleNamespace(queue=queue, running={}, seconds_left=lambda: 60.0)
    with TrialBars(console, "Trials") as bars:
        bars.handle_change(sweep)  # type: ignore[arg-type]
        for config in "abc":
            bars.handle_end(sweep, config)  # type: ignore[arg-type]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/5 trial a: validation 25.00 %, 12 s" in shown
    assert "3/5 trial b: stopped after epoch 2" in shown
    assert "3/5 trial c: failed: its figure is nan" in shown
    assert "about 60 s left" in shown
