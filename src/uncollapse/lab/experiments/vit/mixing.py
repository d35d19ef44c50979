"""Images and labels -> mixed images and soft labels: Mixup and CutMix, with labels of patches where they are needed."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from uncollapse.errors import import_optional
from uncollapse.losses.diverse_patch import cutmix_patches


class Mixed(NamedTuple):
    """images (b, c, h, w), the labels (b, C) of the images, and those (b, n, C) of their patches if they are wanted."""

    images: Tensor
    labels: Tensor
    patches: Tensor | None = None


Mixer = Callable[[Tensor, Tensor], Mixed]


def smoothed(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Class numbers (b,) -> probabilities (b, C): a share is spread evenly over all classes."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes


def of_images(classes: int, *, mixup: float, cutmix: float, chance: float, switch: float, smoothing: float) -> Mixer:
    """timm's Mixup: with a chance, one of Mixup and CutMix for the whole batch. Both at 0: only soft labels."""
    if not (mixup or cutmix) or not chance:
        return lambda images, labels: Mixed(images, smoothed(labels, classes, smoothing))
    mix: Any = import_optional("timm.data", "timm").Mixup(
        mixup, cutmix, prob=chance, switch_prob=switch, label_smoothing=smoothing, num_classes=classes
    )

    def mixer(images: Tensor, labels: Tensor) -> Mixed:
        even = len(images) // 2 * 2  # timm mixes the first with the last and so on: one of an odd number is left out
        if not even:
            return Mixed(images, smoothed(labels, classes, smoothing))
        return Mixed(*mix(images[:even], labels[:even]))

    return mixer


def of_patches(classes: int, patch: tuple[int, int], *, cutmix: float, chance: float, smoothing: float) -> Mixer:
    """CutMix that says of every patch what it shows; with a chance, else each patch has the label of its image."""

    def mixer(images: Tensor, labels: Tensor) -> Mixed:
        soft = smoothed(labels, classes, smoothing)
        box = None if random.random() < chance else (0, 0, 0, 0)
        mixed = cutmix_patches(images, soft, patch, alpha=cutmix, box=box)
        return Mixed(mixed.images, mixed.labels.mean(1), mixed.labels)

    return mixer
