"""Training and evaluation of the recipes on GLUE tasks: batches, loss, metrics, and the record of a run."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import diagnose
from uncollapse.diagnosis.target import Plan
from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, batches_by_length, length_buckets
from uncollapse.lab.data.text.glue import GlueTask
from uncollapse.lab.data.text.glue_files import compute_metrics
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import linear
from uncollapse.lab.engine.sharding import shard_slice
from uncollapse.lab.engine.task import History, Task, TrainingOptions
from uncollapse.lab.experiments.glue.config import Config, Data
from uncollapse.lab.models.text_classifier import UniformLoss, logits_on_cpu
from uncollapse.lab.runs.results import build_record, fingerprint, round_metrics, summarize_diagnosis
from uncollapse.pairwise import all_ranks

DIAGNOSED = 64  # sentences
PAD_TO = 8  # the published code pads batches to a multiple of it
LIBRARIES = ("transformers", "accelerate", "scikit-learn", "scipy")


class Batches:
    """Batches that are built on demand, padded to the longest example and to a multiple of `pad_to`.

    Args:
        data: The examples.
        numbers: The numbers of the examples in each batch.
        pad_to: Lengths are multiples of it.
        part: Rank and number of the processes that share every batch.
    """

    def __init__(
        self, data: EncodedTexts, numbers: list[Tensor], pad_to: int = 1, part: tuple[int, int] = (0, 1)
    ) -> None:
        self.data, self.numbers, self.pad_to, self.part, self.lengths = data, numbers, pad_to, part, data.lengths

    def __len__(self) -> int:
        return len(self.numbers)

    def share(self, number: int, count: int) -> "Batches":
        """Return the part of one of several processes. It is padded as the whole batch, since padding may count."""
        return Batches(self.data, self.numbers, self.pad_to, (number, count))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for numbers in self.numbers:
            longest = int(self.lengths[numbers].max())
            own = numbers[shard_slice(len(numbers), *self.part)]
            yield self.data.batch(own, self.pad_to * math.ceil(longest / self.pad_to))


class Training:
    """The task of a run as a context manager: while it is open, the uniformity loss reads the model's activations."""

    def __init__(self, model: nn.Module, config: Config, data: Data) -> None:
        self.model, self.config, self.data = model, config, data
        self.uniform = UniformLoss(model, config.uniform_on, config.temperature)
        self.context = self.uniform.open() if config.cure == "uniform_loss" else nullcontext()

    def __enter__(self) -> Task:
        steps = self.config.epochs * math.ceil(len(self.data.parts["train"]) / self.config.batch)
        at_start = self.config.schedule == "transformers"
        if steps < 2 and not at_start:
            raise UsageError(
                "The training has one step, at which a linear schedule is 0 already. Take a smaller batch."
            )
        self.context.__enter__()
        schedule = linear(steps, self.config.warmup, at_start=at_start)
        task = Task(
            self.model, build_optimizer(self.model, self.config), self.batches, self.loss, self.evaluate, schedule
        )
        return replace(task, sharding="gathered") if self.config.cure == "uniform_loss" else task

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def batches(self, epoch: int) -> Batches:
        """Return the batches of an epoch: of similar lengths, or random as published where padding counts."""
        train, size = self.data.parts["train"], self.config.batch
        generator = torch.Generator().manual_seed(1_000_003 * self.config.seed + epoch)
        if self.config.padding == "counted":
            order = torch.randperm(len(train), generator=generator)
            return Batches(train, list(torch.split(order, size)), PAD_TO)
        return Batches(train, length_buckets(train.lengths, size, generator))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of the task, plus the uniformity loss where that is the cure."""
        labels = batch["labels"]
        logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits.float()
        scores = self.data.task.scores
        if self.config.cure != "uniform_loss":
            return F.mse_loss(logits.squeeze(-1), labels) if scores else F.cross_entropy(logits, labels)
        each = (logits.squeeze(-1) - labels).square() if scores else F.cross_entropy(logits, labels, reduction="none")
        return all_ranks.mean(each) + self.config.weight * self.uniform()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics on the held-out examples."""
        if "validation" not in self.data.parts:
            return {}
        found = evaluate_split(model, self.data.parts["validation"], self.config, self.data.task)
        return prefix_metrics("validation", found)


