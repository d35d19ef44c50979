"""Node classification with graph networks of any depth: ContraNorm's Table 3 with its baselines, and GCNII.

The defaults are the protocol of ContraNorm's published code (arXiv 2303.06562): `DeepGCN` of width 32, Adam, 200
epochs, the weights of the last epoch tested; a norm after every hidden layer, ContraNorm without neighbours and with
one LayerNorm that all layers share.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.diagnosis.run import diagnose
from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import identity, setting
from uncollapse.lab.data.graph import datasets, features, splits
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Session
from uncollapse.lab.engine.seeding import seeded
from uncollapse.lab.engine.task import Settings, Task
from uncollapse.lab.engine.threads import threads
from uncollapse.lab.models import norms
from uncollapse.lab.models.adjacency import sparse_features
from uncollapse.lab.models.deep_gcn import GCNII, DeepGCN
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.records import record, short, summary
from uncollapse.lab.search.variables import Search
from uncollapse.lab.tables.paper_table import Board, Published
from uncollapse.losses import uniform_loss
from uncollapse.registry import CURES
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.trial_result import attach_line

NAME = "gcn-depth"
TITLE = "Graph networks of any depth on citation, Wikipedia and random graphs, with any norm"
PAPER = CURES["contra_norm"].paper
SHARE: dict[str, Any] = {"least": 0, "most": 1}
MADE_HERE = ("csbm", "karate")  # graphs without files


@dataclass(frozen=True)
class Config:
    """A run. The defaults are those of the published code, but for the graph, which is made up here."""

    data: str = setting("csbm", "The graph.", choices=datasets.NAMES)
    split: str = setting("published", "Which nodes are for training, validation and test.", choices=splits.SPLITS)
    split_index: int = setting(0, "Which of the splits of this kind.", least=0, most=2**31)
    normalise: str = setting("auto", "How features are normalised.", choices=features.NORMALISATIONS)
    missing: float = setting(0.0, "Share of the other nodes than those for training whose features are zero.", **SHARE)
    nodes: int = setting(600, "csbm: its size.", least=180)
    degree: float = setting(8.0, "csbm: edges of a node.", least=0)
    homophily: float = setting(0.7, "csbm: share of the edges within a class.", **SHARE)
    model: str = setting(
        "gcn", "gcn: as published; gcnii: initial residual and identity mapping.", choices=("gcn", "gcnii")
    )
    layers: int = setting(16, "Graph convolutions.", least=1)
    hidden: int = setting(32, "Width of the hidden layers.", least=1)
    norm: str = setting("contra_norm", "What follows a hidden layer.", choices=tuple(norms.NORMS))
    scale: float = setting(1.0, "Scale of ContraNorm or PairNorm.")
    after: str = setting("layer", "What follows ContraNorm.", choices=("layer", "none"))
    norm_every: int = setting(1, "Layers from one norm to the next.", least=1)
    sample: int = setting(0, "Random nodes that ContraNorm compares with in training; 0: all.", least=0)
    residual: int = setting(0, "gcn: layers from one residual to the next; 0: none.", least=0)
    alpha: float = setting(0.1, "gcnii: share of the first layer in each.", **SHARE)
    theta: float = setting(0.5, "gcnii: strength of the weights; 0: no identity mapping.", least=0)
    init: Literal["published", "glorot"] = setting("published", "gcn: how weights are drawn.")
    drop_edge: float = setting(0.0, "Share of the edges that is left out in a step.", **SHARE)
    uniform: float = setting(0.0, "Weight of the uniformity loss on the last hidden layer.")
    dropout: float = setting(0.6, "Share of the features that is dropped before each layer.", **SHARE)
    lr: float = setting(5e-3, "Learning rate of Adam.", least=0)
    weight_decay: float = setting(5e-4, "L2 penalty of all weights.", least=0)
    conv_decay: float | None = setting(None, "L2 penalty of the convolutions, if another.", least=0)
    epochs: int = setting(200, "Largest number of epochs.", least=1)
    select: str = setting(
        "last",
        "Whose weights are tested: the last epoch's, or the best on validation.",
        choices=("last", "accuracy", "loss"),
    )
    patience: int = setting(0, "Epochs without a better validation after which training stops; 0: never.", least=0)
    seed: int = setting(0, "Of the weights and of dropout.", least=0, most=2**31)

    def __post_init__(self) -> None:
        if self.sample and self.norm == "contra_norm_features":
            raise UsageError("sample is for contra_norm: contra_norm_features has no pairs of nodes to sample.")
        if self.patience and self.select == "last":
            raise UsageError("patience needs select accuracy or loss, which says what is better; got last.")
        hidden = self.layers if self.model == "gcnii" else self.layers - 1
        if self.norm != "none" and self.norm_every > max(1, hidden):
            raise UsageError(f"No norm would stand in {hidden} hidden layers with norm_every {self.norm_every}.")


def build(config: Config, graph: datasets.Graph) -> nn.Module:
    """The model at its start."""
    width, shapes = config.hidden, (graph.x.shape[1], graph.classes)
    options: dict[str, Any] = {"scale": config.scale, "after": config.after, "sample": config.sample}
    shared: dict[str, Any] = {
        "layers": config.layers,
        "hidden": width,
        "dropout": config.dropout,
        "drop_edge": config.drop_edge,
    }
    if config.model == "gcnii":

        def chosen(number: int) -> norms.Norm | None:
            wanted = config.norm != "none" and (number + 1) % config.norm_every == 0
            return norms.build(config.norm, width, **options) if wanted else None

        return GCNII(*shapes, alpha=config.alpha, theta=config.theta, norms=chosen, **shared)
    count = config.layers - 1 if config.norm in norms.OWN_EACH else 1
    own = [norms.build(config.norm, width, **options) for _ in range(max(1, count))]
    return DeepGCN(
        *shapes, norms=own, norm_every=config.norm_every, residual=config.residual, init=config.init, **shared
    )


def run(config: Config, session: Session | None = None) -> dict[str, Any]:
    """Train a network, and give the record of the run."""
    return train(config, session)[1]


def train(config: Config, session: Session | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained network in evaluation mode, and the record of the run."""
    session = session or Session()
    with threads(session.threads):
        return _train(config, session)


