"""Soft labels for training: Mixup and CutMix with labels of patches, and hard distillation (DeiT, arXiv 2012.12877)."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError, import_optional
from uncollapse.io import timm_models
from uncollapse.lab.runs.results import fingerprint
from uncollapse.lab.runs.saved_models import load_vision_model
from uncollapse.losses.diverse_patch import cutmix_patches


class Mixed(NamedTuple):
    """Images (b, c, h, w), their labels (b, C), and the labels (b, n, C) of their patches if they are needed."""

    images: Tensor
    labels: Tensor
    patches: Tensor | None = None


Mixer = Callable[[Tensor, Tensor], Mixed]


def smooth_labels(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Return probabilities (b, C) of classes (b,), a share of which is spread evenly over all classes."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes


def image_mixer(classes: int, *, mixup: float, cutmix: float, chance: float, switch: float, smoothing: float) -> Mixer:
    """Return timm's mixer: with probability `chance`, Mixup or CutMix of a batch. Both at 0: only smoothed labels."""
    if not (mixup or cutmix) or not chance:
        return lambda images, labels: Mixed(images, smooth_labels(labels, classes, smoothing))
    mix: Any = import_optional("timm.data", "timm").Mixup(
        mixup, cutmix, prob=chance, switch_prob=switch, label_smoothing=smoothing, num_classes=classes
    )

    def mixer(images: Tensor, labels: Tensor) -> Mixed:
        even = len(images) // 2 * 2  # timm mixes pairs: of an odd number one is left out
        if not even:
            return Mixed(images, smooth_labels(labels, classes, smoothing))
        return Mixed(*mix(images[:even], labels[:even]))

    return mixer


def patch_mixer(classes: int, patch: tuple[int, int], *, cutmix: float, chance: float, smoothing: float) -> Mixer:
    """Return CutMix with labels of every patch, applied with probability `chance`."""

    def mixer(images: Tensor, labels: Tensor) -> Mixed:
        soft = smooth_labels(labels, classes, smoothing)
        box = None if random.random() < chance else (0, 0, 0, 0)
        mixed = cutmix_patches(images, soft, patch, alpha=cutmix, box=box)
        return Mixed(mixed.images, mixed.labels.mean(1), mixed.labels)

    return mixer


def twice_mixer(first: Mixer, patch: tuple[int, int]) -> Mixer:
    """Return a mixer that mixes the images of another one once more, by whole patches, as DiversePatch's code does.

    A box of a uniform share of the patches stays. The others, with their labels, are those of an image drawn at random.
    """

    def mixer(images: Tensor, labels: Tensor) -> Mixed:
        images, labels, _ = first(images, labels)
        height, width = patch
        rows, columns = images.shape[-2] // height, images.shape[-1] // width
        top, bottom, left, right = _patch_box(rows, columns)
        stays = torch.zeros(rows, columns, dtype=torch.bool, device=images.device)
        stays[top:bottom, left:right] = True
        partner = torch.randperm(len(images)).to(images.device)
        pixels = stays.repeat_interleave(height, 0).repeat_interleave(width, 1)
        patches = torch.where(stays.flatten()[:, None], labels[:, None], labels[partner][:, None])
        return Mixed(torch.where(pixels, images, images[partner]), patches.mean(1), patches)

    return mixer


