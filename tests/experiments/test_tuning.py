"""The comparison of a search with a grid, on a recipe that takes no time, and the tables that are made of it."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from experiments.tuning import TASKS, Comparison, chosen, compared
from tests.lab.sweep_recipe import registered
from website.pages import tuning as tables

from uncollapse.lab.config import fields
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import build_record


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with registered(monkeypatch, "tiny_tune") as module:
        yield module


def test_both_ways_cost_the_same(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = [{"cure": "none"}, *({"cure": "good", "scale": scale} for scale in (0.01, 0.02, 0.05, 0.1, 0.2))]
    task = Comparison(tiny.NAME, {"epochs": 5}, grid, (), "test", ())
    found = compared(task, tmp_path, Runtime(tmp_path))
    assert found["hand"]["best"]["settings"] == {"cure": "good", "scale": 0.2}
    assert found["hand"]["cost"]["trainings"] == 6
    assert 5 < found["search"]["cost"]["trainings"] <= 6
    assert found["search"]["baseline"]["validation"] == 0.3
    assert found["search"]["best"]["test"] == 0.5
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "TITLES", {tiny.NAME: "tiny"})
    assert tables.means()[1] == []
    assert tables.verdict() == "Not run yet."
    kept = json.dumps(build_record("experiments.tuning", task, 1.0, (), **found))
    (tmp_path / "tiny-seed0.json").write_text(kept)
    assert [row[:3] for row in tables.compared()[1]] == [("tiny", "0", name) for name in tables.WAYS.values()]
    assert [row[3] for row in tables.means()[1]] == ["6.0", f"{found['search']['cost']['trainings']:.1f}", "1.0"]
    assert "on test in 1 of 1 cases, by +0.0 points" in tables.verdict()


@pytest.mark.parametrize("name", TASKS)
def test_the_tasks_can_be_had(name: str) -> None:
    task = TASKS[name]
    recipe = RECIPES[task.recipe]
    made = [fields.build(recipe.config, {**task.settings, **point}) for point in task.grid]
    assert recipe.search is not None
    assert made[0] == dataclasses.replace(made[1], **recipe.search.baseline) or made[0].norm == "none"
    assert len(set(made)) == len(made)


def test_of_equals_the_first_is_chosen() -> None:
    figures = (None, 0.5, 0.7, 0.7)
    assert chosen([{"validation": figure, "at": at} for at, figure in enumerate(figures)])["at"] == 2
