"""Recipes by name. One file is one experiment: data, model, cure, training, evaluation, the paper's numbers.

Their libraries are imported when a recipe runs, not before.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from uncollapse.lab.board import Board
from uncollapse.lab.grids import Grid
from uncollapse.lab.recipes import (
    asymptotics,
    bert_depth,
    circle,
    contrast,
    depth_probe,
    gcn_depth,
    glue,
    moco,
    potentials,
    sentences,
    vit,
    vit_digits,
)
from uncollapse.lab.sessions import Session
from uncollapse.loading.errors import UsageError
from uncollapse.registry import Registry

if TYPE_CHECKING:
    from uncollapse.lab.pages import Picture

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Recipe:
    """An experiment.

    config: a frozen dataclass with a default for every field and a `seed`, see `configs.setting`. run: gives a record
    that can be written as JSON. name_of: what a run is called in the names of files. cost: roughly its seconds on one
    core. boards: tables of its results, the first one unless another is named. grids: sweeps by name. presets: settings
    by name, such as a paper's. quick: settings of a run that takes less than two minutes and needs no data but what is
    installed; None if there is none. reads_images: processes may read ahead of its training, see `Session.workers`.
    same_data: whether a result with the same settings is of the data at hand; always, where it is not given. pictures:
    of results, for the page of a table.
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
    same_data: Callable[[Any, Session, Mapping[str, Any]], bool] | None = None
    pictures: Callable[[Sequence[Mapping[str, Any]]], Iterable["Picture"]] | None = None

    def preset(self, name: str) -> Mapping[str, Any]:
        """The settings that it has under a name; a UsageError that lists the names if it has none."""
        return self._named("preset", self.presets, name, "leave out --preset")

    def grid(self, name: str) -> tuple[Grid, ...]:
        """The grids that it has under a name; a UsageError that lists the names if it has none."""
        return self._named("grid", self.grids, name, "write fields with values")

    def _named(self, kind: str, entries: Mapping[str, Entry], name: str, instead: str) -> Entry:
        if name not in entries:
            close = difflib.get_close_matches(name, entries, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            there = f"There are: {', '.join(entries)}." if entries else f"It has none; {instead}."
            raise UsageError(f"{self.name} has no {kind} named {name!r}.{hint} {there}")
        return entries[name]


RECIPES: Registry[Recipe] = Registry("recipe")
for _module in (
    gcn_depth,
    vit_digits,
    vit,
    glue,
    bert_depth,
    circle,
    potentials,
    asymptotics,
    contrast,
    moco,
    depth_probe,
    sentences,
):
    _facts = (_module.NAME, _module.TITLE, _module.PAPER, _module.Config, _module.run, _module.name_of, _module.cost)
    _more: dict[str, Any] = {
        "presets": getattr(_module, "PRESETS", {}),
        "quick": getattr(_module, "QUICK", None),
        "reads_images": getattr(_module, "READS_IMAGES", False),
        "same_data": getattr(_module, "same_data", None),
        "pictures": getattr(_module, "pictures", None),
    }
    RECIPES.add(_module.NAME, Recipe(*_facts, boards=_module.BOARDS, grids=_module.GRIDS, **_more))
