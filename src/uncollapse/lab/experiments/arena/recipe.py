"""The arena: every cure against doing nothing and against the simplest rivals, on tasks deep enough to collapse.

Each contestant has the same number of trials (learning rate, and strength where it has one), chosen on validation with
one seed. The best then runs with fresh seeds, whose test data are read once; only these seeds count in the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.arena.config import NAME, Config, find_contestant, group_of, row_of
from uncollapse.lab.experiments.arena.pages import draw_plots, list_details, unfinished_rows
from uncollapse.lab.experiments.arena.standings import measured_gains
from uncollapse.lab.experiments.arena.training import build_problem, run
from uncollapse.lab.experiments.gcn.config import BUILT_IN
from uncollapse.lab.recipe import Recipe
from uncollapse.registry import CURES

SECONDS = {"gcn": 0.8, "vit-digits": 0.75, "vit-cifar": 3.2, "bert": 4.8, "decoder": 2.8}  # per block, without a cure
SLOWER = {"contra_norm": 3.0}  # on graphs


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    number = f"{config.draw}" if config.draw else ""
    data = f"-{config.data}{number}" if config.task == "gcn" else ""
    strength = f"-s{config.scale:g}" if find_contestant(config.task, config.cure).has_strength else ""
    rival = f"-L{config.blocks}" if config.blocks else f"-x{config.longer:g}" if config.longer != 1 else ""
    return f"{config.task}{data}-{config.depth}-{config.cure}{strength}{rival}-lr{config.lr:g}-seed{config.seed}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    names = config.cure.split("+") if config.task == "gcn" else []
    return SECONDS[config.task] * config.built * config.longer * max([SLOWER.get(name, 1.0) for name in names] or [1.0])


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of data in a named folder; None for data that does not change."""
    built_in = config.task == "vit-digits" or (config.task == "gcn" and config.data in BUILT_IN)
    if runtime.data_root is None or built_in:
        return None
    return str(build_problem(config, runtime).data["fingerprint"])


DATA = recipe_data.read(__package__, Config, row_of=row_of)
TABLE = replace(DATA.tables[NAME], group_of=group_of)


def collect_gains(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what advice is taken from: the gains of rows whose sweep is complete."""
    return measured_gains(TABLE, records, unfinished_rows(DATA.grids, records))


RECIPE = Recipe(
    name=NAME,
    title="All cures, and the simplest rivals, under one protocol on deep graph networks and transformers",
    paper=CURES["contra_norm"].paper,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables={NAME: TABLE},
    grids=DATA.grids,
    quick=DATA.quick,
    fingerprint=data_fingerprint,
    plots=partial(draw_plots, TABLE),
    statistics=collect_gains,
    details=partial(list_details, TABLE, DATA.grids),
)
