"""Hard distillation: the loss by hand, what a teacher is shown, and what cannot be a teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.experiments.vit.tiny_vision import CLASSES, images, tiny_config, tiny_vit
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.io import timm_models
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.vit import soft_labels
from uncollapse.lab.experiments.vit.patch_losses import WithPatchHead
from uncollapse.lab.experiments.vit.soft_labels import Mixed
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import fingerprint

DISTILLED = "deit_tiny_distilled_patch16_224"


def mixed() -> Mixed:
    labels = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    return Mixed(images(), labels)


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)  # torch's own takes probabilities as well


def kept(folder: Path, classes: tuple[str, ...] = CLASSES, **changes: Any) -> str:
    saved_models.save_vision_model(Runtime(save_to=folder), tiny_vit(seed=5, **changes), tiny_config(), classes)
    return str(folder)


def test_without_a_teacher_it_is_the_cross_entropy_of_both_heads_mean() -> None:
    student = tiny_vit(DISTILLED).train()
    logits = student(images())
    torch.testing.assert_close(soft_labels.classification_loss(logits, mixed(), None), by_hand(logits, mixed().labels))
    x = student.forward_features(images())
    torch.testing.assert_close(logits, (student.head(x[:, 0]) + student.head_dist(x[:, 1])) / 2)


def test_half_labels_and_half_the_teachers_answers(tmp_path: Path) -> None:
    student = tiny_vit(DISTILLED).train()
    teacher = soft_labels.load_teacher(kept(tmp_path / "teacher"), student, CLASSES)
    assert teacher is not None
    answers = tiny_vit(seed=5)(images()).argmax(-1)
    x = student.forward_features(images())
    of_labels = by_hand(student.head(x[:, 0]), mixed().labels)
    of_teacher = F.cross_entropy(student.head_dist(x[:, 1]), answers)
    model = WithPatchHead(student, patch_head=False, dropout=0.0)
    with teacher.show_both_heads(student):
        found = soft_labels.classification_loss(model(images()), mixed(), teacher)
    torch.testing.assert_close(found, 0.5 * of_labels + 0.5 * of_teacher)
    found.backward()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.model.parameters())
    assert float(student.head_dist.weight.grad.abs().max()) > 0


def test_only_training_within_gives_both_heads(tmp_path: Path) -> None:
    student = tiny_vit(DISTILLED)
    teacher = soft_labels.load_teacher(kept(tmp_path / "teacher"), student, CLASSES)
    assert teacher is not None
    expected = student(images())
    with teacher.show_both_heads(student):
        assert torch.equal(student.eval()(images()), expected)
        assert isinstance(student.train()(images()), tuple)
    assert isinstance(student(images()), Tensor)
    with pytest.raises(RuntimeError, match="broke"), teacher.show_both_heads(student):
        raise RuntimeError("broke")
    assert isinstance(student(images()), Tensor)


class Seen(nn.Module):
    """A teacher that says which image is the brightest of all classes, and remembers what it was shown."""

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        self.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.5)} | facts
        self.weight = nn.Parameter(torch.ones(1))
        self.drop = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Tensor:
        self.shown = x
        logits: Tensor = self.drop(x.mean((-1, -2)))
        return logits


def pixels(normalised: Tensor, look: dict[str, Any]) -> Tensor:
    return normalised * torch.tensor(look["std"]).view(-1, 1, 1) + torch.tensor(look["mean"]).view(-1, 1, 1)


def test_a_teacher_sees_the_same_pixels_in_its_own_size_and_normalisation() -> None:
    student, seen = tiny_vit(DISTILLED), Seen()
    soft_labels.Teacher(seen, student)(images())
    torch.testing.assert_close(pixels(seen.shown, seen.pretrained_cfg), pixels(images(), student.pretrained_cfg))
    large = Seen(input_size=(3, 48, 48))
    answers = soft_labels.Teacher(large, student)(images())
    assert large.shown.shape == (4, 3, 48, 48)
    small = F.interpolate(seen.shown, (48, 48), mode="bicubic", antialias=True)
    torch.testing.assert_close(large.shown, small, rtol=1e-4, atol=1e-4)
    assert torch.equal(answers, large.shown.mean((-1, -2)).argmax(-1))


def test_a_teacher_is_frozen_and_known_by_its_weights() -> None:
    seen = Seen().train()
    teacher = soft_labels.Teacher(seen, tiny_vit(DISTILLED))
    assert not seen.training  # its dropout would draw random numbers of the run
    assert teacher.fingerprint == fingerprint([torch.ones(1)])
    state = torch.get_rng_state()
    assert torch.equal(teacher(images()), teacher(images()))
    assert torch.equal(torch.get_rng_state(), state)
    seen.weight.data *= 2
    assert soft_labels.Teacher(seen, tiny_vit(DISTILLED)).fingerprint != teacher.fingerprint


def test_a_teacher_with_nothing_to_say_is_an_error() -> None:
    teacher = soft_labels.Teacher(Seen(), tiny_vit(DISTILLED))
    with pytest.raises(NotFiniteError, match="teacher"):
        teacher(images() * torch.nan)


def test_a_published_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_vit("vit_tiny_patch16_224", seed=5)
    monkeypatch.setattr(timm_models, "load_timm_model", lambda name, **how: model if name == "big" else None)
    teacher = soft_labels.load_teacher("big", tiny_vit(DISTILLED), CLASSES)
    assert teacher is not None
    assert teacher.model is model


def test_what_cannot_teach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place: None)
    (tmp_path / "empty").mkdir()
    folder, student = kept(tmp_path / "teacher"), tiny_vit(DISTILLED)
    cases = [
        (folder, tiny_vit(), CLASSES, "VisionTransformer"),
        (folder, student, ("ant", "bee"), "5 classes"),
        (folder, student, (*CLASSES[:3], "owl", "eel"), "'owl'"),
        (str(tmp_path / "empty"), student, CLASSES, "empty"),
        ("resnet51", student, CLASSES, "resnet51"),
        ("test_vit", student, CLASSES, "--save"),
    ]
    for name, learner, classes, words in cases:
        with pytest.raises(UsageError, match=words):
            soft_labels.load_teacher(name, learner, classes)
    assert soft_labels.load_teacher("", tiny_vit(), CLASSES) is None
