"""Configuration of the recipes with a small image encoder, their data, and the untrained encoder."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, reset_idle
from uncollapse.lab.data.image import image_sets
from uncollapse.lab.data.image.augmentation import InputSpec
from uncollapse.lab.data.image.image_source import Images, ImageSet, split_images
from uncollapse.lab.data.image.two_views import ViewAugmentation
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.contrastive.objectives import ObjectiveConfig
from uncollapse.lab.models.image_encoder import INITS, LEAST_SIDE, SmallAlexNet

FEWEST = {"train": 5, "validation": 2, "test": 2}  # images: five neighbours vote, and uniformity needs a pair
SPLIT_SEED = 0  # every seed of a run has the same held-out images and the same subset
DATA, MODEL, TRAINING, VIEWS = "Data", "Encoder", "Training", "Views"  # panels of the help
IMAGES = {
    "stl10": 4500,
    "digits": 1347,
    "cifar10": 45_000,
    "cifar100": 45_000,
    "fashion-mnist": 54_000,
}  # training images, with a tenth held out
OF_TRAINING = {
    "batch",
    "partial_batch",
    "lr",
    "momentum",
    "weight_decay",
    "falls",
    "precision",
    "unlabelled",
}  # unused without training
PIXELS = {  # mean and standard deviation per channel
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "stl10": (
        (0.44087801806139126, 0.42790631331699347, 0.3867879370752931),
        (0.26826768628079806, 0.2610450402318512, 0.26866836876860795),
    ),
}


@dataclass(frozen=True)
class EncoderConfig:
    """What the recipes with a small AlexNet share.

    The defaults of the training and of the views are those of Wang & Isola for STL-10; the presets named `paper…` also
    have their initial weights, pixel statistics, last batches and evaluation.
    """

    data: str = config_field(
        "stl10",
        "stl10, cifar10, cifar100, fashion-mnist, digits, or a folder in --data-root with train/CLASS and val/CLASS.",
        group=DATA,
    )
    class_list: str = config_field("", "File with the classes to use, one per line; all if not given.", group=DATA)
    unlabelled: bool = config_field(False, "stl10: also train on its 100,000 images without labels.", group=DATA)
    examples: int = config_field(0, "Labeled training images, drawn once for all seeds; 0: all.", minimum=0, group=DATA)
    holdout: float = config_field(
        0.1,
        "Share of the training images that is held out, to choose settings on; 0: none, and the test images are "
        "measured instead, at the end.",
        minimum=0,
        maximum=0.9,
        group=DATA,
    )
    width: float = config_field(
        1.0, "Factor of the small AlexNet's channels; 0.25: a quarter.", minimum=0.001, group=MODEL
    )
    dim: int = config_field(128, "Output features.", minimum=1, group=MODEL)
    init: str = config_field(
        "kaiming", "Initial weights: by Kaiming's rule, or all from N(0, 0.02²).", choices=INITS, group=MODEL
    )
    side: int = config_field(
        64, "Side in pixels to which images and views are resized.", minimum=LEAST_SIDE, group=MODEL
    )
    epochs: int = config_field(
        200, "Passes over the training images; 0: the encoder stays as it is initialized.", minimum=0, group=TRAINING
    )
    batch: int = config_field(768, "Images per step; each has two views.", minimum=2, group=TRAINING)
    partial_batch: bool = config_field(
        False, "Also train on the last images of an epoch, which are fewer than a batch.", group=TRAINING
    )
    lr: float = config_field(
        0.12, "Learning rate of SGD for a batch of 256; it scales with the batch.", minimum=0, group=TRAINING
    )
    momentum: float = config_field(0.9, "Momentum of SGD.", minimum=0, maximum=0.999, group=TRAINING)
    weight_decay: float = config_field(1e-4, "Weight decay of SGD.", minimum=0, group=TRAINING)
    falls: tuple[float, ...] = config_field(
        (0.775, 0.85, 0.925), "Fractions of the training after which the learning rate drops tenfold.", group=TRAINING
    )
    precision: str = config_field("no", "Half precision in training.", choices=("no", "bf16", "fp16"), group=TRAINING)
    least_area: float = config_field(
        0.08, "Smallest share of an image's area that a view shows.", minimum=0.01, maximum=1, group=VIEWS
    )
    flip: float = config_field(0.5, "Probability that a view is flipped.", minimum=0, maximum=1, group=VIEWS)
    jitter: float = config_field(
        0.4, "Strength of the jitter of brightness, contrast and saturation.", minimum=0, maximum=1, group=VIEWS
    )
    hue: float = config_field(
        0.4, "Largest shift of the hue; 0.5: half of the color circle.", minimum=0, maximum=0.5, group=VIEWS
    )
    jitter_chance: float = config_field(1.0, "Probability of the color jitter.", minimum=0, maximum=1, group=VIEWS)
    grey: float = config_field(0.2, "Probability of grayscale.", minimum=0, maximum=1, group=VIEWS)
    blur: float = config_field(0.0, "Probability that a view is blurred.", minimum=0, maximum=1, group=VIEWS)
    judged: str = config_field(
        "centre",
        "Evaluation on seven eighths of an image's side, on all of it, or as published for STL-10: on 64 of 70 pixels, "
        "with linear classifiers that are trained on random crops.",
        choices=("centre", "whole", "published"),
        group=VIEWS,
    )
    pixel_stats: str = config_field(
        "imagenet", "Mean and standard deviation by which pixels are normalized.", choices=tuple(PIXELS), group=VIEWS
    )
    seed: int = config_field(
        0, "Seed of the weights, the order of the images and their views.", minimum=0, maximum=2**31, group=TRAINING
    )

    def __post_init__(self) -> None:
        if any(not 0 < share < 1 for share in self.falls):
            raise UsageError(f"falls are fractions of the training, between 0 and 1, got {self.falls}.")

    @property
    def input_spec(self) -> InputSpec:
        """Return the size and normalization of the encoder's input."""
        return InputSpec(self.side, *PIXELS[self.pixel_stats], "bilinear")

    @property
    def augmentation(self) -> ViewAugmentation:
        """Return the augmentation of a view."""
        return ViewAugmentation(
            self.least_area, self.flip, self.jitter, self.hue, self.jitter_chance, self.grey, self.blur
        )


