"""What recipes on sentences share: their settings, data, training and evaluation."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.diagnosing import diagnose
from uncollapse.diagnosis import Diagnosis
from uncollapse.inputs import NotFiniteError
from uncollapse.lab.configs import setting
from uncollapse.lab.data import glue
from uncollapse.lab.data.encoded import Encoded, bucketed, default_cache, encode, in_order
from uncollapse.lab.data.glue_metrics import figures
from uncollapse.lab.models.text_classifier import UniformLoss, cure, outputs
from uncollapse.lab.records import fingerprint
from uncollapse.lab.schedules import linear
from uncollapse.lab.sessions import Session
from uncollapse.lab.tasks import Settings, Task
from uncollapse.loading.errors import UsageError
from uncollapse.loading.huggingface import Origin, tokenizer
from uncollapse.loading.text import token_limit

SPLIT_SEED = 0  # what is held out, and what a subset has, is the same for every seed of a run
SHOWN = 64  # sentences that are diagnosed
CURES = ("none", "contra_norm", "uniform_loss")


@dataclass(frozen=True)
class TextConfig:
    """A run on a task of GLUE."""

    task: str = setting("rte", f"A folder with your train.tsv and dev.tsv, or a task of GLUE: {', '.join(glue.NAMES)}.")
    model: str = setting(
        "google-bert/bert-base-uncased", "Encoder: a name on the hub, a folder, or package:NAME/FOLDER."
    )
    max_length: int = setting(128, "Tokens of an example.", least=8)
    examples: int = setting(0, "Training examples, drawn once for all seeds; 0: all.", least=0)
    holdout: float = setting(
        0.1, "Share of them that is not trained on but chooses settings; 0: none.", least=0, most=0.9
    )
    cure: str = setting("contra_norm", "What acts against the collapse.", choices=CURES)
    at: str = setting("attention.residual", "contra_norm: its place in each block, or the number of the paper.")
    scale: float = setting(0.1, "contra_norm: its scale.")
    temperature: float = setting(1.0, "contra_norm, uniform_loss: the temperature.", least=1e-3)
    axis: str = setting("tokens", "contra_norm: features is its second version.", choices=("tokens", "features"))
    identity: bool = setting(True, "contra_norm: (1 + s)x − s·m as published for BERT; else x − s·m, as for ALBERT.")
    dual: bool = setting(False, "contra_norm: both terms of the gradient.")
    norm: str = setting("layer", "contra_norm: the norm behind it, the model's or L2.", choices=("layer", "l2"))
    padding: str = setting(
        "masked", "contra_norm: counted takes padding for tokens, as published.", choices=("masked", "counted")
    )
    weight: float = setting(1.0, "uniform_loss: its weight.", least=0)
    uniform_on: str = setting(
        "tokens", "uniform_loss: on the last layer's tokens, or on pooled rows.", choices=("tokens", "pooled")
    )
    epochs: int = setting(5, "Passes over the training examples.", least=1)
    batch: int = setting(32, "Examples in a step.", least=1)
    lr: float = setting(2e-5, "Largest learning rate of AdamW; it falls in a line.", least=0)
    warmup: float = setting(0.0, "Share of the steps in which the learning rate rises.", least=0, most=0.9)
    weight_decay: float = setting(0.0, "Weight decay of AdamW, not of norms and biases.", least=0)
    clip: float = setting(0.0, "Largest length of the gradient; 0: any.", least=0)
    precision: str = setting("no", "Half precision in training.", choices=("no", "bf16", "fp16"))
    seed: int = setting(0, "Of the head, of dropout and of the order of the examples.", least=0, most=2**31)

    def __post_init__(self) -> None:
        glue.check(self.task)


@dataclass(frozen=True)
class Data:
    """Token ids of all parts: train, validation if a share is held out, dev or dev_matched and dev_mismatched.

    skipped: damaged rows that were left out. task: what is learnt from them.
    """

    parts: Mapping[str, Encoded]
    tokenizer: Any
    skipped: int
    task: glue.Glue

    def fingerprint(self) -> str:
        """16 hex digits that change when any token or label does."""
        tensors = (t for part in self.parts.values() for t in (part.ids, part.starts, part.labels) if t is not None)
        return fingerprint(tensors)


def load(config: TextConfig, session: Session, origin: Origin) -> Data:
    """The data of a run, in tokens of its model."""
    words = tokenizer(origin)
    task = glue.find(config.task)
    whole = glue.load(task, "train", session.data_root)
    if config.examples > len(whole):
        raise UsageError(f"{config.task} has {len(whole)} training examples, got examples {config.examples}.")
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(SPLIT_SEED))
    order = order[: config.examples or len(whole)]
    held = round(config.holdout * len(order))
    texts = {"train": whole.chosen(order[held:].tolist())}
    if config.holdout and not (held and len(order) - held):
        raise UsageError(f"holdout {config.holdout} of {len(order)} examples leaves a part empty.")
    if held:
        texts["validation"] = whole.chosen(order[:held].tolist())
    texts |= {part: glue.load(task, part, session.data_root) for part in task.dev}
    parts = {name: encoded(part, words, config, task) for name, part in texts.items()}
    return Data(parts, words, sum(part.skipped for part in texts.values()), task)


def encoded(part: glue.Examples, words: Any, config: TextConfig, task: glue.Glue) -> Encoded:
    """Examples in tokens, from the cache if they are there."""
    return encode(part, words, config.max_length, classes=not task.scores, cache=default_cache())


def put_cure(model: nn.Module, config: TextConfig) -> None:
    """The cure of a run, in its model."""
    options = {name: getattr(config, name) for name in ("scale", "temperature", "axis", "identity", "dual", "padding")}
    cure(model, config.cure, at=config.at, norm=config.norm, **options)


def settings_of(config: TextConfig) -> Settings:
    """How a run is trained."""
    precision: Any = config.precision
    return Settings(config.epochs, config.seed, clip=config.clip or None, precision=precision)


def steps(config: TextConfig, examples: int) -> int:
    """Steps of a whole training."""
    return config.epochs * math.ceil(examples / config.batch)


class Training:
    """The task of a run, while it is open: the uniformity loss reads along in the model."""

    def __init__(self, model: nn.Module, config: TextConfig, data: Data) -> None:
        self.model, self.config, self.data = model, config, data
        self.uniform = UniformLoss(model, config.uniform_on, config.temperature)
        self.context = self.uniform.open() if config.cure == "uniform_loss" else nullcontext()

    def __enter__(self) -> Task:
        self.context.__enter__()
        train = self.data.parts["train"]
        schedule = linear(steps(self.config, len(train)), self.config.warmup)
        return Task(self.model, optimiser(self.model, self.config), self.batches, self.loss, self.evaluate, schedule)

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def batches(self, epoch: int) -> "_Batches":
        """Those of an epoch."""
        train = self.data.parts["train"]
        generator = torch.Generator().manual_seed(1_000_003 * self.config.seed + epoch)
        return _Batches(train, bucketed(train.lengths, self.config.batch, generator))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Of the task, with the uniformity loss where that is the cure."""
        labels = batch["labels"]
        logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits.float()
        scores = self.data.task.scores
        value = F.mse_loss(logits.squeeze(-1), labels) if scores else F.cross_entropy(logits, labels)
        return value + self.config.weight * self.uniform() if self.config.cure == "uniform_loss" else value

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The figures of what was held out."""
        held = self.data.parts.get("validation")
        return {} if held is None else named("validation", scores(model, held, self.config, self.data.task))


class _Batches:
    """Batches that are made when they are asked for."""

    def __init__(self, data: Encoded, numbers: list[Tensor]) -> None:
        self.data, self.numbers = data, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Any:
        return (self.data.batch(numbers) for numbers in self.numbers)


def optimiser(model: nn.Module, config: TextConfig) -> torch.optim.Optimizer:
    """AdamW, whose decay leaves out norms and biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr, fused=True)


