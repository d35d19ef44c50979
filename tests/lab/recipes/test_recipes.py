"""The registry of recipes."""

import dataclasses
import subprocess
import sys

import pytest

from uncollapse.lab.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_complete(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.name == name
    assert "arXiv" in recipe.paper
    assert recipe.title.split()[0] == "A"
    fields = {field.name for field in dataclasses.fields(recipe.config())}
    assert "seed" in fields
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.config().seed = 1
    assert callable(recipe.run)


def test_an_unknown_recipe_names_the_others() -> None:
    with pytest.raises(KeyError, match=r"No recipe is named .vit_digit.\. Did you mean .vit_digits."):
        RECIPES["vit_digit"]


def test_no_library_of_a_recipe_is_imported_before_it_runs() -> None:
    code = (
        "import sys, uncollapse.lab.recipes; "
        "print([m for m in ('timm', 'sklearn', 'torch_geometric', 'torchvision') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