def _train(config: Config, session: Session) -> tuple[nn.Module, dict[str, Any]]:
    graph = load(config, session)
    with seeded(config.seed):
        model = build(config, graph)
    before = summary(_diagnosis(model, graph))
    experiment = f"{identity(NAME, config)}-{graph.fingerprint()}"  # a checkpoint on other data is another's
    history = fit(_task(model, graph, config), _settings(config), session, experiment, vars(config))
    after = summary(_diagnosis(model, graph))
    figures = {**accuracies(model, graph), "epoch": history.kept}
    facts = {
        "data": {
            "name": graph.name,
            "fingerprint": graph.fingerprint(),
            "nodes": len(graph.y),
            "edges": graph.edge_index.shape[1],
        },
        "figures": figures,
        "ended": history.ended,
        "epochs": [short(figures) for figures in history.epochs],
        "diagnosis": {"before": before, "after": after},
    }
    saved_models.keep_weights(session, model, config)
    return model, record(NAME, config, history.seconds, ("torch_geometric", "accelerate"), **facts)


def load(config: Config, session: Session) -> datasets.Graph:
    """The graph of a run."""
    return datasets.load(
        config.data,
        split=config.split,
        split_index=config.split_index,
        normalise=config.normalise,
        missing=config.missing,
        root=session.data_root,
        drawn={"nodes": config.nodes, "degree": config.degree, "homophily": config.homophily},
    )


def same_data(config: Config, session: Session, record: Mapping[str, Any]) -> bool:
    """Whether a result is of the graph at hand, and not of another that lies where its own did.

    Only a folder that is named is looked at: what was fetched stays as it is, and is not fetched to find that out.
    """
    known = record.get("data", {}).get("fingerprint")
    if known is None or session.data_root is None or config.data in MADE_HERE:
        return True
    try:
        return bool(known == load(config, session).fingerprint())
    except UsageError:  # it is not here: then it cannot be another
        return True


def _settings(config: Config) -> Settings:
    selects = config.select != "last"
    return Settings(
        epochs=config.epochs,
        seed=config.seed,
        evaluate_every=1 if selects else 10,
        select={"last": None, "accuracy": "validation", "loss": "validation_loss"}[config.select],
        better="lower" if config.select == "loss" else "higher",
        patience=config.patience or None,
    )


