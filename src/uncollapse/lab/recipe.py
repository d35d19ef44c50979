"""Recipe, the description of one experiment, and the registry of all recipes by name.

A recipe's module is imported when the recipe is first asked for, and the libraries it needs when it runs.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.search.variables import Search
from uncollapse.lab.tables.paper_table import Details, PaperTable
from uncollapse.registry import Lazy, Registry

if TYPE_CHECKING:
    from uncollapse.lab.tables.table_page import ResultPlot

Entry = TypeVar("Entry")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment: its configuration, how it runs, and how its results are shown.

    Args:
        name: Its name on the command line and in `results/`.
        title: One line for `uncollapse list recipes`.
        paper: Authors, title and arXiv number of the paper that it follows.
        config: Frozen dataclass with a default for every field and a `seed`, see `lab.config.fields.setting`.
        run: Returns the record of a run, which must be JSON-serializable.
        name_of: Returns the readable part of a run's file names.
        cost: Returns an estimate of a run's seconds on one core.
        tables: Tables of its results by name. The first one is the default.
        grids: Sweeps by name.
        presets: Settings by name, for example those of a paper.
        quick: Settings of a run that takes less than two minutes and needs no download; None if there are none.
        reads_images: Whether worker processes may read images ahead of the training, see `Runtime.workers`.
        single_process: Whether its work cannot be shared between processes, so that only rank 0 runs it.
        fingerprint: Returns the fingerprint of the data that a run would use now, as its record has it in
            `data.fingerprint`; None where the data cannot have changed. See `same_data`.
        check_data: Raises a UsageError if data or a model that a run needs are not here. `fingerprint` does that too,
            and is called if this is not given.
        plots: Returns plots of the given records, for the page of a table.
        details: Returns further tables of the given records, which follow a table.
        statistics: Returns statistics of the given records over all of them, for the JSON of a table.
        search: What `uncollapse tune` may vary; None if the recipe cannot be tuned.
    """

    name: str
    title: str
    paper: str
    config: type
    run: Callable[[Any, Runtime], dict[str, Any]]
    name_of: Callable[[Any], str]
    cost: Callable[[Any], float]
    tables: Mapping[str, PaperTable] = field(default_factory=dict)
    grids: Mapping[str, tuple[Grid, ...]] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    quick: Mapping[str, Any] | None = None
    reads_images: bool = False
    single_process: bool = False
    fingerprint: Callable[[Any, Runtime], str | None] | None = None
    check_data: Callable[[Any, Runtime], object] | None = None
    plots: Callable[[Sequence[Mapping[str, Any]]], Iterable["ResultPlot"]] | None = None
    details: Callable[[Sequence[Mapping[str, Any]]], Sequence[Details]] | None = None
    statistics: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]] | None = None
    search: Search | None = None

    def preset(self, name: str) -> Mapping[str, Any]:
        """Return the preset of this name, or raise a UsageError that lists the presets."""
        return self._lookup("preset", self.presets, name, "leave out --preset")

    def grid(self, name: str) -> tuple[Grid, ...]:
        """Return the grids of this name, or raise a UsageError that lists the names."""
        return self._lookup("grid", self.grids, name, "write fields with values")

    def same_data(self, config: Any, runtime: Runtime, record: Mapping[str, Any]) -> bool:
        """Return whether a result used the data at hand, and not other data that was in the same place.

        Data that is not here cannot be other data. A record without a fingerprint is of a run that did not stay finite.
        """
        known = record.get("data", {}).get("fingerprint")
        if known is None or self.fingerprint is None:
            return True
        try:
            return self.fingerprint(config, runtime) in (None, known)
        except UsageError:
            return True

    def missing_data(self, config: Any, runtime: Runtime) -> str:
        """Return what a run needs and is not here, in words; "" if nothing is known to be missing."""
        check = self.check_data or self.fingerprint
        try:
            if check is not None:
                check(config, runtime)
        except UsageError as error:
            return str(error)
        return ""

    def _lookup(self, kind: str, entries: Mapping[str, Entry], name: str, instead: str) -> Entry:
        if name not in entries:
            hint = did_you_mean(name, entries)
            there = f"There are: {', '.join(entries)}." if entries else f"It has none; {instead}."
            raise UsageError(f"{self.name} has no {kind} named {name!r}.{hint} {there}")
        return entries[name]


RECIPES: Registry[Recipe] = Registry("recipe")
MODULES = {  # recipe -> the module of `uncollapse.lab.experiments` whose `RECIPE` it is
    "gcn-depth": "gcn.recipe",
    "arxiv": "arxiv.recipe",
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
    "arena": "arena.recipe",
    "calibration": "calibration.recipe",
}


def _load(module: str) -> Recipe:
    recipe: Recipe = importlib.import_module(f"uncollapse.lab.experiments.{module}").RECIPE
    return recipe


for _name, _module in MODULES.items():
    RECIPES.add(_name, Lazy(partial(_load, _module)))