@dataclass(frozen=True)
class ContrastConfig(EncoderConfig, ObjectiveConfig):
    """Configuration of a run with an objective. Fields without an effect get their defaults."""

    def __post_init__(self) -> None:
        EncoderConfig.__post_init__(self)
        ObjectiveConfig.__post_init__(self)
        if not self.epochs:
            reset_idle(self, {field.name for field in fields(ObjectiveConfig)} | OF_TRAINING)


@dataclass(frozen=True)
class Data:
    """The images of a run.

    Args:
        set: The image set as it was loaded.
        learned: Images that the encoder is trained on, with or without labels.
        splits: Labeled images: train and, if there are any, validation and test.
    """

    set: ImageSet
    learned: Images
    splits: Mapping[str, Images]

    @property
    def measured(self) -> str:
        """Return the split on which the encoder is measured: the held-out images or, without any, the test images."""
        return "validation" if "validation" in self.splits else "test"

    @property
    def facts(self) -> dict[str, Any]:
        """Return what a record says of the images."""
        sizes = {"learned": len(self.learned)} | {name: len(split) for name, split in self.splits.items()}
        return {"name": self.set.name, **self.set.facts, "fingerprint": self.fingerprint(), **sizes}

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change when any split does."""
        return "-".join(images.fingerprint()[:8] for images in (self.learned, *self.splits.values()))


def load_data(config: EncoderConfig, runtime: Runtime, labelled: bool = True) -> Data:
    """Return the images of a run. The encoder is never trained on images that are held out.

    Args:
        config: Configuration of the run.
        runtime: Its `data_root` has the images.
        labelled: Whether classes are needed. Without them a plain folder of images will do; it has no split "test".
    """
    found = None if labelled or config.class_list else image_sets.load_unlabelled(config.data, runtime.data_root)
    if found is None:
        found = image_sets.load_image_set(config.data, runtime.data_root, config.class_list, config.unlabelled)
    is_labelled = found.train.labels >= 0
    splits = split_images(found.train.select(is_labelled.nonzero()[:, 0]), config.examples, config.holdout, SPLIT_SEED)
    _check_sizes(splits | {"test": found.test})
    learned = splits["train"]
    if config.unlabelled:
        numbers = torch.cat([learned.numbers, found.train.numbers[~is_labelled]])
        labels = torch.cat([learned.labels, found.train.labels[~is_labelled]])
        learned = Images(learned.source, numbers, labels, learned.classes)
    return Data(found, learned, splits | ({"test": found.test} if len(found.test) else {}))


def _check_sizes(splits: Mapping[str, Images]) -> None:
    """Raise an error, before the training, if there are too few images to train or to measure an encoder on."""
    needed = ("train", "validation" if "validation" in splits else "test")
    if any(len(splits[name]) < FEWEST[name] for name in needed):
        wanted = " and ".join(f"{FEWEST[name]} {name}" for name in needed)
        got = " and ".join(str(len(splits[name])) for name in needed)
        raise UsageError(f"Evaluation needs at least {wanted} images, got {got}; change examples or holdout.")


def build_encoder(config: EncoderConfig, dim: int | None = None) -> SmallAlexNet:
    """Return the untrained encoder. The same seed gives the same weights for every objective. dim: output features."""
    with use_seed(config.seed):
        return SmallAlexNet(config.dim if dim is None else dim, config.side, config.width, init=config.init)


def data_fingerprint(config: EncoderConfig, runtime: Runtime) -> str:
    """Return the fingerprint of the images at hand."""
    return load_data(config, runtime, labelled=False).fingerprint()


def data_slug(config: EncoderConfig) -> str:
    """Return the name of the data for file names."""
    return config.data.strip("./").replace("/", "_") or "images"


def cost(config: EncoderConfig) -> float:
    """Return an estimate of a run's seconds on one core, for 50,000 images where their number is not known."""
    labelled = config.examples or IMAGES.get(config.data, 50_000)
    images = labelled + 100_000 * config.unlabelled
    work = (config.side / 32) ** 2 * (config.width / 0.25) ** 2
    probes = 200 * labelled * (2 + work) / 2000 if config.judged == "published" else 0  # a hundred crops for two layers
    return 20 + probes + config.epochs * images * work / (600 if config.precision == "bf16" else 330)