def _patch_box(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Return top, bottom, left and right of a random box in a grid of patches, drawn as in DiversePatch's code."""
    area = int(rows * columns * random.random())
    height = random.randint(1, max(1, min(rows, area) - 1))
    width = area // height
    if width > columns:
        height, width = area // columns, columns
    top, left = random.randint(0, rows - height), random.randint(0, columns - width)
    return top, top + height, left, left + width


class Teacher:
    """A frozen model that sees the images of a student in its own size and with its own normalization.

    `fingerprint` has 16 hexadecimal digits of its weights.
    """

    def __init__(self, model: nn.Module, student: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self.fingerprint = fingerprint(parameter.detach() for parameter in model.parameters())
        own, seen = _data_config(model), _data_config(student)
        self.size = tuple(own["input_size"][-2:])
        mean, std, other_mean, other_std = (
            torch.tensor(spec[name]).view(-1, 1, 1) for spec in (own, seen) for name in ("mean", "std")
        )
        self.gain, self.shift = other_std / std, (other_mean - mean) / std

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the classes (b,) that the teacher predicts for images (b, c, h, w) as the student gets them."""
        self.model.to(images.device)
        shown = images * self.gain.to(images) + self.shift.to(images)
        if shown.shape[-2:] != self.size:
            shown = F.interpolate(shown, self.size, mode="bicubic", antialias=True)
        logits: Tensor = self.model(shown)
        if not bool(logits.isfinite().all()):  # argmax would return a class all the same
            raise NotFiniteError("The teacher's outputs are not finite.")
        return logits.argmax(-1)

    @contextmanager
    def show_both_heads(self, student: Any) -> Iterator[None]:
        """Let a student in training mode return the logits of both heads; otherwise it returns their mean."""
        student.set_distilled_training(True)
        try:
            yield
        finally:
            student.set_distilled_training(False)


def load_teacher(name: str, student: Any, classes: Sequence[str]) -> Teacher | None:
    """Return the teacher of a run; None without a name.

    Args:
        name: A pretrained model of timm, or a folder that `save_vision_model` wrote.
        student: A distilled model of timm.
        classes: Names of the student's classes.
    """
    if not name:
        return None
    if not hasattr(student, "set_distilled_training"):
        raise UsageError(
            f"A teacher needs a student with a distillation token, got {type(student).__name__}. Take a distilled "
            "model, such as deit_tiny_distilled_patch16_224, or no teacher."
        )
    if Path(name).is_dir():
        model, known = load_vision_model(name)
    else:
        way_out = "name a folder that --save wrote as the teacher."
        model, known = timm_models.load_timm_model(name, random_weights=False, way_out=way_out), ()
    _check_classes(name, model, known, classes)
    return Teacher(model, student)


def _check_classes(name: str, model: Any, known: Sequence[str], classes: Sequence[str]) -> None:
    count = int(model.num_classes)
    if count != len(classes):
        raise UsageError(f"The teacher {name} has {count} classes, the data {len(classes)}; take another one.")
    if known and tuple(known) != tuple(classes):
        place = next(at for at, pair in enumerate(zip(known, classes, strict=True)) if pair[0] != pair[1])
        raise UsageError(
            f"The teacher {name} has other classes than the data: class {place} is {known[place]!r} there and "
            f"{classes[place]!r} here. Take one that was trained on these classes."
        )


def classification_loss(outputs: Any, mixed: Mixed, teacher: Teacher | None) -> Tensor:
    """Return the cross entropy with soft labels; with a teacher, its mean with that of the teacher's predictions.

        ½ CE(class head, labels) + ½ CE(distillation head, argmax of the teacher)

    Args:
        outputs: Logits (b, C) of the student, or those of its two heads where it has a teacher.
        mixed: The images, which the teacher sees too, and their labels.
        teacher: The teacher, if any.
    """
    if teacher is None:
        return _soft(outputs, mixed.labels)
    by_class, distilled = outputs
    return 0.5 * _soft(by_class, mixed.labels) + 0.5 * F.cross_entropy(distilled.float(), teacher(mixed.images))


def _soft(logits: Tensor, labels: Tensor) -> Tensor:
    return -(labels * logits.float().log_softmax(-1)).sum(-1).mean()


def _data_config(model: nn.Module) -> dict[str, Any]:
    """Return the image size and normalization that a model of timm expects."""
    facts: dict[str, Any] = import_optional("timm.data", "timm").resolve_data_config({}, model=model)
    return facts
