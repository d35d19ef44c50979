"""What a run of a small encoder is told, its data, and the encoder at its start."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field
from uncollapse.lab.data.image import image_sets
from uncollapse.lab.data.image.augmentation import InputSpec
from uncollapse.lab.data.image.image_source import Images, ImageSet, split_images
from uncollapse.lab.data.image.two_views import ViewAugmentation
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.contrastive.objectives import ObjectiveConfig
from uncollapse.lab.models.image_encoder import LEAST_SIDE, SmallAlexNet

FEWEST = {"train": 5, "validation": 2}  # pictures: five neighbours vote, and two differ or do not
SPLIT_SEED = 0  # what is held back, and what a subset has, is the same for every seed of a run
DATA, MODEL, TRAINING, VIEWS = "Data", "Encoder", "Training", "Views"  # panels of the help
IMAGES = {
    "stl10": 4500,
    "digits": 1347,
    "cifar10": 45_000,
    "cifar100": 45_000,
    "fashion-mnist": 54_000,
}  # to learn from, with a tenth held back
OF_TRAINING = {"batch", "lr", "momentum", "weight_decay", "falls", "precision", "unlabelled"}  # idle without any
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, for all pictures


@dataclass(frozen=True)
class EncoderConfig:
    """What all recipes with a small AlexNet share. The defaults are those of Wang & Isola for STL-10."""

    data: str = config_field(
        "stl10",
        "stl10, cifar10, cifar100, fashion-mnist, digits, or a folder in --data-root with train/CLASS and val/CLASS.",
        group=DATA,
    )
    class_list: str = config_field("", "File with the classes to take, a line each; all if not given.", group=DATA)
    unlabelled: bool = config_field(False, "stl10: learn from its 100,000 pictures without labels too.", group=DATA)
    examples: int = config_field(
        0, "Pictures with labels to learn from, drawn once for all seeds; 0: all.", minimum=0, group=DATA
    )
    holdout: float = config_field(
        0.1,
        "Share of the pictures to learn from that is held back, to choose settings on.",
        minimum=0.001,
        maximum=0.9,
        group=DATA,
    )
    width: float = config_field(
        1.0, "Factor of the small AlexNet's channels; 0.25: a quarter.", minimum=0.001, group=MODEL
    )
    dim: int = config_field(128, "Features of the output.", minimum=1, group=MODEL)
    side: int = config_field(
        64, "Side in pixels to which pictures and views are brought.", minimum=LEAST_SIDE, group=MODEL
    )
    epochs: int = config_field(
        200, "Passes over the pictures to learn from; 0: the encoder as it is drawn.", minimum=0, group=TRAINING
    )
    batch: int = config_field(768, "Pictures in a step; each has two views.", minimum=2, group=TRAINING)
    lr: float = config_field(
        0.12, "Learning rate of SGD for a batch of 256; it grows with the batch.", minimum=0, group=TRAINING
    )
    momentum: float = config_field(0.9, "Of SGD.", minimum=0, maximum=0.999, group=TRAINING)
    weight_decay: float = config_field(1e-4, "Of SGD.", minimum=0, group=TRAINING)
    falls: tuple[float, ...] = config_field(
        (0.775, 0.85, 0.925), "Shares of the training after which the learning rate falls to a tenth.", group=TRAINING
    )
    precision: str = config_field("no", "Half precision in training.", choices=("no", "bf16", "fp16"), group=TRAINING)
    least_area: float = config_field(
        0.08, "Smallest share of a picture's area that a view shows.", minimum=0.01, maximum=1, group=VIEWS
    )
    flip: float = config_field(0.5, "Chance that a view is mirrored.", minimum=0, maximum=1, group=VIEWS)
    jitter: float = config_field(
        0.4, "Most that brightness, contrast and saturation change, as a share.", minimum=0, maximum=1, group=VIEWS
    )
    hue: float = config_field(
        0.4, "Largest turn of the colours; 0.5: half a circle.", minimum=0, maximum=0.5, group=VIEWS
    )
    jitter_chance: float = config_field(1.0, "Chance that colours are changed.", minimum=0, maximum=1, group=VIEWS)
    grey: float = config_field(0.2, "Chance that colours are taken out.", minimum=0, maximum=1, group=VIEWS)
    blur: float = config_field(0.0, "Chance that a view is blurred.", minimum=0, maximum=1, group=VIEWS)
    judged: str = config_field(
        "centre",
        "What is seen of a picture when it is judged: seven eighths of its side, or the whole.",
        choices=("centre", "whole"),
        group=VIEWS,
    )
    seed: int = config_field(
        0, "Of the weights, the order of the pictures and their views.", minimum=0, maximum=2**31, group=TRAINING
    )

    def __post_init__(self) -> None:
        if any(not 0 < share < 1 for share in self.falls):
            raise UsageError(f"falls are shares of the training, between 0 and 1, got {self.falls}.")

    @property
    def look(self) -> InputSpec:
        """What the encoder wants of a picture."""
        return InputSpec(self.side, MEAN, STD, "bilinear")

    @property
    def changes(self) -> ViewAugmentation:
        """What may happen to a view."""
        return ViewAugmentation(
            self.least_area, self.flip, self.jitter, self.hue, self.jitter_chance, self.grey, self.blur
        )


@dataclass(frozen=True)
class ContrastConfig(EncoderConfig, ObjectiveConfig):
    """A run with an objective."""

    def __post_init__(self) -> None:
        EncoderConfig.__post_init__(self)
        ObjectiveConfig.__post_init__(self)
        if not self.epochs:
            names = {field.name for field in fields(ObjectiveConfig)} | OF_TRAINING
            for field in (field for field in fields(self) if field.name in names):
                object.__setattr__(self, field.name, field.default)


@dataclass(frozen=True)
class Data:
    """The pictures of a run. learned: what the encoder sees. parts: with labels; train, validation, test."""

    set: ImageSet
    learned: Images
    parts: Mapping[str, Images]

    @property
    def facts(self) -> dict[str, Any]:
        """What a result says of them."""
        sizes = {"learned": len(self.learned)} | {name: len(part) for name, part in self.parts.items()}
        return {"name": self.set.name, **self.set.facts, "fingerprint": self.fingerprint(), **sizes}

    def fingerprint(self) -> str:
        """Hexadecimal digits that change when any part does."""
        return "-".join(part.fingerprint()[:8] for part in (self.learned, *self.parts.values()))


def load_data(config: EncoderConfig, runtime: Runtime, labelled: bool = True) -> Data:
    """The pictures of a run. Those that are held back are not learned from, in no part.

    labelled: there must be classes to judge by; else a folder of nothing but pictures does, and has no part "test".
    """
    found = None if labelled or config.class_list else image_sets.load_unlabelled(config.data, runtime.data_root)
    if found is None:
        found = image_sets.load_image_set(config.data, runtime.data_root, config.class_list, config.unlabelled)
    is_labelled = found.train.labels >= 0
    parts = split_images(found.train.chosen(is_labelled.nonzero()[:, 0]), config.examples, config.holdout, SPLIT_SEED)
    if any(len(parts[part]) < least for part, least in FEWEST.items()):  # said before it is trained
        wanted = " and ".join(f"{least} {part}" for part, least in FEWEST.items())
        got = " and ".join(str(len(parts[part])) for part in FEWEST)
        raise UsageError(f"An encoder is judged with {wanted} pictures or more, got {got}; change examples or holdout.")
    learned = parts["train"]
    if config.unlabelled:
        numbers = torch.cat([learned.numbers, found.train.numbers[~is_labelled]])
        labels = torch.cat([learned.labels, found.train.labels[~is_labelled]])
        learned = Images(learned.source, numbers, labels, learned.classes)
    return Data(found, learned, parts | ({"test": found.test} if len(found.test) else {}))


def build_encoder(config: EncoderConfig, dim: int | None = None) -> SmallAlexNet:
    """The encoder at its start. The same seed gives the same weights whatever it is trained for. dim: of the output."""
    with use_seed(config.seed):
        return SmallAlexNet(config.dim if dim is None else dim, config.side, config.width)


def data_fingerprint(config: EncoderConfig, runtime: Runtime) -> str:
    """Return the fingerprint of the images at hand."""
    return load_data(config, runtime, labelled=False).fingerprint()


def cost(config: EncoderConfig) -> float:
    """Roughly the seconds of a run on one core; of 50,000 pictures, where it is not said how many there are."""
    images = config.examples or IMAGES.get(config.data, 50_000) + 100_000 * config.unlabelled
    work = (config.side / 32) ** 2 * (config.width / 0.25) ** 2
    return 20 + config.epochs * images * work / (600 if config.precision == "bf16" else 330)
