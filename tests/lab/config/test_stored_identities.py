"""Every stored result loads with today's configs, and its identity is the one in its file name."""

import json
from pathlib import Path

import pytest

from uncollapse.lab.config.fields import build, identity
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results

FOLDER = Path(__file__).parents[3] / "results"
STORED = {name: len(list((FOLDER / name).glob("*.json"))) for name in RECIPES}


def test_there_are_stored_results() -> None:
    assert sum(STORED.values()) >= 374


@pytest.mark.parametrize("name", [name for name, count in STORED.items() if count])
def test_stored_results_load_and_keep_their_identity(name: str) -> None:
    recipe = RECIPES[name]
    assert len(Results(FOLDER).all(recipe)) == STORED[name]
    for path in (FOLDER / name).glob("*.json"):
        config = build(recipe.config, json.loads(path.read_text(encoding="utf-8"))["config"])
        assert path.stem.endswith(f"--{identity(name, config)}"), path