def logits_of(model: nn.Module, data: Encoded, batch: int) -> Tensor:
    """What the model says of all examples, in their order; it is left in evaluation mode."""
    model.eval()
    groups = in_order(data.lengths, batch)
    found = torch.cat([outputs(model, data.batch(numbers)) for numbers in groups])
    return found[torch.cat(groups).argsort()]


def answers(logits: Tensor, task: glue.Glue) -> list[float]:
    """Numbers of classes, or scores."""
    bad = int((~logits.isfinite()).sum())
    if bad:  # a largest class would be found all the same
        raise NotFiniteError(f"The model's outputs are not finite: {bad} of {logits.numel()} are NaN or infinite.")
    chosen: list[float] = (logits.squeeze(-1) if task.scores else logits.argmax(-1)).tolist()
    return chosen


def scores(model: nn.Module, data: Encoded, config: TextConfig, task: glue.Glue) -> dict[str, float]:
    """The figures of the task on examples with labels."""
    assert data.labels is not None
    found = answers(logits_of(model, data, 2 * config.batch), task)
    return figures(task.metrics, data.labels.tolist(), found)


def named(part: str, found: Mapping[str, float]) -> dict[str, float]:
    """Figures with the part in their names; the task's main one, the first, is called as the part."""
    return {f"{part}_{name}" if number else part: found[name] for number, name in enumerate(found)}


def diagnosis(model: nn.Module, data: Encoded) -> Diagnosis:
    """Layer by layer, on the first examples."""
    numbers = torch.split(torch.arange(min(SHOWN, len(data))), 16)
    batches = [{k: v for k, v in data.batch(part).items() if k != "labels"} for part in numbers]
    return diagnose(model, batches, baseline=0, embed=False)


def check_length(config: TextConfig, words: Any, model: nn.Module) -> None:
    """Raise if the model cannot read that many tokens."""
    try:
        token_limit(words, model, config.max_length)
    except UsageError as error:
        raise UsageError(str(error).replace("--max-length", "max_length")) from error
