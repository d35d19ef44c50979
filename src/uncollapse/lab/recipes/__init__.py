"""Recipes by name. One file is one experiment: data, model, cure, training, evaluation.

Their libraries are imported when a recipe runs, not before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uncollapse.lab.recipes import deep_gcn, vit_digits
from uncollapse.registry import Registry


@dataclass(frozen=True)
class Recipe:
    """An experiment. `run` takes a `config` and gives a record that can be written as JSON."""

    name: str
    title: str
    paper: str
    config: type
    run: Callable[[Any], dict[str, Any]]


RECIPES: Registry[Recipe] = Registry("recipe")
for _module in (vit_digits, deep_gcn):
    RECIPES.add(_module.NAME, Recipe(_module.NAME, _module.TITLE, _module.PAPER, _module.Config, _module.run))
