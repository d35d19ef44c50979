"""How recipes on sentences train and judge a model: batches, loss, figures, and the record of a run."""

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
from uncollapse.diagnosis.run import Plan, diagnose
from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, batches_by_length, length_buckets
from uncollapse.lab.data.text.glue import GlueTask
from uncollapse.lab.data.text.glue_metrics import compute_metrics
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import linear
from uncollapse.lab.engine.sharding import shard_slice
from uncollapse.lab.engine.task import History, Task, TrainingOptions
from uncollapse.lab.experiments.glue.config import Data, TextConfig
from uncollapse.lab.models.text_classifier import UniformLoss, logits_on_cpu
from uncollapse.lab.runs.records import build_record, fingerprint, round_metrics, summarize_diagnosis
from uncollapse.pairwise import all_ranks

SHOWN = 64  # sentences that are diagnosed
EIGHT = 8  # the published code fills batches up to a multiple of it
LIBRARIES = ("transformers", "accelerate", "scikit-learn", "scipy")


class Batches:
    """Batches that are made when they are asked for, filled up to the longest example or to a multiple of `fill`.

    part: the number of this process and how many there are; each makes its part of every batch.
    """

    def __init__(
        self, data: EncodedTexts, numbers: list[Tensor], fill: int = 1, part: tuple[int, int] = (0, 1)
    ) -> None:
        self.data, self.numbers, self.fill, self.part, self.lengths = data, numbers, fill, part, data.lengths

    def __len__(self) -> int:
        return len(self.numbers)

    def share(self, number: int, count: int) -> "Batches":
        """Those of one of several processes; they are as long as whole ones, since padding may count."""
        return Batches(self.data, self.numbers, self.fill, (number, count))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for numbers in self.numbers:
            longest = int(self.lengths[numbers].max())
            own = numbers[shard_slice(len(numbers), *self.part)]
            yield self.data.batch(own, self.fill * math.ceil(longest / self.fill))


class Training:
    """The task of a run, while it is open: the uniformity loss reads along in the model."""

    def __init__(self, model: nn.Module, config: TextConfig, data: Data) -> None:
        self.model, self.config, self.data = model, config, data
        self.uniform = UniformLoss(model, config.uniform_on, config.temperature)
        self.context = self.uniform.open() if config.cure == "uniform_loss" else nullcontext()

    def __enter__(self) -> Task:
        steps = self.config.epochs * math.ceil(len(self.data.parts["train"]) / self.config.batch)
        if steps < 2:
            raise UsageError("The training has one step, and a line down to 0 none to learn in; take a smaller batch.")
        self.context.__enter__()
        schedule = linear(steps, self.config.warmup)
        task = Task(self.model, optimiser(self.model, self.config), self.batches, self.loss, self.evaluate, schedule)
        return replace(task, sharding="gathered") if self.config.cure == "uniform_loss" else task

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def batches(self, epoch: int) -> Batches:
        """Those of an epoch: of examples about as long, or, where padding counts, at random as the published code."""
        train, size = self.data.parts["train"], self.config.batch
        generator = torch.Generator().manual_seed(1_000_003 * self.config.seed + epoch)
        if self.config.padding == "counted":
            order = torch.randperm(len(train), generator=generator)
            return Batches(train, list(torch.split(order, size)), EIGHT)
        return Batches(train, length_buckets(train.lengths, size, generator))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Of the task, with the uniformity loss where that is the cure."""
        labels = batch["labels"]
        logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits.float()
        scores = self.data.task.scores
        if self.config.cure != "uniform_loss":
            return F.mse_loss(logits.squeeze(-1), labels) if scores else F.cross_entropy(logits, labels)
        each = (logits.squeeze(-1) - labels).square() if scores else F.cross_entropy(logits, labels, reduction="none")
        return all_ranks.mean(each) + self.config.weight * self.uniform()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The figures of what was held out."""
        held = self.data.parts.get("validation")
        return {} if held is None else named("validation", scores(model, held, self.config, self.data.task))


