"""Node classification with graph networks of any depth: ContraNorm's Table 3 with its baselines, and GCNII.

The defaults are the protocol of ContraNorm's published code (arXiv 2303.06562): `DeepGCN` of width 32, Adam, 200
epochs, the weights of the last epoch tested; a norm after every hidden layer, ContraNorm without neighbours and with
one LayerNorm that all layers share.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.diagnosis.run import Plan, diagnose
from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, identity
from uncollapse.lab.data.graph import datasets, splits
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.models import deep_gcn
from uncollapse.lab.models.deep_gcn import GCNII, DeepGCN, sparse_features
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import build_record, round_metrics, summarize_diagnosis
from uncollapse.lab.search.variables import Search
from uncollapse.losses import uniform_loss
from uncollapse.registry import CURES
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.trial_result import attach_line

NAME = "gcn-depth"
TITLE = "Graph networks of any depth on citation, Wikipedia and random graphs, with any norm"
PAPER = CURES["contra_norm"].paper
SHARE: dict[str, Any] = {"minimum": 0, "maximum": 1}
MADE_HERE = ("csbm", "karate")  # graphs without files


@dataclass(frozen=True)
class Config:
    """A run. The defaults are those of the published code, but for the graph, which is made up here."""

    data: str = config_field("csbm", "The graph.", choices=datasets.NAMES)
    split: str = config_field("published", "Which nodes are for training, validation and test.", choices=splits.SPLITS)
    split_index: int = config_field(0, "Which of the splits of this kind.", minimum=0, maximum=2**31)
    normalise: str = config_field("auto", "How features are normalised.", choices=datasets.NORMALISATIONS)
    missing: float = config_field(
        0.0, "Share of the other nodes than those for training whose features are zero.", **SHARE
    )
    nodes: int = config_field(600, "csbm: its size.", minimum=180)
    degree: float = config_field(8.0, "csbm: edges of a node.", minimum=0)
    homophily: float = config_field(0.7, "csbm: share of the edges within a class.", **SHARE)
    model: str = config_field(
        "gcn", "gcn: as published; gcnii: initial residual and identity mapping.", choices=("gcn", "gcnii")
    )
    layers: int = config_field(16, "Graph convolutions.", minimum=1)
    hidden: int = config_field(32, "Width of the hidden layers.", minimum=1)
    norm: str = config_field("contra_norm", "What follows a hidden layer.", choices=tuple(deep_gcn.NORMS))
    scale: float = config_field(1.0, "Scale of ContraNorm or PairNorm.")
    after: str = config_field("layer", "What follows ContraNorm.", choices=("layer", "none"))
    norm_every: int = config_field(1, "Layers from one norm to the next.", minimum=1)
    sample: int = config_field(0, "Random nodes that ContraNorm compares with in training; 0: all.", minimum=0)
    residual: int = config_field(0, "gcn: layers from one residual to the next; 0: none.", minimum=0)
    alpha: float = config_field(0.1, "gcnii: share of the first layer in each.", **SHARE)
    theta: float = config_field(0.5, "gcnii: strength of the weights; 0: no identity mapping.", minimum=0)
    init: Literal["published", "glorot"] = config_field("published", "gcn: how weights are drawn.")
    drop_edge: float = config_field(0.0, "Share of the edges that is left out in a step.", **SHARE)
    uniform: float = config_field(0.0, "Weight of the uniformity loss on the last hidden layer.")
    dropout: float = config_field(0.6, "Share of the features that is dropped before each layer.", **SHARE)
    lr: float = config_field(5e-3, "Learning rate of Adam.", minimum=0)
    weight_decay: float = config_field(5e-4, "L2 penalty of all weights.", minimum=0)
    conv_decay: float | None = config_field(None, "L2 penalty of the convolutions, if another.", minimum=0)
    epochs: int = config_field(200, "Largest number of epochs.", minimum=1)
    select: str = config_field(
        "last",
        "Whose weights are tested: the last epoch's, or the best on validation.",
        choices=("last", "accuracy", "loss"),
    )
    patience: int = config_field(
        0, "Epochs without a better validation after which training stops; 0: never.", minimum=0
    )
    seed: int = config_field(0, "Of the weights and of dropout.", minimum=0, maximum=2**31)

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

        def chosen(number: int) -> deep_gcn.Norm | None:
            wanted = config.norm != "none" and (number + 1) % config.norm_every == 0
            return deep_gcn.build_norm(config.norm, width, **options) if wanted else None

        return GCNII(*shapes, alpha=config.alpha, theta=config.theta, norms=chosen, **shared)
    count = config.layers - 1 if config.norm in deep_gcn.PER_LAYER_NORMS else 1
    own = [deep_gcn.build_norm(config.norm, width, **options) for _ in range(max(1, count))]
    return DeepGCN(
        *shapes, norms=own, norm_every=config.norm_every, residual=config.residual, init=config.init, **shared
    )


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train a network, and give the record of the run."""
    return train(config, runtime)[1]


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained network in evaluation mode, and the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        return _train(config, runtime)


def _train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    graph = load(config, runtime)
    with use_seed(config.seed):
        model = build(config, graph)
    before = summarize_diagnosis(_diagnosis(model, graph))
    experiment = f"{identity(NAME, config)}-{graph.fingerprint()}"  # a checkpoint on other data is another's
    history = fit(_task(model, graph, config), _settings(config), runtime, experiment, vars(config))
    after = summarize_diagnosis(_diagnosis(model, graph))
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
        "epochs": [round_metrics(figures) for figures in history.epochs],
        "diagnosis": {"before": before, "after": after},
    }
    saved_models.save_weights(runtime, model, config)
    return model, build_record(NAME, config, history.seconds, ("torch_geometric", "accelerate"), **facts)


def load(config: Config, runtime: Runtime) -> datasets.Graph:
    """The graph of a run."""
    return datasets.load_graph(
        config.data,
        split=config.split,
        split_index=config.split_index,
        normalise=config.normalise,
        missing=config.missing,
        root=runtime.data_root,
        drawn={"nodes": config.nodes, "degree": config.degree, "homophily": config.homophily},
    )


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of the graph in a named folder; None for others, which do not change."""
    if runtime.data_root is None or config.data in MADE_HERE:
        return None
    return load(config, runtime).fingerprint()


def _settings(config: Config) -> TrainingOptions:
    selects = config.select != "last"
    return TrainingOptions(
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

    return Task(model, _optimiser(model, config), lambda epoch: [whole], loss, evaluate, sharding="none")


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
    return diagnose(model, [batch], plan=Plan(baseline=0, rank_samples=1, embed=False))


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    scale = f"-s{config.scale:g}" if config.norm in deep_gcn.SCALED_NORMS else ""
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
    baseline={"norm": "none", "norm_every": 1},
    line=line,
)
DATA = recipe_data.read(__package__, Config)
RECIPE = Recipe(
    name=NAME,
    title=TITLE,
    paper=PAPER,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    quick=DATA.quick,
    search=SEARCH,
    fingerprint=data_fingerprint,
    single_process=True,  # a step is on the whole graph
)