def fit_and_record(recipe: str, training: Training, runtime: Runtime) -> tuple[History, dict[str, Any]]:
    """Train; return the history and the record of the run."""
    model, config, data = training.model, training.config, training.data
    dev = data.parts[data.task.dev[0]]
    weights = fingerprint(parameter.detach() for parameter in model.parameters())
    before = summarize_diagnosis(diagnose_split(model, dev))
    experiment = f"{identity(recipe, config)}-{data.fingerprint()}-{weights}"
    precision: Any = config.precision
    settings = TrainingOptions(config.epochs, config.seed, clip=config.clip or None, precision=precision)
    with training as task:
        history = fit(task, settings, runtime, experiment, vars(config))
    after = summarize_diagnosis(diagnose_split(model, dev))
    epochs = [
        round_metrics({name: value for name, value in each.items() if " " not in name}) for each in history.epochs
    ]
    found = {name: value for name, value in epochs[-1].items() if name != "loss"} | _evaluate_dev(model, config, data)
    facts = {
        "data": _describe_data(data, weights),
        "figures": round_metrics(found),
        "ended": history.ended,
        "epochs": epochs,
        "diagnosis": {"before": before, "after": after},
    }
    return history, build_record(recipe, config, history.seconds, LIBRARIES, **facts)


def _evaluate_dev(model: nn.Module, config: Config, data: Data) -> dict[str, float]:
    """Return the metrics on the development splits, and that of a constant prediction."""
    found: dict[str, float] = {}
    for part in data.task.dev:
        found |= prefix_metrics(
            part.removesuffix("_matched"), evaluate_split(model, data.parts[part], config, data.task)
        )
    return found | {"always": constant_baseline(data.parts[data.task.dev[0]], data.task)}


def _describe_data(data: Data, weights: str) -> dict[str, Any]:
    return {
        "name": Path(data.task.folder).resolve().name,
        "metric": data.task.metrics[0],
        "fingerprint": data.fingerprint(),
        "weights": weights,
        "skipped": data.skipped,
        **{part: len(tokens) for part, tokens in data.parts.items()},
    }


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return AdamW without weight decay for norms and biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, eps=config.eps, fused=True)


def predict_logits(model: nn.Module, data: EncodedTexts, config: Config) -> Tensor:
    """Return the logits of all examples in their order; the model is left in evaluation mode.

    Where padding counts, batches are those of the published code: in the order of the examples, padded to a multiple
    of 8.
    """
    model.eval()
    if config.padding == "counted":
        groups = list(torch.split(torch.arange(len(data)), config.evaluation_batch or config.batch))
        return torch.cat([logits_on_cpu(model, batch) for batch in Batches(data, groups, PAD_TO)])
    groups = batches_by_length(data.lengths, 2 * config.batch)
    found = torch.cat([logits_on_cpu(model, batch) for batch in Batches(data, groups)])
    return found[torch.cat(groups).argsort()]


def predictions(logits: Tensor, task: GlueTask) -> list[float]:
    """Return the predicted classes, or scores."""
    bad = int((~logits.isfinite()).sum())
    if bad:  # argmax would return a class all the same
        raise NotFiniteError(f"The model's outputs are not finite: {bad} of {logits.numel()} are NaN or infinite.")
    chosen: list[float] = (logits.squeeze(-1) if task.scores else logits.argmax(-1)).tolist()
    return chosen


def evaluate_split(model: nn.Module, data: EncodedTexts, config: Config, task: GlueTask) -> dict[str, float]:
    """Return the metrics of the task on examples with labels."""
    assert data.labels is not None
    return compute_metrics(task.metrics, data.labels.tolist(), predictions(predict_logits(model, data, config), task))


def constant_baseline(data: EncodedTexts, task: GlueTask) -> float:
    """Return the task's main metric of a collapsed model, which predicts the most frequent class for all examples."""
    assert data.labels is not None
    labels = data.labels.tolist()
    ((most, _),) = Counter(labels).most_common(1)
    return compute_metrics(task.metrics[:1], labels, [most] * len(labels))[task.metrics[0]]


def prefix_metrics(part: str, found: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with the split in their names; the task's main metric, the first, is named as the split."""
    return {f"{part}_{name}" if number else part: found[name] for number, name in enumerate(found)}


def diagnose_split(model: nn.Module, data: EncodedTexts) -> Diagnosis:
    """Diagnose the model on the first examples, layer by layer."""
    return diagnose(model, diagnosis_batches(data), plan=Plan(baseline=0, embed=False))


def diagnosis_batches(data: EncodedTexts) -> list[dict[str, Tensor]]:
    """Return the first examples without their labels."""
    numbers = list(torch.split(torch.arange(min(DIAGNOSED, len(data))), 16))
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in Batches(data, numbers)]
