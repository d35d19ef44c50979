"""Training and evaluation of the recipe `gcn-depth`: the loss, the optimizer, metrics, and the record of a run."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.diagnosis.run import Plan, diagnose
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.graph import datasets
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments.gcn.config import Config, build, load
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.models.deep_gcn import sparse_features
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import summarize_diagnosis
from uncollapse.losses import uniform_loss

NAME = "gcn-depth"


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
