"""Classify nodes with graph networks of any depth: ContraNorm's Table 3 with its baselines, and GCNII.

The defaults are the protocol of ContraNorm's published code (arXiv 2303.06562): `DeepGCN` of width 32, Adam, 200
epochs, and the weights of the last epoch are tested. A norm follows every hidden layer; ContraNorm leaves out
neighbors, and all layers share its LayerNorm.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.diagnosis.run import diagnose
from uncollapse.diagnosis.target import Plan
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.graph import datasets
from uncollapse.lab.data.graph.datasets import DRAWN
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.gcn.config import CONTRA_NORMS, Config, build, data_fingerprint, load
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.models import deep_gcn
from uncollapse.lab.models.deep_gcn import sparse_features
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import summarize_diagnosis
from uncollapse.lab.search.variables import Search
from uncollapse.losses import uniform_loss
from uncollapse.registry import CURES
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.trial_result import attach_line

NAME = "gcn-depth"
NODES = {"karate": 34, "cora": 2708, "citeseer": 3327, "pubmed": 19717, "chameleon": 2277, "squirrel": 5201}


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train a network; return it in evaluation mode, and the record of the run."""
    graph = load(config, runtime)
    with use_seed(config.seed):
        model = build(config, graph)
    before = _diagnose(model, graph)
    experiment = f"{identity(NAME, config)}-{graph.fingerprint()}"  # so that a checkpoint on other data is not resumed
    history = fit(build_task(model, graph, config), training_options(config), runtime, experiment, vars(config))
    data = {"fingerprint": graph.fingerprint(), "nodes": len(graph.y), "edges": graph.edge_index.shape[1]}
    saved_models.save_weights(runtime, model, config)
    return model, training_record(
        NAME,
        config,
        history,
        ("torch_geometric", "accelerate"),
        data={"name": graph.name} | data,
        figures={**accuracies(model, graph), "epoch": history.selected},
        diagnosis={"before": before, "after": _diagnose(model, graph)},
    )


run = record_of(train)


def training_options(config: Config) -> TrainingOptions:
    """Return how long a network is trained, and which weights are tested."""
    selects = config.select != "last"
    return TrainingOptions(
        epochs=config.epochs,
        seed=config.seed,
        evaluate_every=1 if selects else 10,
        select={"last": None, "accuracy": "validation", "loss": "validation_loss"}[config.select],
        better="lower" if config.select == "loss" else "higher",
        patience=config.patience or None,
    )


def build_task(model: nn.Module, graph: datasets.Graph, config: Config) -> Task:
    """Return the training of a network on the whole graph."""
    x = sparse_features(graph.x)  # bags of words: makes dropout and the first layer cheap
    whole = {"x": x, "edge_index": graph.edge_index, "y": graph.y, "train": graph.train, "validation": graph.validation}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        logits, hidden = model.with_hidden(batch["x"], batch["edge_index"])
        value = F.cross_entropy(logits[batch["train"]], batch["y"][batch["train"]])
        return value + config.uniform * uniform_loss(hidden) if config.uniform else value

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        held_out, y = graph.validation.to(device), graph.y.to(device)
        logits = model(x.to(device), graph.edge_index.to(device))[held_out]
        right = (logits.argmax(1) == y[held_out]).float().mean()
        return {"validation": float(right), "validation_loss": float(F.cross_entropy(logits, y[held_out]))}

    return Task(model, _optimizer(model, config), lambda epoch: [whole], loss, evaluate, sharding="none")


def _optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    convs = [p for name, p in model.named_parameters() if name.startswith("convs.")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("convs.")]
    decay = config.weight_decay if config.conv_decay is None else config.conv_decay
    groups = [{"params": convs, "weight_decay": decay}, {"params": rest, "weight_decay": config.weight_decay}]
    return torch.optim.Adam([group for group in groups if group["params"]], lr=config.lr, fused=True)


@torch.no_grad()
def accuracies(model: nn.Module, graph: datasets.Graph) -> dict[str, float]:
    """Return the accuracy on each split."""
    device = next(model.parameters()).device
    right = (model(graph.x.to(device), graph.edge_index.to(device)).argmax(1).cpu() == graph.y).float()
    parts = {"train": graph.train, "validation": graph.validation, "test": graph.test}
    return {name: float(right[mask].mean()) for name, mask in parts.items()}


def _diagnose(model: nn.Module, graph: datasets.Graph) -> dict[str, Any]:
    batch = {"x": graph.x, "edge_index": graph.edge_index}
    return summarize_diagnosis(diagnose(model, [batch], plan=Plan(baseline=0, rank_samples=1, embed=False)))


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
