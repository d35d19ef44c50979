"""--preset: settings of a recipe by name, and the paper's among them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.lab import slope
from typer.testing import Result

from uncollapse.lab.config.fields import build, config_fields
from uncollapse.lab.experiments.glue import recipe as glue
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results

Run = Callable[..., Result]
PRESETS = {"steep": {"slope": 8.0, "noise": 1.0, "weight_decay": 0.5, "epochs": 2, "seed": 7}, "flat": {"slope": 0.5}}
RECIPE = dataclasses.replace(slope.RECIPE, presets=PRESETS)


@pytest.fixture(autouse=True)
def _recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES._entries, "slope", RECIPE)


def config_of(run: Run, *arguments: object) -> slope.Config:
    result = run("train", "slope", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    (record,) = json.loads(result.stdout)
    return slope.Config(**record["config"] | {"steps": tuple(record["config"]["steps"])})


def test_a_preset_counts_more_than_defaults_and_less_than_all_else(run: Run, tmp_path: Path) -> None:
    assert config_of(run, "--preset", "steep") == slope.Config(8.0, 2, noise=1.0, weight_decay=0.5, seed=7)
    (tmp_path / "a.yaml").write_text("noise: 2\nweight_decay: 0.25\nslope: 7\n", encoding="utf-8")
    more = ["--config", "a.yaml", "--set", "weight_decay=0.125", "--set", "slope=6", "--slope", 2]
    found = config_of(run, *more, "--preset", "steep")
    assert found == slope.Config(2.0, 2, noise=2.0, weight_decay=0.125, seed=7)  # 2 is the default of slope


def test_seeds_are_counted_from_that_of_the_preset(run: Run) -> None:
    result = run("train", "slope", "--preset", "steep", "--seeds", 2, "--dry-run", "--json")
    assert [step["name"] for step in json.loads(result.stdout)] == ["8-seed7", "8-seed8"]


def test_a_result_is_that_of_its_settings_whether_a_preset_gave_them_or_not(run: Run) -> None:
    config_of(run, "--preset", "flat", "--epochs", 1)
    result = run("train", "slope", "--slope", 0.5, "--epochs", 1)
    assert "1 of 1 already has a result" in result.stderr


@pytest.mark.parametrize(
    ("command", "arguments", "sentence"),
    [
        ("train", ["slope"], "slope has no preset named 'step'. Did you mean 'steep'? There are: steep, flat."),
        (
            "sweep",
            ["slope", "--grid", "epochs=1,2"],
            "slope has no preset named 'step'. Did you mean 'steep'? There are: steep, flat.",
        ),
        (
            "sweep",
            ["vit-digits", "--grid", "depth"],
            "vit-digits has no preset named 'step'. It has none; leave out --preset.",
        ),
    ],
)
def test_an_unknown_preset_is_one_sentence(run: Run, command: str, arguments: list[str], sentence: str) -> None:
    result = run(command, *arguments, "--preset", "step")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {sentence}\n")


def test_only_recipes_with_presets_have_the_flag(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name, recipe in RECIPES.items():
        shown = " ".join(run("train", name, "--help").stdout.replace("│", " ").split())
        assert ("--preset NAME" in shown) == bool(recipe.presets)
        assert all(preset in shown for preset in recipe.presets)
    result = run("train", "vit-digits", "--preset", "paper")
    assert result.exit_code == 2
    assert "No such option: --preset" in result.stderr


def test_a_file_cannot_name_a_preset(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("preset: steep\n", encoding="utf-8")
    result = run("train", "slope", "--config", "a.yaml")
    assert "preset is a flag of the command" in result.stderr


def test_a_sweep_takes_from_a_preset_what_its_grids_leave_open(run: Run, tmp_path: Path) -> None:
    grids = ["--grid", "epochs=1,3 seed=0", "--grid", "noise=none", "--set", "weight_decay=0"]
    result = run("sweep", "slope", "--preset", "steep", *grids, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    steep = slope.Config(slope=8.0, noise=1.0, weight_decay=0.0)
    wanted = [dataclasses.replace(steep, epochs=1), dataclasses.replace(steep, epochs=3)]
    wanted.append(dataclasses.replace(steep, noise=None, epochs=2, seed=7))
    files = {str(Results(Path("results")).path(RECIPE, config)) for config in wanted}
    assert {step["file"] for step in json.loads(result.stdout)["missing"]} == files


def test_recipes_are_listed_with_their_presets(run: Run) -> None:
    listed = run("list", "recipes").stdout
    assert all(name in listed for name in ("presets", "paper-bert", "paper-albert", "paper-v2", "steep"))


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.presets])
def test_presets_are_allowed(name: str) -> None:
    recipe = RECIPES[name]
    for preset in recipe.presets.values():
        assert dataclasses.asdict(build(recipe.config, preset)).keys() == config_fields(recipe.config).keys()


OPEN = {"glue": {"task"}, "bert-depth": {"depth", "width", "heads"}}  # a checkpoint has its own width and heads


@pytest.mark.parametrize(
    "name", [name for name, r in RECIPES.items() if r.presets and "task" in config_fields(r.config)]
)
def test_presets_on_sentences_name_every_setting_but_what_varies(name: str) -> None:
    """A default that changes later must not change what a preset means."""
    recipe = RECIPES[name]
    for preset in recipe.presets.values():
        made = dataclasses.asdict(build(recipe.config, preset))
        loss = dataclasses.asdict(build(recipe.config, {**preset, "cure": "uniform_loss"}))
        lost = {item for item in preset.items() if item not in made.items()}
        assert lost <= {("uniform_on", loss["uniform_on"])}  # of the uniformity loss, not of ContraNorm
        assert config_fields(recipe.config).keys() - preset.keys() == OPEN[name]


# What ContraNorm's authors trained with (arXiv 2303.06562 and its code), for all of GLUE.
SHARED: dict[str, Any] = {"batch": 32, "epochs": 5, "max_length": 128, "seed": 2021}
SHARED |= {"cure": "contra_norm", "at": "attention.residual", "dual": False, "norm": "layer"}  # places 7 and 4
SHARED |= {"padding": "counted", "temperature": 1.0}  # padding tokens are negatives; the temperature is never used
SHARED |= {"holdout": 0.0, "examples": 0}  # all of the training set is trained on
BERT, ALBERT = "google-bert/bert-base-uncased", "albert/albert-base-v2"
PAPER: dict[str, dict[str, Any]] = {
    "paper-bert": SHARED | {"lr": 2e-5, "axis": "tokens", "identity": True, "model": BERT},  # (1+s)x − s·m
    "paper-albert": SHARED | {"lr": 2e-5, "axis": "tokens", "identity": False, "model": ALBERT},  # x − s·m
    "paper-v2": SHARED | {"lr": 4e-5, "axis": "features", "identity": True, "model": BERT},
}


def test_the_paper_s_presets_are_the_paper_s_settings() -> None:
    assert glue.RECIPE.presets.keys() == PAPER.keys()
    for name, paper in PAPER.items():
        preset = glue.RECIPE.presets[name]
        assert {field: preset[field] for field in paper} == paper
        assert preset["scale"] in (0.005, 0.01, 0.05, 0.1, 0.2)  # those that were tried


def test_a_preset_of_glue_on_the_command_line(run: Run) -> None:
    flags = ["--task", "cola", "--scale", 0.05, "--dry-run", "--json"]
    (step,) = json.loads(run("train", "glue", "--preset", "paper-v2", *flags).stdout)
    config = build(glue.Config, dict(glue.RECIPE.presets["paper-v2"]) | {"task": "cola", "scale": 0.05})
    assert step["path"] == str(Results(Path("results")).path(RECIPES["glue"], config))
    assert step["name"] == "cola-google-bert-bert-base-uncased-contra_norm-v2-seed2021"


def test_quick_settings_count_as_a_preset_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = dataclasses.replace(RECIPE, quick={"slope": 3.0, "epochs": 1})
    monkeypatch.setitem(RECIPES._entries, "slope", quick)
    assert config_of(run, "--quick") == slope.Config(3.0, 1)
    assert config_of(run, "--quick", "--slope", 5) == slope.Config(5.0, 1)
    result = run("train", "slope", "--quick", "--preset", "steep")
    assert result.exit_code == 2
    assert "--quick and --preset steep exclude each other" in " ".join(result.stderr.split())


def test_a_recipe_without_quick_settings_has_no_such_flag(run: Run) -> None:
    result = run("train", "slope", "--quick")
    assert result.exit_code == 2
    assert "No such option" in result.stderr


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.quick is not None])
def test_quick_runs_are_short_and_need_no_data(name: str) -> None:
    recipe = RECIPES[name]
    config = build(recipe.config, dict(recipe.quick or {}))
    assert recipe.cost(config) < 120
    assert getattr(config, "data", "csbm") in ("digits", "csbm", "arxiv_like", "pydoc", "rendered")
