"""uncollapse train, with a recipe that trains in no time."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.cli.test_json import documented
from tests.lab import slope
from typer.testing import Result

from uncollapse.cli import console
from uncollapse.cli import progress as waiting
from uncollapse.cli.train import RecipeCommands
from uncollapse.errors import UsageError
from uncollapse.io.files import try_lock
from uncollapse.lab.config import fields
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import run_lock

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES._entries, "slope", slope.RECIPE)
    monkeypatch.setattr(slope, "runs", [])
    monkeypatch.setattr(slope, "interrupt_at", [])


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name.partition("--")[0] for path in (tmp_path / "results" / "slope").glob("*.json"))


def records(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.stderr
    read: list[dict[str, object]] = json.loads(result.stdout)
    return read


def config_of(run: Run, *arguments: object) -> dict[str, object]:
    (record,) = records(run("train", "slope", "--epochs", 1, "--json", *arguments))
    config = record["config"]
    assert isinstance(config, dict)
    return config


def test_help_lists_the_recipes_and_their_flags(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    listed = run("train", "--help").stdout
    assert all(f" {name} " in listed for name in RECIPES)
    shown = " ".join(run("train", "slope", "--help").stdout.replace("│", " ").split())
    assert "--slope X What is to be found; any number in [-9, 9]. [default: 2.0]" in shown
    assert "--shape line|none Of the data. [default: line]" in shown
    assert "--noise X|none Deviation, if any. [default: none]" in shown
    assert "--steps N,… Batches of an epoch. [default: 1,2]" in shown
    assert "--precision no|bf16 Of the numbers. [default: no]" in shown
    assert "--bias Whether there is a constant. [default: (off)] --no-bias" in shown
    assert "--weight-decay X L2 penalty. [default: 0.0]" in shown


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_help_and_flags_of_its_own(run: Run, name: str) -> None:
    result = run("train", name, "--help")
    assert result.exit_code == 0
    second = [line for line in result.stdout.splitlines() if "--no-" in line]
    assert all(line.startswith("│ --no-") for line in second)  # below the first form, not in a column of its own
    command = RecipeCommands().get_command(None, name)
    flags = [flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    assert len(flags) == len(set(flags))


def test_flags_go_over_pairs_over_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("slope: 4\nweight-decay: 0.5\nnoise: 1\nshape: none\nseed: 3\n", encoding="utf-8")
    (tmp_path / "b.json").write_text('{"weight_decay": 0.25, "steps": [7]}', encoding="utf-8")
    config = config_of(
        run, "--config", "a.yaml", "--config", "b.json", "--set", "noise=2", "--set", "seed=5", "--seed", 0
    )
    assert config == {
        "slope": 4.0,
        "epochs": 1,
        "shape": "none",
        "noise": 2.0,
        "steps": [7],
        "precision": "no",
        "bias": False,
        "weight_decay": 0.25,
        "seed": 0,  # a flag with the value of the default counts as well
    }
    assert config_of(run, "--set", "bias=true")["bias"] is True
    assert config_of(run, "--set", "bias=true", "--no-bias")["bias"] is False


def test_the_command_in_a_record_repeats_it(run: Run) -> None:
    (record,) = records(run("train", "slope", "--steps", "3,4", "--bias", "--slope", "-1.5", "--seed", 2, "--json"))
    (again,) = records(run(*str(record["command"]).split()[1:], "--json", "--results", "other"))
    assert (again["config"], again["figures"]) == (record["config"], record["figures"])
    assert slope.runs == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["slop"], "No recipe is named 'slop'. Did you mean 'slope'? There are: "),
        (["slope", "--epochs", "many"], "epochs must be a whole number, got 'many'."),
        (["slope", "--shape", "lin"], "shape must be one of line, none, got 'lin'. Did you mean 'line'?"),
        (["slope", "--set", "epoch=3"], "There is no setting 'epoch'. Did you mean 'epochs'?"),
        (["slope", "--set", "epochs"], "--set takes key=value, such as layers=16, got 'epochs'."),
        (["slope", "--config", "no.yaml"], "The configuration no.yaml cannot be read: No such file or directory."),
        (
            ["slope", "--config", "seeds.yaml"],
            "seeds.yaml: seeds is a flag of the command",
        ),
        (["slope", "--config", "."], "A configuration file ends in .yaml, .yml, .json, got '.'.\n"),
        (["slope", "--config", "bad.yaml"], "bad.yaml: epochs must be a whole number, got 'many'."),
        (["slope", "--slope", "10"], "slope must lie within [-9, 9], got 10.0."),
        (["slope", "--track", "paper"], ""),
    ],
)
def test_what_is_wrong_is_one_sentence(run: Run, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "bad.yaml").write_text("epochs: many\n", encoding="utf-8")
    (tmp_path / "seeds.yaml").write_text("epochs: 2\nseeds: 3\n", encoding="utf-8")
    result = run("train", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {sentence}")
    assert result.stderr.count("\n") == 1


def test_an_unknown_flag_names_a_close_one(run: Run) -> None:
    result = run("train", "slope", "--epoch", 3)
    assert result.exit_code == 2
    assert "No such option: --epoch" in result.stderr
    assert "--epochs" in result.stderr


def test_seeds_are_told_in_a_table_and_not_run_twice(run: Run, tmp_path: Path) -> None:
    assert run("train", "slope", "--seed", 1).exit_code == 0
    result = run("train", "slope", "--seeds", 3)
    assert result.exit_code == 0, result.stderr
    assert slope.runs == [1, 0, 2]
    assert files(tmp_path) == ["2-seed0", "2-seed1", "2-seed2"]
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "already done" in lines["1"]
    assert "already done" not in lines["0"] + lines["2"]
    assert lines["0"].rstrip().endswith("after epoch 6")
    found = [json.loads(path.read_text())["figures"] for path in sorted((tmp_path / "results/slope").iterdir())]
    mean = sum(figures["validation"] for figures in found) / 3
    spread = (sum((figures["validation"] - mean) ** 2 for figures in found) / 2) ** 0.5
    assert f"{100 * mean:.2f} ± {100 * spread:.2f} %" in lines["mean"]
    assert f" {100 * found[0]['validation']:.2f} % " in lines["0"]
    assert f" {found[0]['found']:.4g} " in lines["0"]
    assert "broken" not in lines["seed"]  # no number in any of them
    assert "epoch" not in lines["seed"].split()
    assert [line.partition("--")[0] for line in result.stdout.splitlines()[-3:]] == [
        "Written: results/slope/2-seed0",
        "Exists: results/slope/2-seed1",
        "Written: results/slope/2-seed2",
    ]
    assert result.stderr == "1 of 3 already has a result and did not run; --again runs it again.\n"
    assert run("train", "slope", "--seeds", 3, "--track", "paper").exit_code == 2  # though nothing would run
    assert not (tmp_path / "runs" / "slope").exists() or not list((tmp_path / "runs" / "slope").iterdir())


def test_an_early_end_and_the_kept_epoch_are_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def early(config: slope.Config, runtime: Runtime) -> dict[str, Any]:
        record = slope.run(config, runtime)
        record["figures"]["epoch"] = 2
        return record | {"epochs": record["epochs"][:4], "ended": "no better validation in 2 evaluations"}

    monkeypatch.setitem(RECIPES._entries, "slope", dataclasses.replace(slope.RECIPE, run=early))
    assert "after epoch 4: no better validation in 2 evaluations, epoch 2 was tested" in run("train", "slope").stdout


def test_again_replaces_a_result(run: Run) -> None:
    (first,) = records(run("train", "slope", "--json"))
    (second,) = records(run("train", "slope", "--json"))
    (third,) = records(run("train", "slope", "--json", "--again"))
    assert first == second
    assert slope.runs == [0, 0]
    assert third["figures"] == first["figures"]


def test_a_plan_runs_nothing(run: Run, tmp_path: Path) -> None:
    run("train", "slope", "--seed", 1)
    result = run("train", "slope", "--seeds", 3, "--dry-run")
    assert (result.exit_code, result.stderr) == (0, "")
    assert slope.runs == [1]
    assert files(tmp_path) == ["2-seed1"]
    rows = [line.split(maxsplit=1) for line in result.stdout.splitlines() if line.strip().startswith("2-seed")]
    assert [(row[0], " ".join(row[1].split())) for row in rows] == [
        ("2-seed0", "missing about 5 min"),
        ("2-seed1", "exists –"),
        ("2-seed2", "missing about 5 min"),
    ]
    assert result.stdout.count("results/slope/2-seed") == 3
    assert result.stdout.endswith("2 of 3 would run, about 10 min on one core. Nothing was run.\n")
    plan = json.loads(run("train", "slope", "--seeds", 2, "--dry-run", "--json", "--again").stdout)
    assert [(step["name"], step["there"], step["due"], step["seconds"]) for step in plan] == [
        ("2-seed0", False, True, 300.0),
        ("2-seed1", True, True, 300.0),
    ]


def test_what_another_process_runs_is_left_to_it(run: Run, tmp_path: Path) -> None:
    with try_lock(run_lock(slope.RECIPE, slope.Config(), Results(tmp_path / "results"))):
        result = run("train", "slope")
    assert (result.exit_code, result.stdout, slope.runs) == (2, "", [])
    assert result.stderr == "Error: Another process is currently running 2-seed0. Wait for its result.\n"
    assert run("train", "slope").exit_code == 0
    assert [path.suffix for path in (tmp_path / "results" / "slope").iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--results", "file"], "file is a file; --results names a folder."),
        (["--runs", "file/here"], "file is a file; --runs names a folder."),
        (["--data-root", "file"], "file is a file; --data-root names a folder."),
        (
            ["--results", "/proc/x"],
            "Results cannot go to /proc/x/slope: No such file or directory. Name another folder.",
        ),
        (["--runs", "/proc/x"], "Checkpoints cannot go to /proc/x: No such file or directory."),
    ],
)
def test_folders_that_cannot_be_used_are_told_at_once(
    run: Run, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    (tmp_path / "file").touch()
    result = run("train", "slope", *arguments)
    assert (result.exit_code, slope.runs, result.stderr.count("\n")) == (2, [], 1)
    assert result.stderr.startswith(f"Error: {sentence}")


def test_a_data_root_that_does_not_exist_is_told(run: Run) -> None:
    result = run("train", "slope", "--data-root", "no/data", "--dry-run")
    words = "The folder no/data of --data-root does not exist. Datasets are read from there, or downloaded to it.\n"
    assert (result.exit_code, result.stderr) == (0, words)


def test_ctrl_c_says_how_to_go_on(run: Run) -> None:
    (whole,) = records(run("train", "slope", "--json", "--results", "other"))
    slope.interrupt_at += [3]
    result = run("train", "slope", "--json")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Interrupted in epoch 3 of 6. The same command continues from there.\n"
    plan = records(run("train", "slope", "--seeds", 2, "--dry-run", "--json"))
    assert [step["begun"] for step in plan] == [True, False]
    assert re.search(r"2-seed0 +begun ", run("train", "slope", "--dry-run").stdout)
    assert re.search(r"2-seed0 +missing ", run("train", "slope", "--dry-run", "--no-resume").stdout)
    resumed = run("train", "slope", "--json")
    assert resumed.stderr == "Seed 0 continues from step 3.\n"
    (record,) = records(resumed)
    assert record["epochs"] == whole["epochs"]
    slope.interrupt_at += [3]
    result = run("train", "slope", "--again", "--no-resume")
    assert result.stderr.endswith("The same command without --no-resume continues from there.\n")


def test_ctrl_c_with_several_seeds_shows_those_that_are_done(run: Run) -> None:
    run("train", "slope", "--epochs", 2)
    slope.interrupt_at += [1]
    result = run("train", "slope", "--epochs", 2, "--seeds", 3)
    assert result.exit_code == 130
    assert result.stderr == "Interrupted with seed 1 in epoch 1 of 2. The same command continues from there.\n"
    assert "already done" in result.stdout
    assert result.stdout.count("results/slope/") == 1


def test_ctrl_c_before_the_training_promises_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setitem(RECIPES._entries, "slope", dataclasses.replace(slope.RECIPE, run=interrupted))
    result = run("train", "slope")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


def test_progress_is_told_to_the_bar(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def watched(self: waiting.ProgressBar, words: str) -> Callable[..., None]:
        return lambda *progress: seen.append((words, *progress[:2]))

    monkeypatch.setattr(waiting.ProgressBar, "start_training", watched)
    run("train", "slope", "--seeds", 2, "--epochs", 2)
    assert seen == [
        ("Seed 0 (1 of 2)", 1, 2),
        ("Seed 0 (1 of 2)", 2, 2),
        ("Seed 1 (2 of 2)", 1, 2),
        ("Seed 1 (2 of 2)", 2, 2),
    ]


def seen_by(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[Runtime]:
    """The sessions that the recipe is run with from here on."""
    seen: list[Runtime] = []

    def watched(config: slope.Config, runtime: Runtime) -> dict[str, Any]:
        seen.append(runtime)
        runtime.report_stage("drawing the line")
        return slope.run(config, runtime)

    monkeypatch.setitem(RECIPES._entries, "slope", dataclasses.replace(slope.RECIPE, run=watched, **changes))
    return seen


def test_workers_are_the_cores_that_are_free(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_by(monkeypatch, reads_images=True)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)), raising=False)
    for given in ([], ["--threads", 4], ["--threads", 9], ["--workers", 3], ["--workers", 0]):
        assert run("train", "slope", "--again", *given).exit_code == 0
    assert [runtime.workers for runtime in seen] == [5, 2, 0, 3, 0]
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    run("train", "slope", "--again")
    assert seen[-1].workers == 8
    assert "--workers" in run("train", "slope", "--help").stdout
    assert run("train", "slope", "--workers", -1).exit_code == 2


def test_recipes_that_read_no_images_have_no_workers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_by(monkeypatch)
    assert "--workers" not in run("train", "slope", "--help").stdout
    result = run("train", "slope", "--workers", 2)
    assert (result.exit_code, seen) == (2, [])
    assert "No such option: --workers" in result.stderr
    assert run("train", "slope").exit_code == 0
    assert seen[0].workers == 0


def test_settings_with_a_group_have_a_panel_of_their_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Config(slope.Config):
        extra: int = fields.config_field(1, "More.", group="Additions")
        also: bool = fields.config_field(False, "Or not.", group="Additions")

    monkeypatch.setitem(RECIPES._entries, "slope", dataclasses.replace(slope.RECIPE, config=Config))
    shown = run("train", "slope", "--help").stdout
    panels = [
        (panel, re.findall(r" (--[a-z-]+) ", text)) for panel, text in re.findall(r"╭─ ([\w ]+) ─+╮([^╰]*)", shown)
    ]
    flags = dict(panels)
    assert [flag for flag in flags["Additions"] if "no-" not in flag] == ["--extra", "--also"]
    assert "--slope" in flags["Experiment"]
    assert "--extra" not in flags["Experiment"]


def test_speed_and_waiting_are_told_where_a_record_has_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    paces = iter([{"images_per_second": 80.0, "waiting": 0.02}, {"images_per_second": 92.0, "waiting": 0.06}, {}])

    def paced(config: slope.Config, runtime: Runtime) -> dict[str, Any]:
        return slope.run(config, runtime) | {"pace": next(paces)}

    monkeypatch.setitem(RECIPES._entries, "slope", dataclasses.replace(slope.RECIPE, run=paced))
    words = "Trained at 86 images/s; 4 % of that time was spent waiting for data."
    assert words in run("train", "slope", "--seeds", 2).stdout.splitlines()
    assert "waiting for data" not in run("train", "slope", "--seed", 5).stdout


def test_class_lists_and_unread_pictures_are_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {
        "class_list": {"name": "animals.txt", "sha256": "0123456789abcdef", "classes": 3},
        "skipped": {"train": 4, "validation": 0, "test": 1},
    }

    def read(config: slope.Config, runtime: Runtime) -> dict[str, Any]:
        return slope.run(config, runtime) | {"data": facts}

    monkeypatch.setitem(RECIPES._entries, "slope", dataclasses.replace(slope.RECIPE, run=read))
    lines = run("train", "slope", "--seeds", 2).stdout.splitlines()
    assert lines.count("The 3 classes of animals.txt, sha256 0123456789abcdef.") == 1
    assert lines.count("Images that could not be read and were left out: train 4 times, test 1.") == 1


def test_a_result_of_other_data_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("train", "slope")
    other = dataclasses.replace(slope.RECIPE, fingerprint=lambda config, runtime: "other")
    monkeypatch.setitem(RECIPES._entries, "slope", other)
    refused = run("train", "slope")
    assert refused.exit_code == 2
    assert "of the same settings on other data" in " ".join(refused.stderr.split())
    assert run("train", "slope", "--again").exit_code == 0


def test_the_command_line_starts_without_the_libraries_of_recipes() -> None:
    libraries = ("accelerate", "torch_geometric", "timm", "sklearn", "plotly", "yaml", "uncollapse.lab.recipe")
    code = f"import sys, uncollapse.cli; print([name for name in {libraries} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_many_figures_stand_below_each_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(config: slope.Config, runtime: Runtime) -> dict[str, Any]:
        record = slope.run(config, runtime)
        return record | {"figures": {f"test_by_judge_{at}": at / 10 for at in range(9)} | {"uniformity": -3.5}}

    monkeypatch.setitem(RECIPES._entries, "slope", dataclasses.replace(slope.RECIPE, run=judged))
    result = run("train", "slope", "--epochs", 1, "--seeds", 2)
    lines = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    assert ["seed 0", "seed 1", "mean ± std"] in lines
    assert ["test by judge 3", "30.00 %", "30.00 %", "30.00 ± 0.00 %"] in lines
    assert ["uniformity", "-3.5", "-3.5", "-3.5 ± 0"] in lines
    assert any(line[:1] == ["time"] for line in lines)


def test_nothing_is_broken_inside_a_word_on_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = functools.partial(Console, width=30, force_terminal=True, color_system=None)
    monkeypatch.setattr(console, "stdout_console", narrow)
    plan = run("train", "slope", "--dry-run").stdout
    assert re.match(r"results/slope/2-seed0--\w+\.json\n · missing, about 5 min on one *\n   core *\n", plan), plan
    title = run("train", "slope", "--slope", "0.123456789", "--noise", "0.123456789").stdout.splitlines()[:2]
    assert [line.strip() for line in title] == ["slope --slope 0.123456789", "--noise 0.123456789"]


def test_a_dry_run_says_which_data_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(config: slope.Config, runtime: Runtime) -> None:
        if runtime.data_root is None:
            raise UsageError("There is no line; set --data-root.")

    monkeypatch.setitem(RECIPES._entries, "slope", dataclasses.replace(slope.RECIPE, check_data=check))
    assert "something is missing: There is no line; set --data-root." in run("train", "slope", "--dry-run").stdout
    plan = json.loads(run("train", "slope", "--seeds", 2, "--dry-run", "--json").stdout)
    assert [entry["missing"] for entry in plan] == ["There is no line; set --data-root."] * 2
    assert "missing:" not in run("train", "slope", "--dry-run", "--data-root", "here").stdout
    assert "There is no line" in run("sweep", "slope", "--grid", "slope=1", "--dry-run").stderr


def test_an_early_alarm_ends_with_code_3_and_advice(run: Run) -> None:
    plain = ("train", "gcn-depth", "--norm", "none", "--layers", 16, "--epochs", 40, "--early-alarm")
    result = run(*plain, "--json")
    assert result.exit_code == 3, result.stderr
    alarm = json.loads(result.stdout)["alarm"]
    assert {"alarm", *alarm} == documented("train --early-alarm")
    assert (alarm["seed"], alarm["step"], alarm["steps"]) == (0, 2, 40)
    assert alarm["causes"] == ["no_residual"]
    assert any(code.startswith('uc.attach(model, "pre_activation_residual"') for code in alarm["advice"])
    assert "rank_share of block 14 is below 0.25" in alarm["met"][0]
    assert "Early alarm at step 2 of 40" in run(*plain).stdout
    healthy = run("train", "gcn-depth", "--norm", "none", "--layers", 2, "--epochs", 20, "--early-alarm")
    assert healthy.exit_code == 0, healthy.stderr