def trained(recipe: str, training: Training, runtime: Runtime) -> tuple[History, dict[str, Any]]:
    """Train, and give the record of the run beside its history."""
    model, config, data = training.model, training.config, training.data
    dev = data.parts[data.task.dev[0]]
    weights = fingerprint(parameter.detach() for parameter in model.parameters())
    before = summarize_diagnosis(diagnosis(model, dev))
    experiment = f"{identity(recipe, config)}-{data.fingerprint()}-{weights}"
    precision: Any = config.precision
    settings = TrainingOptions(config.epochs, config.seed, clip=config.clip or None, precision=precision)
    with training as task:
        history = fit(task, settings, runtime, experiment, vars(config))
    after = summarize_diagnosis(diagnosis(model, dev))
    epochs = [
        round_metrics({name: value for name, value in each.items() if " " not in name}) for each in history.epochs
    ]
    found = {name: value for name, value in epochs[-1].items() if name != "loss"} | _judged(model, config, data)
    facts = {
        "data": _facts(data, weights),
        "figures": round_metrics(found),
        "ended": history.ended,
        "epochs": epochs,
        "diagnosis": {"before": before, "after": after},
    }
    return history, build_record(recipe, config, history.seconds, LIBRARIES, **facts)


def _judged(model: nn.Module, config: TextConfig, data: Data) -> dict[str, float]:
    """The figures of the development parts, and what one answer for all examples would have."""
    found: dict[str, float] = {}
    for part in data.task.dev:
        found |= named(part.removesuffix("_matched"), scores(model, data.parts[part], config, data.task))
    return found | {"always": always(data.parts[data.task.dev[0]], data.task)}


def _facts(data: Data, weights: str) -> dict[str, Any]:
    return {
        "name": Path(data.task.folder).resolve().name,
        "metric": data.task.metrics[0],
        "fingerprint": data.fingerprint(),
        "weights": weights,
        "skipped": data.skipped,
        **{part: len(tokens) for part, tokens in data.parts.items()},
    }


def optimiser(model: nn.Module, config: TextConfig) -> torch.optim.Optimizer:
    """AdamW, whose decay leaves out norms and biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, fused=True)


def logits_of(model: nn.Module, data: EncodedTexts, config: TextConfig) -> Tensor:
    """What the model says of all examples, in their order; it is left in evaluation mode.

    Where padding counts, batches are those of the published code: as the examples come, filled up to a multiple of 8.
    """
    model.eval()
    if config.padding == "counted":
        groups = list(torch.split(torch.arange(len(data)), config.batch))
        return torch.cat([logits_on_cpu(model, batch) for batch in Batches(data, groups, EIGHT)])
    groups = batches_by_length(data.lengths, 2 * config.batch)
    found = torch.cat([logits_on_cpu(model, batch) for batch in Batches(data, groups)])
    return found[torch.cat(groups).argsort()]


def answers(logits: Tensor, task: GlueTask) -> list[float]:
    """Numbers of classes, or scores."""
    bad = int((~logits.isfinite()).sum())
    if bad:  # a largest class would be found all the same
        raise NotFiniteError(f"The model's outputs are not finite: {bad} of {logits.numel()} are NaN or infinite.")
    chosen: list[float] = (logits.squeeze(-1) if task.scores else logits.argmax(-1)).tolist()
    return chosen


def scores(model: nn.Module, data: EncodedTexts, config: TextConfig, task: GlueTask) -> dict[str, float]:
    """The figures of the task on examples with labels."""
    assert data.labels is not None
    return compute_metrics(task.metrics, data.labels.tolist(), answers(logits_of(model, data, config), task))


def always(data: EncodedTexts, task: GlueTask) -> float:
    """The task's main figure of a model that says the same of all examples, the most frequent class: a dead one."""
    assert data.labels is not None
    labels = data.labels.tolist()
    ((most, _),) = Counter(labels).most_common(1)
    return compute_metrics(task.metrics[:1], labels, [most] * len(labels))[task.metrics[0]]


def named(part: str, found: Mapping[str, float]) -> dict[str, float]:
    """Figures with the part in their names; the task's main one, the first, is called as the part."""
    return {f"{part}_{name}" if number else part: found[name] for number, name in enumerate(found)}


def diagnosis(model: nn.Module, data: EncodedTexts) -> Diagnosis:
    """Layer by layer, on the first examples."""
    numbers = list(torch.split(torch.arange(min(SHOWN, len(data))), 16))
    batches = [{k: v for k, v in batch.items() if k != "labels"} for batch in Batches(data, numbers)]
    return diagnose(model, batches, plan=Plan(baseline=0, embed=False))
