"""`train --save`: the trained model goes into the folder of its run."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab import slope
from typer.testing import Result

from uncollapse.errors import NotFiniteError
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs import saved_models

Run = Callable[..., Result]
WEIGHTS = torch.nn.Linear(1, 1)


def run_and_save(config: slope.Config, runtime: Runtime) -> dict[str, Any]:
    record = slope.run(config, runtime)
    saved_models.save_weights(runtime, WEIGHTS, config)
    return record


def diverges(config: slope.Config, runtime: Runtime) -> dict[str, Any]:
    raise NotFiniteError("The loss is not finite in epoch 1.")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the recipe of lines run in one way or another."""
    return lambda run: monkeypatch.setitem(RECIPES._entries, "slope", dataclasses.replace(slope.RECIPE, run=run))


def models(tmp_path: Path) -> list[str]:
    return sorted(path.parent.name.partition("--")[0] for path in (tmp_path / "runs" / "slope").glob("*/model"))


def test_the_model_of_each_seed_is_saved(run: Run, register: Callable[..., None], tmp_path: Path) -> None:
    register(run_and_save)
    result = run("train", "slope", "--seeds", 2, "--save")
    assert result.exit_code == 0, result.stderr
    assert models(tmp_path) == ["2-seed0", "2-seed1"]
    lines = result.stderr.splitlines()
    assert [line.partition("--")[0] for line in lines] == ["Saved: runs/slope/2-seed0", "Saved: runs/slope/2-seed1"]
    assert all(line.endswith("/model.") for line in lines)
    (folder,) = (tmp_path / "runs" / "slope").glob("2-seed1--*")
    there = sorted(path.name for path in folder.rglob("*"))
    assert there == ["config.json", "model", "model.safetensors"]
    repeated = run("train", "slope", "--config", folder / "model" / "config.json")  # it is a configuration
    assert "1 of 1 already has a result" in repeated.stderr


def test_nothing_is_saved_without_the_flag(run: Run, register: Callable[..., None], tmp_path: Path) -> None:
    register(run_and_save)
    result = run("train", "slope")
    assert (result.exit_code, result.stderr, models(tmp_path)) == (0, "", [])


def test_a_result_that_is_there_says_how_to_save_its_model(
    run: Run, register: Callable[..., None], tmp_path: Path
) -> None:
    register(run_and_save)
    plain = json.loads(run("train", "slope", "--json").stdout)
    result = run("train", "slope", "--save", "--json")
    assert result.stderr.startswith("The model of seed 0 was not saved")
    assert "--again" in result.stderr
    assert (json.loads(result.stdout), models(tmp_path)) == (plain, [])
    saved = run("train", "slope", "--save", "--again", "--json")
    assert saved.stderr.startswith("Saved: ")
    assert json.loads(saved.stdout)[0]["figures"] == plain[0]["figures"]
    assert models(tmp_path) == ["2-seed0"]
    assert run("train", "slope", "--save").stderr.startswith("The model of seed 0 was saved before: runs/slope/2-seed0")


def test_a_recipe_that_saves_no_model(run: Run, register: Callable[..., None], tmp_path: Path) -> None:
    register(slope.run)
    result = run("train", "slope", "--save")
    assert (result.exit_code, "slope does not save models" in result.stderr) == (0, True)


def test_a_run_that_diverges_saves_nothing(run: Run, register: Callable[..., None], tmp_path: Path) -> None:
    register(run_and_save)
    run("train", "slope", "--save")
    register(diverges)
    result = run("train", "slope", "--save", "--again")
    assert result.stderr == "The model of seed 0 was not saved: The loss is not finite in epoch 1.\n"


def test_an_interrupted_run_saves_its_model_when_it_is_done(
    run: Run, register: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(run_and_save)
    monkeypatch.setattr(slope, "interrupt_at", [3])
    assert run("train", "slope", "--save").exit_code == 130
    assert models(tmp_path) == []
    assert run("train", "slope", "--save").exit_code == 0
    (folder,) = (tmp_path / "runs" / "slope").iterdir()
    assert [path.name for path in folder.iterdir()] == ["model"]  # the checkpoints went


def test_a_model_that_cannot_be_saved_is_one_sentence(
    run: Run, register: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    register(run_and_save)
    monkeypatch.setattr(saved_models, "_sync_files", full)
    result = run("train", "slope", "--save")
    assert (result.exit_code, result.stdout, models(tmp_path)) == (2, "", [])
    assert result.stderr.startswith("Error: The model cannot be saved in runs/slope/2-seed0--")
    assert "No space left on device" in result.stderr
