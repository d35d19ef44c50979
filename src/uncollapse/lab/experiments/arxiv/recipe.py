"""Classify the papers of ogbn-arxiv with RevGAT and D-ContraNorm, or another graph in the same way.

The protocol is that of the code that ContraNorm (arXiv 2303.06562) published for ogbn-arxiv. A teacher is trained with
labels as inputs, then a student of the same kind learns from its predictions and from the labels. The weights with the
lowest validation loss are tested. D-ContraNorm, over features, follows each hidden layer of the student. How the
published teacher was trained is not known; here it is the network without norm, the same for both students of a seed.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.diagnosis.run import diagnose
from uncollapse.diagnosis.target import Plan
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.graph.datasets import DRAWN, Graph
from uncollapse.lab.engine.checkpoints import Checkpoints
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.arxiv.config import D_CONTRA, Config, build, data_fingerprint, load
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import summarize_diagnosis
from uncollapse.registry import CURES

NAME = "arxiv"
TEACHER = "teacher"  # folder of its checkpoints, within those of the run
EPSILON = 1 - math.log(2)
SIZES = {"karate": (34, 34), "cora": (2708, 1433), "citeseer": (3327, 3703), "arxiv": (169_343, 128)}


def draw_inputs(train: Tensor, rate: float) -> Tensor:
    """Return which nodes (n,) have their label as input in a step: a random share of the training nodes, never all."""
    known = train & (torch.rand(train.shape, device=train.device) < rate)
    return known if bool((known != train).any()) else torch.zeros_like(train)


def predict(model: nn.Module, x: Tensor, edge_index: Tensor, y: Tensor, known: Tensor, passes: int) -> Tensor:
    """Return logits (n, classes) with label reuse: the labels of known nodes are inputs, in columns after the features.

    The columns of the other nodes are 0 in the first of `passes` passes, which have no gradients, and then the
    probabilities that the pass before has given them. So the label of a node that is not known never is an input.
    """
    classes = int(y.max()) + 1
    labels = F.one_hot(y, classes).to(x.dtype) * known.unsqueeze(1)
    for _ in range(passes):
        with torch.no_grad():
            probabilities = model(torch.cat([x, labels], 1), edge_index).softmax(1)
        labels = torch.where(known.unsqueeze(1), labels, probabilities)
    logits: Tensor = model(torch.cat([x, labels], 1), edge_index)
    return logits


def robust_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean of log(ε + c) − log ε over nodes with cross entropy c, where ε = 1 − log 2.

    It grows slower than c, so that nodes with a wrong label count less.
    """
    return (EPSILON + F.cross_entropy(logits, y, reduction="none")).log().mean() - math.log(EPSILON)


