"""Configuration of the recipe moco, and its untrained encoder."""

from dataclasses import dataclass
from typing import Any

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, reset_idle
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive.config import DATA, MODEL, TRAINING, VIEWS, ContrastConfig
from uncollapse.lab.experiments.contrastive.objectives import OBJECTIVE
from uncollapse.lab.models.image_encoder import LEAST_SIDE, RESNETS, STEMS, MomentumEncoder, ResNetEncoder, add_mlp

SMALL_ALEXNET = "small_alexnet"
PROBE = "Linear evaluation"  # panel of the help
IMAGES = {"imagenet": 1_281_167, "imagenet100": 126_689, "tinyimagenet20": 9000}
MULTIPLICATIONS = {"resnet18": 1.8, "resnet34": 3.7, "resnet50": 4.1, SMALL_ALEXNET: 4.8}  # billions, for 224 pixels
SPEED = {"no": 8.0, "bf16": 16.0, "fp16": 8.0}  # billions of them per second, on one core


@dataclass(frozen=True)
class ProbeConfig:
    """Training of the linear classifier. The defaults are MoCo's for ImageNet (arXiv 1911.05722): SGD, no decay."""

    probe_epochs: int = config_field(100, "Epochs of the linear classifier.", minimum=1, group=PROBE)
    probe_batch: int = config_field(256, "Images per step of the classifier.", minimum=1, group=PROBE)
    probe_lr: float = config_field(30.0, "Learning rate of the classifier, for any batch size.", minimum=0, group=PROBE)
    probe_falls: tuple[float, ...] = config_field(
        (0.6, 0.8), "Fractions of its training after which its learning rate drops.", group=PROBE
    )
    probe_drop: float = config_field(0.1, "Factor by which its learning rate drops.", minimum=0, maximum=1, group=PROBE)

    def __post_init__(self) -> None:
        if any(not 0 < fraction < 1 for fraction in self.probe_falls):
            raise UsageError(f"probe_falls are fractions of the training, between 0 and 1, got {self.probe_falls}.")


@dataclass(frozen=True)
class MomentumConfig(ProbeConfig, ContrastConfig):
    """Configuration of a run. The defaults are MoCo's for ImageNet (arXiv 1911.05722).

    Fields without an effect get their defaults, so that they make no other run.
    """

    data: str = config_field(
        "imagenet",
        "An image set by name, or a folder below --data-root with train/ and val/, or with packed files.",
        group=DATA,
    )
    encoder: str = config_field("resnet50", "Encoder.", choices=(*RESNETS, SMALL_ALEXNET), group=MODEL)
    stem: str = config_field(
        "imagenet", "Stem of a ResNet; cifar: without downsampling, for small images.", choices=STEMS, group=MODEL
    )
    mlp: bool = config_field(False, "A hidden layer before the output, as in MoCo v2.", group=MODEL)
    width: float = config_field(1.0, "small_alexnet: factor of its channels.", minimum=0.001, group=MODEL)
    side: int = config_field(224, "Side of the images in pixels.", minimum=LEAST_SIDE, group=MODEL)
    groups: int = config_field(
        1,
        "Groups of a batch, per process, with batch norm statistics of their own; those of keys are drawn at random. "
        "1: no groups, so that the statistics mark which outputs belong together.",
        minimum=1,
        group=MODEL,
    )
    queue: int = config_field(65_536, "Size of the queue of earlier keys.", minimum=1, group=MODEL)
    ema: float = config_field(
        0.999, "Momentum of the momentum encoder, per step.", minimum=0, maximum=0.99999, group=MODEL
    )
    temperature: float = config_field(0.07, "contrast: temperature.", minimum=1e-3, group=OBJECTIVE)
    negatives: str = config_field("queue", "contrast: negatives.", choices=("queue",), group=OBJECTIVE)
    within: bool = config_field(True, "uniform: also pairs within a batch, not only with the queue.", group=OBJECTIVE)
    epochs: int = config_field(200, "Passes over the training images.", minimum=1, group=TRAINING)
    batch: int = config_field(256, "Images per step; each has two views.", minimum=2, group=TRAINING)
    lr: float = config_field(
        0.03, "Learning rate of SGD for a batch of 256; it scales with the batch.", minimum=0, group=TRAINING
    )
    schedule: str = config_field(
        "steps",
        "Schedule of the learning rate: drops at `falls`, or a cosine that falls after each epoch.",
        choices=("steps", "cosine"),
        group=TRAINING,
    )
    falls: tuple[float, ...] = config_field(
        (0.6, 0.8), "steps: fractions of the training after which the learning rate drops tenfold.", group=TRAINING
    )
    least_area: float = config_field(
        0.2, "Smallest share of an image's area that a view shows.", minimum=0.01, maximum=1, group=VIEWS
    )
    judged: str = config_field(
        "centre",
        "Evaluation on seven eighths of an image's side, or on all of it.",
        choices=("centre", "whole"),
        group=VIEWS,
    )
    neighbours: bool = config_field(
        True, "Also evaluate by five nearest neighbors, which needs the features of all images.", group=PROBE
    )

    def __post_init__(self) -> None:
        ContrastConfig.__post_init__(self)
        ProbeConfig.__post_init__(self)
        idle = {
            "width": self.encoder != SMALL_ALEXNET,
            "init": self.encoder != SMALL_ALEXNET,
            "stem": self.encoder == SMALL_ALEXNET,
            "within": not self.uniform,
            "falls": self.schedule == "cosine",
        }
        reset_idle(self, [name for name, is_idle in idle.items() if is_idle])


def build_encoder(config: MomentumConfig) -> Any:
    """Return the untrained encoder. The same seed gives the same weights for every objective."""
    with use_seed(config.seed):
        if config.encoder == SMALL_ALEXNET:
            encoder: Any = contrastive.build_encoder(config)
        else:
            encoder = ResNetEncoder(config.encoder, config.dim, config.stem)
        if config.mlp:
            add_mlp(encoder)
        return encoder


def build_momentum_encoder(config: MomentumConfig) -> MomentumEncoder:
    """Return the untrained encoder with its follower and its queue."""
    encoder = build_encoder(config)
    with use_seed(config.seed):
        return MomentumEncoder(encoder, config.queue, config.ema, config.groups)


def cost(config: MomentumConfig) -> float:
    """Return an estimate of a run's seconds on one core, for 50,000 images where their number is not known."""
    images = config.examples or IMAGES.get(config.data) or contrastive.IMAGES.get(config.data, 50_000)
    passes = 4 * config.epochs + config.probe_epochs  # per step: two forward, and a backward that costs two
    if config.encoder == SMALL_ALEXNET:
        work = MULTIPLICATIONS[SMALL_ALEXNET] * config.width**2
    else:
        work = MULTIPLICATIONS[config.encoder] * (16 if config.stem == "cifar" else 1)
    return 20 + passes * images * work * (config.side / 224) ** 2 / SPEED[config.precision]
