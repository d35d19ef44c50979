"""Classify nodes with graph networks of any depth: ContraNorm's Table 3 with its baselines, and GCNII.

The defaults are the protocol of ContraNorm's published code (arXiv 2303.06562): `DeepGCN` of width 32, Adam, 200
epochs, and the weights of the last epoch are tested. A norm follows every hidden layer; ContraNorm leaves out
neighbors, and all layers share its LayerNorm.
"""

import math

from uncollapse.lab.data.graph.datasets import DRAWN
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.gcn.config import CONTRA_NORMS, Config, data_fingerprint
from uncollapse.lab.experiments.gcn.training import NAME, run
from uncollapse.lab.models import deep_gcn
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.search.variables import Search
from uncollapse.registry import CURES
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.trial_result import attach_line

NODES = {"karate": 34, "cora": 2708, "citeseer": 3327, "pubmed": 19717, "chameleon": 2277, "squirrel": 5201}


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    scale = f"-s{config.scale:g}" if config.norm in deep_gcn.SCALED_NORMS else ""
    scale += "" if config.identity else "-eq9"
    residual = f"-residual{config.residual}" if config.residual else ""
    model = "" if config.model == "gcn" else f"-{config.model}"
    return f"{config.data}{model}-{config.norm}{scale}{residual}-L{config.layers}-seed{config.seed}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    nodes = (config.nodes if config.data in DRAWN else NODES.get(config.data, 5000)) / 2708
    width = config.hidden / 32
    layer = 2e-3 * nodes * width * (1 + 0.3 * width)
    pairs = min(1.0, config.sample / (nodes * 2708)) if config.sample else 1.0
    contra = 0.047 * nodes**2 * width * max(pairs, 0.3) / config.norm_every if config.norm == "contra_norm" else 0.0
    share = 1.0 if config.select == "last" else 1.35
    epochs = config.epochs if not config.patience else min(config.epochs, 6 * config.patience)
    return share * epochs * (0.01 + math.ceil(config.layers) * (layer + contra))


def attach_code(config: Config) -> str | None:
    """Return the code that attaches a run's norm to another network; None if there is no such line."""
    hidden = f"first {config.layers - 1}" if config.model == "gcn" else None
    shared = {"scale": config.scale, "at": "conv.output", "layers": hidden}
    if config.norm in CONTRA_NORMS:
        preset = "gnn" if config.norm == "contra_norm" else "arxiv"
        after = "layer" if config.after == "layer" else None
        extra = {"sample": config.sample or None, "identity": None if config.identity else False}
        return attach_line("contra_norm", shared | {"preset": preset, "after": after} | extra)
    if config.norm == "pair_norm":
        return attach_line("pair_norm", shared)
    return None


SEARCH = Search(
    space=(
        OneOf("norm", (*CONTRA_NORMS, "pair_norm", "batch_norm")),
        Between("scale", 0.1, 5.0, when={"norm": CONTRA_NORMS}),
        Between("scale", 0.5, 50.0, when={"norm": ("pair_norm",)}),
        OneOf("norm_every", (1, 2, 4)),
    ),
    baseline={"norm": "none", "norm_every": 1},
    line=attach_code,
)
DATA = recipe_data.read(__package__, Config)
RECIPE = Recipe(
    name=NAME,
    title="Graph networks of any depth on citation, Wikipedia and random graphs, with any norm",
    paper=CURES["contra_norm"].paper,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    quick=DATA.quick,
    search=SEARCH,
    fingerprint=data_fingerprint,
    single_process=True,  # a step needs the whole graph
)