def distillation_loss(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return T² Σ p log(p/q)/(n·classes) with p, q = softmax(logits/T) of teacher and student (n, classes).

    As published, it is the mean over nodes and classes, not over nodes.
    """
    student = (logits / temperature).log_softmax(1)
    target = (teacher / temperature).log_softmax(1)
    return temperature**2 * F.kl_div(student, target, reduction="sum", log_target=True) / logits.numel()


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train the teacher and then the student; return the student in evaluation mode, and the record of the run."""
    graph = load(config, runtime)
    fingerprint, edges = graph.fingerprint(), graph.edge_index.shape[1]
    experiment = f"{identity(NAME, config)}-{fingerprint}"  # so that a checkpoint on other data is not resumed
    teacher, taught = _train_teacher(config, graph, runtime, experiment) if config.teacher_epochs else (None, {})
    with use_seed(config.seed):
        model = build(config, graph, config.norm)
    before = _diagnose(model, graph)
    task, options = _task(model, graph, config, teacher), _options(config, config.epochs)
    history = fit(task, options, runtime, experiment, vars(config))
    _clear_teacher(runtime, experiment)
    saved_models.save_weights(runtime, model, config)
    return model, training_record(
        NAME,
        config,
        replace(history, seconds=history.seconds + taught.pop("seconds", 0.0)),
        ("torch_geometric", "accelerate"),
        data={"name": graph.name, "fingerprint": fingerprint, "nodes": len(graph.y), "edges": edges},
        figures={**accuracies(_logits(model, graph, config), graph), "epoch": history.selected, **taught},
        diagnosis={"before": before, "after": _diagnose(model, graph)},
    )


run = record_of(train)


def _train_teacher(config: Config, graph: Graph, runtime: Runtime, experiment: str) -> tuple[Tensor, dict[str, float]]:
    """Return the logits of a trained network without norm, its accuracies, and the seconds of its training."""
    runtime.report_stage("training the teacher")
    with use_seed(config.seed):
        model = build(config, graph, "none")
    places = {"checkpoints": runtime.checkpoints, "tracker_folder": runtime.tracker_folder}
    own: dict[str, Any] = {name: folder / TEACHER for name, folder in places.items() if folder is not None}
    runtime = replace(runtime, should_prune=None, **own)
    task, options = _task(model, graph, config, None), _options(config, config.teacher_epochs)
    history = fit(task, options, runtime, f"{experiment}-{TEACHER}", vars(config))
    logits = _logits(model, graph, config)
    found = {f"{TEACHER}_{name}": value for name, value in accuracies(logits, graph).items()}
    return logits, found | {"seconds": history.seconds}


def _clear_teacher(runtime: Runtime, experiment: str) -> None:
    """Remove the checkpoints of the teacher, once the student is trained."""
    if runtime.checkpoints is not None:
        Checkpoints(runtime.checkpoints / TEACHER, f"{experiment}-{TEACHER}").clear()


def _options(config: Config, epochs: int) -> TrainingOptions:
    return TrainingOptions(epochs=epochs, seed=config.seed, select="validation_loss", better="lower")


def _task(model: nn.Module, graph: Graph, config: Config, teacher: Tensor | None) -> Task:
    whole = {"x": graph.x, "edge_index": graph.edge_index, "y": graph.y, "train": graph.train}
    whole |= {} if teacher is None else {TEACHER: teacher}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        known = draw_inputs(batch["train"], config.label_rate)
        logits = predict(model, batch["x"], batch["edge_index"], batch["y"], known, config.label_passes)
        asked = batch["train"] & ~known
        value = robust_cross_entropy(logits[asked], batch["y"][asked])
        if TEACHER not in batch:
            return value
        taught = distillation_loss(logits, batch[TEACHER], config.distill_temperature)
        return (1 - config.distill) * value + config.distill * taught

    def evaluate(model: nn.Module) -> dict[str, float]:
        logits = _logits(model, graph, config)
        held_out = graph.validation
        found = float(robust_cross_entropy(logits[held_out], graph.y[held_out]))
        return {"validation": accuracies(logits, graph)["validation"], "validation_loss": found}

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0

    optimizer = torch.optim.RMSprop(model.parameters(), lr=config.lr)
    return Task(model, optimizer, lambda epoch: [whole], loss, evaluate, schedule, sharding="none")


@torch.no_grad()
def _logits(model: nn.Module, graph: Graph, config: Config) -> Tensor:
    """Return the logits (n, classes) of a model in evaluation mode, where all training labels are inputs."""
    device = next(model.parameters()).device
    x, edges, y, known = (t.to(device) for t in (graph.x, graph.edge_index, graph.y, graph.train))
    return predict(model, x, edges, y, known, config.label_passes).cpu()


def accuracies(logits: Tensor, graph: Graph) -> dict[str, float]:
    """Return the accuracy on validation and test; training nodes have their own labels as inputs."""
    right = (logits.argmax(1) == graph.y).float()
    return {"validation": float(right[graph.validation].mean()), "test": float(right[graph.test].mean())}


def _diagnose(model: nn.Module, graph: Graph) -> dict[str, Any]:
    """Measure the hidden layers after their norm, with the training labels as inputs."""
    labels = F.one_hot(graph.y, graph.classes) * graph.train.unsqueeze(1)
    batch = {"x": torch.cat([graph.x, labels.to(graph.x.dtype)], 1), "edge_index": graph.edge_index}
    plan = Plan(baseline=0, rank_samples=1, embed=False)
    return summarize_diagnosis(diagnose(model, [batch], modules="norms.*", plan=plan))


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
