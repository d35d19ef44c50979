"""Classify the papers of ogbn-arxiv with RevGAT and D-ContraNorm, or another graph in the same way.

The protocol is that of the code that ContraNorm (arXiv 2303.06562) published for ogbn-arxiv. A teacher is trained with
labels as inputs, then a student of the same kind learns from its predictions and from the labels. The weights with the
lowest validation loss are tested. D-ContraNorm, over features, follows each hidden layer of the student. How the
published teacher was trained is not known; here it is the network without norm, the same for both students of a seed.
"""

from uncollapse.lab.data.graph.datasets import DRAWN
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.arxiv.config import D_CONTRA, Config, data_fingerprint
from uncollapse.lab.experiments.arxiv.training import NAME, run
from uncollapse.lab.recipe import Recipe
from uncollapse.registry import CURES

SIZES = {"karate": (34, 34), "cora": (2708, 1433), "citeseer": (3327, 3703), "arxiv": (169_343, 128)}


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    scale = f"-s{config.scale:g}" if config.norm == D_CONTRA else ""
    return f"{config.data}-{config.norm}{scale}-L{config.layers}-seed{config.seed}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    nodes, features = (config.nodes, 128) if config.data in DRAWN else SIZES.get(config.data, (20_000, 500))
    width = config.heads * config.hidden
    inner = (config.layers - 2) * 3 * width + 0.3 * width * (config.norm == D_CONTRA)
    passes = config.epochs + config.teacher_epochs
    return passes * (0.01 + nodes * width * (1.2e-10 * (features + 40 + inner) + 1e-7) * (1 + config.label_passes))


DATA = recipe_data.read(__package__, Config)
RECIPE = Recipe(
    name=NAME,
    title="RevGAT with D-ContraNorm, label reuse and distillation on ogbn-arxiv and smaller graphs",
    paper=CURES["contra_norm"].paper,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    presets=DATA.presets,
    quick=DATA.quick,
    fingerprint=data_fingerprint,
    single_process=True,  # a step needs the whole graph
)
