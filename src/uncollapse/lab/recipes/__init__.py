"""Recipes by name. One file is one experiment: data, model, cure, training, evaluation, the paper's numbers.

Their libraries are imported when a recipe runs, not before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from uncollapse.lab.board import Board
from uncollapse.lab.grids import Grid
from uncollapse.lab.recipes import bert_depth, gcn_depth, glue, vit_digits
from uncollapse.lab.sessions import Session
from uncollapse.registry import Registry


@dataclass(frozen=True)
class Recipe:
    """An experiment.

    config: a frozen dataclass with a default for every field and a `seed`, see `configs.setting`. run: gives a record
    that can be written as JSON. name_of: what a run is called in the names of files. cost: roughly its seconds on one
    core. boards: tables of its results, the first one unless another is named. grids: sweeps by name.
    """

    name: str
    title: str
    paper: str
    config: type
    run: Callable[[Any, Session], dict[str, Any]]
    name_of: Callable[[Any], str]
    cost: Callable[[Any], float]
    boards: Mapping[str, Board] = field(default_factory=dict)
    grids: Mapping[str, tuple[Grid, ...]] = field(default_factory=dict)


RECIPES: Registry[Recipe] = Registry("recipe")
for _module in (gcn_depth, vit_digits, glue, bert_depth):
    _facts = (_module.NAME, _module.TITLE, _module.PAPER, _module.Config, _module.run, _module.name_of, _module.cost)
    RECIPES.add(_module.NAME, Recipe(*_facts, boards=_module.BOARDS, grids=_module.GRIDS))
