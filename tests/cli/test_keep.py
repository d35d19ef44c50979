"""train --keep: the trained model in the folder of its run, and what is said of it."""

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
from uncollapse.lab.runs import model_folder, saved_models

Run = Callable[..., Result]
WEIGHTS = torch.nn.Linear(1, 1)


def keeps(config: slope.Config, runtime: Runtime) -> dict[str, Any]:
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


def test_the_model_of_each_seed_is_kept_and_told(run: Run, register: Callable[..., None], tmp_path: Path) -> None:
    register(keeps)
    result = run("train", "slope", "--seeds", 2, "--keep")
    assert result.exit_code == 0, result.stderr
    assert models(tmp_path) == ["2-seed0", "2-seed1"]
    lines = result.stderr.splitlines()
    assert [line.partition("--")[0] for line in lines] == ["Kept: runs/slope/2-seed0", "Kept: runs/slope/2-seed1"]
    assert all(line.endswith("/model.") for line in lines)
    (folder,) = (tmp_path / "runs" / "slope").glob("2-seed1--*")
    there = sorted(path.name for path in folder.rglob("*"))
    assert there == ["SHA256SUMS", "config.json", "model", "model.safetensors"]
    repeated = run("train", "slope", "--config", folder / "model" / "config.json")  # it is a configuration
    assert "1 of 1 was there already" in repeated.stderr


def test_nothing_is_kept_or_said_without_the_flag(run: Run, register: Callable[..., None], tmp_path: Path) -> None:
    register(keeps)
    result = run("train", "slope")
    assert (result.exit_code, result.stderr, models(tmp_path)) == (0, "", [])


def test_a_result_that_is_there_says_how_to_keep_its_model(
    run: Run, register: Callable[..., None], tmp_path: Path
) -> None:
    register(keeps)
    plain = json.loads(run("train", "slope", "--json").stdout)
    result = run("train", "slope", "--keep", "--json")
    words = "The model of seed 0 was not kept, as its result was there already; --again runs it and keeps it.\n"
    assert result.stderr.startswith(words)
    assert (json.loads(result.stdout), models(tmp_path)) == (plain, [])
    kept = run("train", "slope", "--keep", "--again", "--json")
    assert kept.stderr.startswith("Kept: ")
    assert json.loads(kept.stdout)[0]["figures"] == plain[0]["figures"]
    assert models(tmp_path) == ["2-seed0"]
    assert run("train", "slope", "--keep").stderr.startswith("The model of seed 0 was kept before: runs/slope/2-seed0")


def test_a_recipe_that_keeps_no_model_is_told(run: Run, register: Callable[..., None], tmp_path: Path) -> None:
    register(slope.run)
    result = run("train", "slope", "--keep")
    assert (result.exit_code, result.stderr) == (0, "The model of seed 0 was not kept: slope keeps none.\n")


def test_a_run_that_diverges_keeps_nothing(run: Run, register: Callable[..., None], tmp_path: Path) -> None:
    register(keeps)
    run("train", "slope", "--keep")
    register(diverges)
    result = run("train", "slope", "--keep", "--again")
    assert result.stderr == "The model of seed 0 was not kept: The loss is not finite in epoch 1.\n"


def test_an_interrupted_run_keeps_its_model_when_it_is_done(
    run: Run, register: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(keeps)
    monkeypatch.setattr(slope, "interrupt_at", [3])
    assert run("train", "slope", "--keep").exit_code == 130
    assert models(tmp_path) == []
    assert run("train", "slope", "--keep").exit_code == 0
    (folder,) = (tmp_path / "runs" / "slope").iterdir()
    assert [path.name for path in folder.iterdir()] == ["model"]  # the checkpoints went


def test_a_model_that_cannot_be_kept_is_one_sentence(
    run: Run, register: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    register(keeps)
    monkeypatch.setattr(model_folder, "_sync", full)
    result = run("train", "slope", "--keep")
    assert (result.exit_code, result.stdout, models(tmp_path)) == (2, "", [])
    assert result.stderr.startswith("Error: The model cannot be kept in runs/slope/2-seed0--")
    assert "No space left on device" in result.stderr
