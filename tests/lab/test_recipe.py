"""The registry of recipes."""

import dataclasses
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from uncollapse.lab import experiments
from uncollapse.lab.config.fields import build
from uncollapse.lab.recipe import MODULES, RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_complete(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.name == name
    assert "arXiv" in recipe.paper
    fields = {field.name: field for field in dataclasses.fields(recipe.config())}
    assert "seed" in fields
    assert all(field.metadata["help"].endswith(".") for field in fields.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.config().seed = 1
    assert re.fullmatch(r"[A-Za-z0-9._-]+", recipe.name_of(recipe.config()))
    assert recipe.cost(recipe.config()) > 0


@pytest.mark.parametrize("name", RECIPES)
def test_boards_and_grids_name_fields_of_the_recipe(name: str) -> None:
    recipe = RECIPES[name]
    fields = {field.name for field in dataclasses.fields(recipe.config)}
    assert recipe.tables
    for board in recipe.tables.values():
        assert board.named <= fields
        for number in board.published:
            fixed = {name: value for name, value in number.cell.items() if board.row_of is None or name != board.rows}
            build(recipe.config, fixed)  # a UsageError if a value is not allowed; a row in words is none
    for grids in recipe.grids.values():
        assert all(grid.cells(recipe.config) for grid in grids)


def test_every_module_that_has_a_recipe_is_registered() -> None:
    folder = Path(experiments.__file__).parent
    files = {path for path in folder.rglob("*.py") if "\nRECIPE = " in path.read_text("utf-8")}
    assert {".".join(path.relative_to(folder).with_suffix("").parts) for path in files} == set(MODULES.values())


def test_a_typo_in_a_field_is_an_error() -> None:
    recipe = RECIPES["potentials"]
    with pytest.raises(TypeError, match="table"):
        replace(recipe, table={})


def test_an_unknown_recipe_names_the_others() -> None:
    with pytest.raises(KeyError, match=r"No recipe is named .vit-digit.\. Did you mean .vit-digits."):
        RECIPES["vit-digit"]


def test_no_library_of_a_recipe_is_imported_before_it_runs() -> None:
    code = (
        "import sys, uncollapse.lab.recipe; "
        "print([m for m in ('timm', 'sklearn', 'torch_geometric', 'torchvision', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