def _task(model: nn.Module, graph: datasets.Graph, config: Config) -> Task:
    x = sparse_features(graph.x)  # bags of words: dropout and the first layer then cost little
    whole = {"x": x, "edge_index": graph.edge_index, "y": graph.y, "train": graph.train, "validation": graph.validation}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits, hidden = model.with_hidden(batch["x"], batch["edge_index"])
        value = F.cross_entropy(logits[batch["train"]], batch["y"][batch["train"]])
        return value + config.uniform * uniform_loss(hidden) if config.uniform else value

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        chosen, y = graph.validation.to(device), graph.y.to(device)
        logits = model(x.to(device), graph.edge_index.to(device))[chosen]
        right = (logits.argmax(1) == y[chosen]).float().mean()
        return {"validation": float(right), "validation_loss": float(F.cross_entropy(logits, y[chosen]))}

    return Task(model, _optimiser(model, config), lambda epoch: [whole], loss, evaluate, shares="none")


def _optimiser(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    convs = [p for name, p in model.named_parameters() if name.startswith("convs.")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("convs.")]
    decay = config.weight_decay if config.conv_decay is None else config.conv_decay
    groups = [{"params": convs, "weight_decay": decay}, {"params": rest, "weight_decay": config.weight_decay}]
    return torch.optim.Adam([group for group in groups if group["params"]], lr=config.lr, fused=True)


@torch.no_grad()
def accuracies(model: nn.Module, graph: datasets.Graph) -> dict[str, float]:
    """Share of the nodes of each part that the model names rightly."""
    device = next(model.parameters()).device
    right = (model(graph.x.to(device), graph.edge_index.to(device)).argmax(1).cpu() == graph.y).float()
    parts = {"train": graph.train, "validation": graph.validation, "test": graph.test}
    return {name: float(right[mask].mean()) for name, mask in parts.items()}


def _diagnosis(model: nn.Module, graph: datasets.Graph) -> Any:
    batch = {"x": graph.x, "edge_index": graph.edge_index}
    return diagnose(model, [batch], baseline=0, rank_samples=1, embed=False)


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    scale = f"-s{config.scale:g}" if config.norm in norms.SCALED else ""
    model = "" if config.model == "gcn" else f"-{config.model}"
    return f"{config.data}{model}-{config.norm}{scale}-L{config.layers}-seed{config.seed}"


NODES = {
    "karate": 34,
    "cora": 2708,
    "citeseer": 3327,
    "pubmed": 19717,
    "chameleon": 2277,
    "squirrel": 5201,
}


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core."""
    nodes = (config.nodes if config.data == "csbm" else NODES.get(config.data, 5000)) / 2708
    width = config.hidden / 32
    layer = 2e-3 * nodes * width * (1 + 0.3 * width)
    pairs = min(1.0, config.sample / (nodes * 2708)) if config.sample else 1.0
    contra = 0.047 * nodes**2 * width * max(pairs, 0.3) / config.norm_every if config.norm == "contra_norm" else 0.0
    share = 1.0 if config.select == "last" else 1.35
    epochs = config.epochs if not config.patience else min(config.epochs, 6 * config.patience)
    return share * epochs * (0.01 + math.ceil(config.layers) * (layer + contra))


QUICK: Mapping[str, Any] = {"layers": 8, "epochs": 100}  # on a random graph
CONTRA = ("contra_norm", "contra_norm_features")


def line(config: Config) -> str | None:
    """The code for a network of one's own."""
    hidden = f"first {config.layers - 1}" if config.model == "gcn" else None
    shared = {"scale": config.scale, "at": "conv.output", "layers": hidden}
    if config.norm in CONTRA:
        preset = "gnn" if config.norm == "contra_norm" else "arxiv"
        after = "layer" if config.after == "layer" else None
        return attach_line("contra_norm", shared | {"preset": preset, "after": after, "sample": config.sample or None})
    if config.norm == "pair_norm":
        return attach_line("pair_norm", shared)
    return None


SEARCH = Search(
    space=(
        OneOf("norm", (*CONTRA, "pair_norm", "batch_norm")),
        Between("scale", 0.1, 5.0, when={"norm": CONTRA}),
        Between("scale", 0.5, 50.0, when={"norm": ("pair_norm",)}),
        OneOf("norm_every", (1, 2, 4)),
    ),
    none={"norm": "none", "norm_every": 1},
    line=line,
)
DEPTHS = (2, 4, 8, 16, 32)
TABLE_3 = """
cora none 81.75±.51 72.61±2.42 17.71±6.89 20.71±8.54 19.69±9.54
cora layer_norm 79.96±.73 77.45±.67 39.09±4.68 7.79±0 7.79±0
cora pair_norm 75.32±1.05 72.64±2.67 71.86±3.31 54.11±9.49 36.62±2.73
cora contra_norm 79.75±.33 77.02±.96 74.01±.64 68.75±2.10 46.39±2.46
citeseer none 69.18±.34 55.01±4.36 19.65±0 19.65±0 19.65±0
citeseer layer_norm 63.27±1.15 60.91±.76 33.74±6.15 19.65±0 19.65±0
citeseer pair_norm 61.59±1.35 53.01±2.19 55.76±4.45 44.21±1.73 36.68±2.55
citeseer contra_norm 64.06±.85 60.55±.72 59.30±.67 49.01±3.49 36.94±1.70
chameleon none 45.79±1.20 37.85±1.35 22.37±0 22.37±0 23.37±0
chameleon layer_norm 63.95±1.29 55.79±1.25 34.08±2.62 22.37±0 22.37±0
chameleon pair_norm 62.24±1.73 58.38±1.48 49.12±2.32 37.54±1.70 30.66±1.58
chameleon contra_norm 64.78±1.68 58.73±1.12 48.99±1.52 40.92±1.74 35.44±3.16
squirrel none 29.47±.96 19.31±0 19.31±0 19.31±0 19.31±0
squirrel layer_norm 43.04±1.25 29.64±5.50 19.63±.45 19.96±.44 19.40±.19
squirrel pair_norm 43.86±.41 40.25±.55 36.03±1.43 29.55±2.19 29.05±.91
squirrel contra_norm 47.24±.66 40.31±.74 35.85±1.58 32.37±.93 27.80±.72
"""
# An independent rerun of the same settings, in the paper of SBP; it has the depth 64 and PubMed as well.
RERUN = """
cora none 80.68 79.69 74.32 30.95 30.95 24.85
cora batch_norm 78.09 77.87 73.62 70.79 53.90 35.32
cora pair_norm 79.01 78.26 73.21 62.96 48.13 44.01
cora contra_norm 81.55 79.61 77.71 63.35 44.56 38.97
citeseer none 67.45 65.62 37.22 22.03 19.65 19.65
citeseer batch_norm 63.44 62.34 61.36 50.58 41.41 35.00
citeseer pair_norm 63.58 64.32 61.95 50.06 37.21 36.09
citeseer contra_norm 66.83 64.78 60.70 44.79 37.36 30.85
pubmed pair_norm 75.66 76.71 77.99 77.22 75.52 71.22
pubmed contra_norm 76.05 78.42
"""


def _published(text: str, depths: tuple[int, ...], source: str) -> tuple[Published, ...]:
    found = []
    for line in text.strip().splitlines():
        data, norm, *numbers = line.split()
        for layers, number in zip(depths, numbers, strict=False):
            mean, _, std = number.partition("±")
            cell = {"data": data, "norm": norm, "layers": layers}
            found.append(Published(cell, float(mean), float(std) if std else None, source))
    return tuple(found)


PLAIN = {"model": "gcn", "split": "published", "select": "last"}  # the published protocol
DEEP = {  # GCNII with its authors' settings for citation graphs, and a width and depth that are affordable
    "model": "gcnii",
    "split": "public",
    "hidden": 64,
    "lr": 0.01,
    "conv_decay": 0.01,
    "epochs": 1500,
    "patience": 100,
    "select": "loss",
    "after": "none",
}
AXES: dict[str, Any] = {
    "groups": "data",
    "rows": "norm",
    "columns": "layers",
    "chosen": ("scale",),
    "usual": asdict(Config()),
    "free": ("sample",),  # where all pairs cost too much
}
CURES_TRIED = "norm+uniform+drop_edge"
TABLES: Mapping[str, Board] = {
    "table3": Board(
        "ContraNorm's Table 3: test accuracy of deep GCNs",
        where={**PLAIN, "missing": 0.0},
        published=_published(TABLE_3, DEPTHS, "ContraNorm, Table 3"),
        **AXES,
    ),
    "rerun": Board(
        "The same networks beside an independent rerun",
        where={**PLAIN, "missing": 0.0},
        published=_published(RERUN, (*DEPTHS, 64), "SBP's rerun"),
        **AXES,
    ),
    "missing": Board(
        "Test accuracy when validation and test nodes have no features", where={**PLAIN, "missing": 1.0}, **AXES
    ),
    "sample": Board(
        "ContraNorm with a sample of the nodes against all (0), at the same scale",
        where={**PLAIN, "missing": 0.0, "norm": "contra_norm", "scale": 1.0},
        **{**AXES, "rows": "sample", "chosen": (), "against": 0},
    ),
    "gcnii": Board(
        "GCNII with each cure, Planetoid's public split",
        where={"model": "gcnii", "split": "public", "missing": 0.0},
        against="none",
        **{**AXES, "rows": CURES_TRIED, "chosen": ("scale", "norm_every"), "usual": asdict(Config()) | DEEP},
    ),
}


def _table_3(data: tuple[str, ...], depths: tuple[int, ...] = DEPTHS, **more: tuple[Any, ...]) -> tuple[Grid, ...]:
    shared = {"data": data, "layers": depths, "seed": (0, 1, 2)}
    contra = {"norm": ("contra_norm",), "scale": (0.2, 0.5, 1.0), **more}
    pair = {"norm": ("pair_norm",), "scale": (1.0, 5.0, 20.0)}
    scaled = (Grid(shared | own, choose=("scale",)) for own in (pair, contra))
    return Grid(shared | {"norm": ("none", "layer_norm", "pair_layer_norm")}), *scaled


def _deep(seeds: int, data: str) -> tuple[Grid, ...]:
    shared: dict[str, tuple[Any, ...]] = {name: (value,) for name, value in DEEP.items()}
    shared |= {"data": (data,), "layers": (32,), "seed": tuple(range(seeds))}
    few = {"norm_every": (8,)}
    return (
        Grid(shared | {"norm": ("none",)}),
        Grid(shared | few | {"norm": ("contra_norm", "contra_norm_features"), "scale": (0.1, 0.5)}, choose=("scale",)),
        Grid(shared | few | {"norm": ("pair_norm",)}),
        Grid(shared | {"norm": ("none",), "uniform": (0.1,)}),
        Grid(shared | {"norm": ("none",), "drop_edge": (0.2,)}),
    )


GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "table3": _table_3(("cora", "citeseer", "chameleon")),
    "squirrel": (*_table_3(("squirrel",), (2, 4, 8)), *_table_3(("squirrel",), (16, 32), sample=(512,))),
    "pubmed": (*_table_3(("pubmed",), sample=(512,)),),
    "pubmed-exact": (Grid({"data": ("pubmed",), "layers": (8,), "norm": ("contra_norm",)}),),  # all pairs
    "deeper": _table_3(("cora",), (64,)),
    "sample": (
        Grid(
            {
                "data": ("cora",),
                "layers": (8, 16),
                "norm": ("contra_norm",),
                "scale": (1.0,),
                "sample": (0, 512),
                "seed": (0, 1, 2),
            }
        ),
    ),
    "missing": (
        Grid(
            {
                "data": ("cora", "citeseer"),
                "missing": (1.0,),
                "layers": DEPTHS,
                "norm": ("none", "layer_norm", "pair_norm", "contra_norm"),
                "seed": (0, 1, 2),
            }
        ),
    ),
    "gcnii-cora": _deep(10, "cora"),
    "gcnii-citeseer": _deep(5, "citeseer"),
}

RECIPE = Recipe(
    name=NAME,
    title=TITLE,
    paper=PAPER,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=TABLES,
    grids=GRIDS,
    quick=QUICK,
    search=SEARCH,
    same_data=same_data,
    single_process=True,  # a step is on the whole graph
)
