"""What a run of MoCo is told, its encoder at its start, how it is trained and judged."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.lab.config.fields import config_field, config_fields
from uncollapse.lab.data.image.image_batches import ImageBatch
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive import frozen_probe
from uncollapse.lab.experiments.contrastive.config import DATA, MODEL, TRAINING, VIEWS, ContrastConfig, Data
from uncollapse.lab.experiments.contrastive.objectives import OBJECTIVE, queue_objective
from uncollapse.lab.experiments.contrastive.training import OUTPUT, EncoderTraining
from uncollapse.lab.experiments.moco.online_probe import PROBE, OnlineProbe, ProbeConfig
from uncollapse.lab.models.image_encoder import LEAST_SIDE, RESNETS, STEMS, ResNetEncoder
from uncollapse.lab.models.momentum_encoder import MomentumEncoder, add_mlp

SMALL_ALEXNET = "small_alexnet"
IMAGES = {"imagenet": 1_281_167, "imagenet100": 126_689, "tinyimagenet20": 9000}
MULTIPLICATIONS = {"resnet18": 1.8, "resnet34": 3.7, "resnet50": 4.1, SMALL_ALEXNET: 4.8}  # billions, of 224 pixels
SPEED = {"no": 8.0, "bf16": 16.0, "fp16": 8.0}  # billions of them in a second, on one core


@dataclass(frozen=True)
class MomentumConfig(ProbeConfig, ContrastConfig):
    """A run. The defaults are those of MoCo for ImageNet (arXiv 1911.05722); what has no effect gets its default."""

    data: str = config_field(
        "imagenet", "A set by name, or a folder below --data-root with train/ and val/, or packed files.", group=DATA
    )
    encoder: str = config_field("resnet50", "What is trained.", choices=(*RESNETS, SMALL_ALEXNET), group=MODEL)
    stem: str = config_field(
        "imagenet", "How a ResNet begins; cifar: without making small pictures smaller.", choices=STEMS, group=MODEL
    )
    mlp: bool = config_field(False, "A hidden layer before the output, as in MoCo v2.", group=MODEL)
    width: float = config_field(1.0, "small_alexnet: factor of its channels.", minimum=0.001, group=MODEL)
    side: int = config_field(224, "Side of the pictures in pixels.", minimum=LEAST_SIDE, group=MODEL)
    queue: int = config_field(65_536, "Earlier outputs of the follower that are remembered.", minimum=1, group=MODEL)
    ema: float = config_field(
        0.999, "Share of its own weights that the follower keeps in a step.", minimum=0, maximum=0.99999, group=MODEL
    )
    temperature: float = config_field(0.07, "contrast: its temperature.", minimum=1e-3, group=OBJECTIVE)
    negatives: str = config_field("queue", "contrast: those that are remembered.", choices=("queue",), group=OBJECTIVE)
    within: bool = config_field(
        True, "uniform: count pairs within a batch beside those with the queue.", group=OBJECTIVE
    )
    epochs: int = config_field(200, "Passes over the pictures to learn from.", minimum=1, group=TRAINING)
    batch: int = config_field(256, "Pictures in a step; each has two views.", minimum=2, group=TRAINING)
    lr: float = config_field(
        0.03, "Learning rate of SGD for a batch of 256; it grows with the batch.", minimum=0, group=TRAINING
    )
    schedule: str = config_field(
        "steps",
        "How the learning rate falls: at `falls`, or along a cosine.",
        choices=("steps", "cosine"),
        group=TRAINING,
    )
    falls: tuple[float, ...] = config_field(
        (0.6, 0.8), "steps: shares of the training after which the learning rate falls to a tenth.", group=TRAINING
    )
    least_area: float = config_field(
        0.2, "Smallest part of a picture that is a view.", minimum=0.01, maximum=1, group=VIEWS
    )
    neighbours: bool = config_field(
        True, "Judge by five neighbours too, which looks at all pictures at once.", group=PROBE
    )

    def __post_init__(self) -> None:
        ContrastConfig.__post_init__(self)
        ProbeConfig.__post_init__(self)
        idle = {
            "width": self.encoder != SMALL_ALEXNET,
            "stem": self.encoder == SMALL_ALEXNET,
            "within": not self.uniform,
            "falls": self.schedule == "cosine",
        }
        known = config_fields(type(self))
        for name in (name for name, unused in idle.items() if unused):
            object.__setattr__(self, name, known[name].default)


def build_encoder(config: MomentumConfig) -> Any:
    """The encoder at its start. The same seed gives the same weights whatever it is trained for."""
    with use_seed(config.seed):
        if config.encoder == SMALL_ALEXNET:
            encoder: Any = contrastive.build_encoder(config)
        else:
            encoder = ResNetEncoder(config.encoder, config.dim, config.stem)
        if config.mlp:
            add_mlp(encoder)
        return encoder


def build_momentum_encoder(config: MomentumConfig) -> MomentumEncoder:
    """The encoder with its follower and its queue, at their start."""
    encoder = build_encoder(config)
    with use_seed(config.seed):
        return MomentumEncoder(encoder, config.queue, config.ema)


class MomentumTraining(EncoderTraining):
    """The task of a run of MoCo; `encoder` is the one with its follower and queue."""

    encoder: MomentumEncoder

    def __init__(self, model: MomentumEncoder, config: MomentumConfig, data: Data, runtime: Runtime) -> None:
        super().__init__(
            model, config, data, runtime, lambda x, y, queue: queue_objective(config, x, y, queue, config.within)
        )
        self.momentum = config

    def task(self) -> Task:
        """What is trained, and how; the follower has no gradients, so that the optimiser leaves it alone."""
        made = super().task()
        if self.momentum.schedule == "steps":
            return made
        return replace(made, schedule=cosine(self.config.epochs * len(self.batches(1))))

    def loss(self, encoder: nn.Module, batch: ImageBatch) -> Tensor:
        """Of a batch: the first views are the encoder's, the second ones the follower's."""
        pair = self.views.pair(batch, self.encoder.queue.device)
        return self._loss(*encoder(*(view.to(memory_format=torch.channels_last) for view in pair)))

    def evaluate(self, encoder: nn.Module) -> dict[str, float]:
        """Alignment and uniformity of the pictures that were held back, both views being the encoder's."""
        return super().evaluate(encoder.encoder if isinstance(encoder, MomentumEncoder) else encoder)

    def judged(self, probe: OnlineProbe) -> dict[str, float]:
        """Accuracies on what was held back and on the test pictures: linear, and by five neighbours."""
        encoder, layer = self.encoder.encoder, probe.layer
        self.runtime.report_stage("training a linear classifier")
        probe.learn()
        parts = {}
        for part in ("train", "validation", "test") if self.momentum.neighbours else ("validation", "test"):
            self.runtime.report_stage(f"looking at the {part} pictures")
            parts[part] = self.features(encoder, part, (layer, OUTPUT))
        found: dict[str, float] = {}
        for part in ("validation", "test"):
            shares = probe.judge(parts[part][layer], parts[part]["labels"])
            found |= {part if name == "top1" else f"{part}_{name}": share for name, share in shares.items()}
        if not self.momentum.neighbours:
            return found
        for name in (layer, OUTPUT):
            labelled = {part: (rows[name], rows["labels"]) for part, rows in parts.items()}
            near = frozen_probe.knn_probe(labelled.pop("train"), labelled)
            found |= {f"{part}_{name}_knn": share for part, share in near.items()}
        return found


def cost(config: MomentumConfig) -> float:
    """Roughly the seconds of a run on one core; of 50,000 pictures, where it is not said how many there are."""
    images = config.examples or IMAGES.get(config.data) or contrastive.IMAGES.get(config.data, 50_000)
    looks = 4 * config.epochs + config.probe_epochs  # a step goes forward twice and back, which takes as long again
    if config.encoder == SMALL_ALEXNET:
        work = MULTIPLICATIONS[SMALL_ALEXNET] * config.width**2
    else:
        work = MULTIPLICATIONS[config.encoder] * (16 if config.stem == "cifar" else 1)
    return 20 + looks * images * work * (config.side / 224) ** 2 / SPEED[config.precision]
