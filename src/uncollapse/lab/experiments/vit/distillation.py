"""Hard distillation (DeiT, arXiv 2012.12877): a token of its own learns what a teacher answers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError, import_optional
from uncollapse.io import timm_models
from uncollapse.lab.experiments.vit.mixing import Mixed
from uncollapse.lab.runs.results import fingerprint
from uncollapse.lab.runs.saved_models import load_vision_model


class Teacher:
    """A frozen model that is shown the pictures of a student, in its own size and with its own normalisation.

    fingerprint: 16 hexadecimal digits of its weights.
    """

    def __init__(self, model: nn.Module, student: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self.fingerprint = fingerprint(parameter.detach() for parameter in model.parameters())
        own, seen = _look(model), _look(student)
        self.size = tuple(own["input_size"][-2:])
        mean, std, other_mean, other_std = (
            torch.tensor(look[name]).view(-1, 1, 1) for look in (own, seen) for name in ("mean", "std")
        )
        self.gain, self.shift = other_std / std, (other_mean - mean) / std

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Images (b, c, h, w) as the student gets them -> the classes (b,) that the teacher sees."""
        self.model.to(images.device)
        shown = images * self.gain.to(images) + self.shift.to(images)
        if shown.shape[-2:] != self.size:
            shown = F.interpolate(shown, self.size, mode="bicubic", antialias=True)
        logits: Tensor = self.model(shown)
        if not bool(logits.isfinite().all()):  # a largest class would be found all the same
            raise NotFiniteError("The teacher's outputs are not finite.")
        return logits.argmax(-1)

    @contextmanager
    def teaching(self, student: Any) -> Iterator[None]:
        """Within, a student in training mode gives the logits of both heads, and else their mean as always."""
        student.set_distilled_training(True)
        try:
            yield
        finally:
            student.set_distilled_training(False)


def teacher_of(name: str, student: Any, classes: Sequence[str]) -> Teacher | None:
    """The teacher of a run; None without a name.

    Args:
        name: of a model of timm with published weights, or a folder that `keeping.keep_vision` wrote.
        student: a distilled model of timm.
        classes: names of what the student learns.
    """
    if not name:
        return None
    if not hasattr(student, "set_distilled_training"):
        raise UsageError(
            f"A teacher needs a student with a distillation token; {type(student).__name__} has none. Take a distilled "
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
        raise UsageError(f"The teacher {name} knows {count} classes, the data has {len(classes)}; take another one.")
    if known and tuple(known) != tuple(classes):
        place = next(at for at, pair in enumerate(zip(known, classes, strict=True)) if pair[0] != pair[1])
        raise UsageError(
            f"The teacher {name} learned other classes than the data has: class {place} is {known[place]!r} there and "
            f"{classes[place]!r} here. Take one that was trained on these classes."
        )


def loss(outputs: Any, mixed: Mixed, teacher: Teacher | None) -> Tensor:
    """Cross entropy with soft labels; with a teacher half of it, and half that of its answers.

        ½ CE(class head, labels) + ½ CE(distillation head, argmax of the teacher)

    Args:
        outputs: logits (b, C) of the student, or those of its two heads where it has a teacher.
        mixed: the images, of which the teacher says what it sees, and their labels.
        teacher: None without one.
    """
    if teacher is None:
        return _soft(outputs, mixed.labels)
    by_class, distilled = outputs
    return 0.5 * _soft(by_class, mixed.labels) + 0.5 * F.cross_entropy(distilled.float(), teacher(mixed.images))


def _soft(logits: Tensor, labels: Tensor) -> Tensor:
    return -(labels * logits.float().log_softmax(-1)).sum(-1).mean()


def _look(model: nn.Module) -> dict[str, Any]:
    """What a model of timm wants of a picture."""
    facts: dict[str, Any] = import_optional("timm.data", "timm").resolve_data_config({}, model=model)
    return facts
