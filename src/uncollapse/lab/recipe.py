"""Recipes by name. One file is one experiment: data, model, cure, training, evaluation, the paper's numbers.

A recipe is imported when it is asked for, and its libraries when it runs; the names are there before.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.engine.runtime import Session
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.search.variables import Search
from uncollapse.lab.tables.paper_table import Board
from uncollapse.registry import Later, Registry

if TYPE_CHECKING:
    from uncollapse.lab.tables.table_page import Picture

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Recipe:
    """An experiment.

    config: a frozen dataclass with a default for every field and a `seed`, see `configs.setting`. run: gives a record
    that can be written as JSON. name_of: what a run is called in the names of files. cost: roughly its seconds on one
    core. boards: tables of its results, the first one unless another is named. grids: sweeps by name. presets: settings
    by name, such as a paper's. quick: settings of a run that takes less than two minutes and needs no data but what is
    installed; None if there is none. reads_images: processes may read ahead of its training, see `Session.workers`.
    alone: several processes cannot share its work: the first one does it.
    same_data: whether a result with the same settings is of the data at hand; always, where it is not given. pictures:
    of results, for the page of a table. search: what `uncollapse tune` may vary; None if that is nothing.
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
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = None
    reads_images: bool = False
    alone: bool = False
    same_data: Callable[[Any, Session, Mapping[str, Any]], bool] | None = None
    pictures: Callable[[Sequence[Mapping[str, Any]]], Iterable["Picture"]] | None = None
    search: Search | None = None

    def preset(self, name: str) -> Mapping[str, Any]:
        """The settings that it has under a name; a UsageError that lists the names if it has none."""
        return self._named("preset", self.presets, name, "leave out --preset")

    def grid(self, name: str) -> tuple[Grid, ...]:
        """The grids that it has under a name; a UsageError that lists the names if it has none."""
        return self._named("grid", self.grids, name, "write fields with values")

    def _named(self, kind: str, entries: Mapping[str, Entry], name: str, instead: str) -> Entry:
        if name not in entries:
            hint = did_you_mean(name, entries)
            there = f"There are: {', '.join(entries)}." if entries else f"It has none; {instead}."
            raise UsageError(f"{self.name} has no {kind} named {name!r}.{hint} {there}")
        return entries[name]


RECIPES: Registry[Recipe] = Registry("recipe")
MODULES = {  # recipe -> its module in `experiments`
    "gcn-depth": "gcn.recipe",
    "vit-digits": "vit.digits",
    "vit": "vit.recipe",
    "glue": "glue.recipe",
    "bert-depth": "bert_depth.recipe",
    "circle": "contrastive.circle",
    "potentials": "sphere.potentials",
    "asymptotics": "sphere.asymptotics",
    "contrast": "contrastive.recipe",
    "moco": "moco.recipe",
    "depth-probe": "depth_probe.recipe",
    "sentences": "sentences.recipe",
}


def _recipe(file: str) -> Recipe:
    """What a file says of its recipe."""
    module = importlib.import_module(f"uncollapse.lab.experiments.{file}")
    facts = (module.NAME, module.TITLE, module.PAPER, module.Config, module.run, module.name_of, module.cost)
    more: dict[str, Any] = {
        "presets": getattr(module, "PRESETS", {}),
        "quick": getattr(module, "QUICK", None),
        "reads_images": getattr(module, "READS_IMAGES", False),
        "alone": getattr(module, "ALONE", False),
        "same_data": getattr(module, "same_data", None),
        "pictures": getattr(module, "pictures", None),
        "search": getattr(module, "SEARCH", None),
    }
    return Recipe(*facts, boards=module.BOARDS, grids=module.GRIDS, **more)


for _name, _file in MODULES.items():
    RECIPES.add(_name, Later(partial(_recipe, _file)))
