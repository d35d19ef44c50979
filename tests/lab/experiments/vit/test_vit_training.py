"""How images are trained on and judged, against what is computed by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.lab.experiments.contrastive.tiny_images import CLASSES, pictures
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.data.image.augmentation import evaluation_transform
from uncollapse.lab.data.image.image_source import Images, UnreadableError
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import TrainingOptions
from uncollapse.lab.experiments.vit import config as vision
from uncollapse.lab.experiments.vit.config import Config
from uncollapse.lab.experiments.vit.patch_losses import WithPatchHead
from uncollapse.lab.experiments.vit.training import Training, avoid_slow_attention, build_optimizer, input_spec
from uncollapse.losses import patch_contrastive_loss, patch_cosine_loss

torchvision_ops.declare()
pytest.importorskip("timm")
pytest.importorskip("accelerate")
PLAIN = Config(
    model="vit_tiny_patch16_224",
    width=24,
    heads=2,
    depth=2,
    image=16,
    patch=4,
    cure="none",
    epochs=2,
    batch=8,
    warmup=0.0,
    drop_path=0.0,
    auto_augment="",
    color_jitter=0.0,
    erasing=0.0,
    repeats=1,
    mixup=0.0,
    cutmix=0.0,
    smoothing=0.0,
)
DIVERSE: dict[str, Any] = {"cosine_loss": 0.5, "contrast_loss": 0.25, "mixing_loss": 1.0, "cutmix": 1.0}
PARTS = {"train": pictures(20), "validation": pictures(9, seed=1), "test": pictures(15, seed=2)}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(parts: dict[str, Images] | None = None, runtime: Runtime | None = None, **changes: Any) -> Training:
    config = replace(PLAIN, **changes)
    return Training(vision.build(config, len(CLASSES)), config, parts or PARTS, runtime or Runtime(device="cpu"))


def by_hand(training: Training, part: Images) -> float:
    """The accuracy, picture by picture."""
    transform, hits = evaluation_transform(training.spec, crop=training.config.crop), []
    for place in range(len(part)):
        try:
            image = transform(part.image(place))
        except UnreadableError:
            continue
        hits.append(int(training.model.vit(image[None]).argmax()) == int(part.labels[place]))
    return sum(hits) / len(hits)


def first_batch(training: Training) -> Any:
    return next(iter(training.batches(1)))


@torch.no_grad()
def test_the_accuracy_is_that_of_single_pictures_and_leaves_out_what_cannot_be_read() -> None:
    training = made({"test": pictures(15, broken=(3, 7)), "train": PARTS["train"]})
    found = training.accuracy(training.model.vit, "test")
    assert found == pytest.approx(by_hand(training, training.parts["test"]))
    assert training.skipped == {"test": 2}
    assert not training.model.vit.training


def test_what_is_held_back_is_judged_while_it_trains() -> None:
    training = made()
    assert training.evaluate(training.model) == {"validation": training.accuracy(training.model.vit, "validation")}
    assert made({name: PARTS[name] for name in ("train", "test")}).evaluate(training.model) == {}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_the_labels(smoothing: float) -> None:
    training = made(smoothing=smoothing)
    batch = first_batch(training)
    logits = training.model.vit(batch.images)
    expected = F.cross_entropy(logits, batch.labels, label_smoothing=smoothing)
    with training as task:
        assert task.loss(training.model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
        assert task.unit == "images"


def test_the_losses_on_patches_are_added() -> None:
    training = made(cosine_loss=0.5, contrast_loss=0.25, absolute=True)
    batch, vit = first_batch(training), training.model.vit
    logits, final = vit(batch.images), vit.forward_features(batch.images)[:, 1:]
    embedded = vit._pos_embed(vit.patch_embed(batch.images))
    first = vit.blocks[0](vit.norm_pre(vit.patch_drop(embedded)))[:, 1:]
    expected = F.cross_entropy(logits, batch.labels) + 0.5 * patch_cosine_loss(final, absolute=True)
    expected = expected + 0.25 * patch_contrastive_loss(first, final, negative="all")
    with training as task:
        assert task.loss(training.model, batch).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("twice", "most"), [(True, 4), (False, 2)])
def test_mix_twice_is_cutmix_and_then_a_box_of_patches(twice: bool, most: int) -> None:
    """As in DiversePatch's released code: an image may then have parts of four others; once, of two."""
    training = made(mixing_loss=1.0, cutmix=1.0, mix_twice=twice)
    images = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 16, 16)
    with use_seed(0):
        drawn = [training.mixer(images.clone(), torch.arange(8) % len(CLASSES)) for _ in range(50)]
    assert max(len(image.unique()) for mixed in drawn for image in mixed.images) == most
    assert all(mixed.patches is not None for mixed in drawn)
    whole = made(cutmix=1.0)
    assert whole.mixer(images.clone(), torch.arange(8) % len(CLASSES)).patches is None


def test_a_batch_goes_where_the_model_is() -> None:
    training = made()
    batch = first_batch(training)
    training.model.to("meta")
    assert training.loss(training.model, batch).device.type == "meta"


@pytest.mark.parametrize(("batch", "accumulate", "steps"), [(8, 1, 3), (8, 2, 2), (20, 1, 1), (7, 9, 1)])
def test_the_steps_of_an_epoch(batch: int, accumulate: int, steps: int) -> None:
    assert made(batch=batch, accumulate=accumulate).steps == steps


def test_epochs_have_orders_of_their_own_and_the_same_ones_again() -> None:
    training = made()
    one, again, two = (training.batches(epoch).order for epoch in (1, 1, 2))
    assert one == again != two
    assert sorted(one) == sorted(two) == list(range(20))
    assert made(seed=1).batches(1).order != one


def test_a_single_step_is_refused() -> None:
    with pytest.raises(UsageError, match="one step"), made(epochs=1, batch=20):
        pass


@pytest.mark.parametrize(
    ("epochs", "warmup", "rising"), [(4, 3.5, 3.5), (4, 0.0, 0.0), (4, None, 0.4), (50, None, 5.0), (100, None, 5.0)]
)
def test_the_learning_rate_rises_in_epochs_and_falls(epochs: int, warmup: float | None, rising: float) -> None:
    with made(epochs=epochs, warmup=warmup, lr=1e-3, lr_floor=1e-5) as task:
        assert task.schedule is not None
        factors = [task.schedule(step) for step in range(3 * epochs)]
    up = [factor for step, factor in enumerate(factors) if step + 1 < 3 * rising]
    assert up == [pytest.approx((step + 1) / (3 * rising)) for step in range(len(up))]
    assert factors[len(up) :] == sorted(factors[len(up) :], reverse=True)
    assert factors[-1] == pytest.approx(0.01)


def test_without_a_learning_rate_nothing_is_divided() -> None:
    with made(lr=0.0) as task:
        assert task.optimizer.param_groups[0]["lr"] == 0.0


def test_pictures_that_cannot_be_read_are_counted_and_do_not_stop_a_run() -> None:
    torn = {"train": pictures(20, (4, 5)), "validation": pictures(9, (0,)), "test": pictures(15, (1, 2, 3))}
    training = made(torn, drop_path=0.1, **DIVERSE)
    with training as task:
        history = fit(task, TrainingOptions(2), training.runtime)
    training.accuracy(training.model.vit, "test")
    assert training.skipped == {"train": 2 * 2, "validation": 1, "test": 3}  # two in each of two epochs
    assert [set(figures) for figures in history.epochs] == [{"epoch", "loss", "validation"}] * 2
    assert set(history.pace) == {"images_per_second", "waiting"}


def test_nothing_readable_is_an_error() -> None:
    training = made(PARTS | {"test": pictures(5, broken=range(5))})
    with pytest.raises(UsageError, match="5 test"):
        training.accuracy(training.model.vit, "test")
    training = made({"train": pictures(20, broken=range(20))} | {"test": PARTS["test"]})
    with (
        pytest.raises(UsageError, match=r"batches.*epoch 1"),
        training as task,
    ):
        fit(task, TrainingOptions(1), training.runtime)


def test_a_batch_without_a_readable_picture_is_passed_over() -> None:
    broken = {"train": pictures(20, broken=range(19)), "test": pictures(300, broken=range(250))}
    training = made(broken)
    with training as task:
        history = fit(task, TrainingOptions(2), training.runtime)
    assert all(math.isfinite(figures["loss"]) for figures in history.epochs)
    assert 0 <= training.accuracy(training.model.vit, "test") <= 1
    assert training.skipped == {"train": 2 * 19, "test": 250}


def test_outputs_that_are_no_numbers_are_an_error() -> None:
    training = made()
    nn.init.constant_(training.model.vit.head.bias, math.nan)
    with pytest.raises(NotFiniteError, match="not finite"):
        training.accuracy(training.model.vit, "test")


def names(model: WithPatchHead, made: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The group of each parameter; each has exactly one."""
    found = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {found[id(p)]: group for group in made.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in made.param_groups) == len(groups)
    assert groups.keys() == set(found.values())
    return groups


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
@pytest.mark.parametrize(
    "changes", [{"cure": "contra_norm", "learnable": True}, {"cure": "feat_scale"}, {"cure": "attn_scale"}, DIVERSE]
)
def test_every_parameter_is_in_one_group_and_decay_is_for_matrices(layer_decay: float, changes: dict[str, Any]) -> None:
    config = replace(PLAIN, layer_decay=layer_decay, weight_decay=0.05, **changes)
    model = vision.build(config, 3)
    groups = names(model, build_optimizer(model, config))
    own = {name: p for name, p in model.named_parameters() if name.startswith("vit.")}
    assert all(groups[name]["weight_decay"] == 0 for name, p in own.items() if p.ndim <= 1)
    assert groups["vit.blocks.0.norm1.weight"]["weight_decay"] == groups["vit.head.bias"]["weight_decay"] == 0
    assert groups["vit.blocks.1.mlp.fc1.weight"]["weight_decay"] == groups["vit.head.weight"]["weight_decay"] == 0.05


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_class_tokens_and_positions_decay_if_asked_to(layer_decay: float) -> None:
    for asked, decay in ((False, 0.0), (True, 0.05)):
        config = replace(PLAIN, layer_decay=layer_decay, weight_decay=0.05, decay_positions=asked)
        model = vision.build(config, len(CLASSES))
        names = {id(p): name for name, p in model.named_parameters()}
        found = {
            names[id(p)]: g["weight_decay"] for g in build_optimizer(model, config).param_groups for p in g["params"]
        }
        assert found["vit.cls_token"] == found["vit.pos_embed"] == decay


def test_layer_decay_lowers_the_rate_from_block_to_block() -> None:
    config = replace(PLAIN, layer_decay=0.5, lr=0.8, cure="contra_norm", learnable=True, **DIVERSE)
    model = vision.build(config, 3)
    groups = names(model, build_optimizer(model, config))
    layers = ("vit.patch_embed.proj", "vit.blocks.0.attn.qkv", "vit.blocks.1.attn.qkv", "vit.head")
    rates = [groups[f"{layer}.weight"]["lr"] for layer in layers]
    assert rates == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert groups["patch_head.1.weight"]["lr"] == 0.8
    cures = [name for name in groups if name.startswith("vit.blocks.0.") and "scale" in name]
    assert cures
    assert all(groups[name]["lr"] == pytest.approx(0.2) for name in cures)


def test_averaged_weights_are_judged_while_the_losses_read_along() -> None:
    """The average is a copy of the model, hooks and all, and must neither be disturbed by them nor disturb."""
    seen: list[dict[str, Tensor]] = []
    training = made(drop_path=0.2, contrast_form="released", **DIVERSE)
    model = training.model

    def keep(*_: Any) -> None:
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    with training as task:
        history = fit(task, TrainingOptions(2, ema=0.75), replace(training.runtime, progress=keep))
    average = dict(seen[0])
    for state in seen[1:]:
        average = {name: 0.75 * tensor + 0.25 * state[name] for name, tensor in average.items()}
    kept = model.state_dict()
    assert len(seen) == 6
    assert all(torch.allclose(kept[name], tensor, atol=1e-6) for name, tensor in average.items())
    assert history.epochs[-1]["validation"] == pytest.approx(by_hand(training, PARTS["validation"]))
    plain = made(drop_path=0.2, contrast_form="released", **DIVERSE)
    with plain as task:
        alone = fit(task, TrainingOptions(2), plain.runtime)
    assert [figures["loss"] for figures in alone.epochs] == [figures["loss"] for figures in history.epochs]


def test_what_is_done_is_told() -> None:
    told: list[str] = []
    training = made(runtime=Runtime(device="cpu", on_stage=told.append))
    training.evaluate(training.model)
    assert told == []  # steps are told then
    training.diagnose()
    training.accuracy(training.model.vit, "test")
    assert told == ["measuring the model, 0 of 1 batches", "evaluating on the test images"]


def test_a_model_of_oblong_pictures_is_refused() -> None:
    training = made()
    training.model.vit.patch_embed.img_size = (16, 32)
    with pytest.raises(UsageError, match="square"):
        input_spec(training.model.vit)


@pytest.mark.parametrize(
    ("precision", "device", "here", "fused"),
    [
        ("bf16", "cpu", True, False),
        ("bf16", None, False, False),
        ("bf16", None, True, True),
        ("bf16", "cuda", True, True),
        ("no", "cpu", False, True),
        ("fp16", None, False, True),
    ],
)
def test_attention_is_computed_in_steps_where_the_fused_one_is_slow(
    monkeypatch: pytest.MonkeyPatch, precision: str, device: str | None, here: bool, fused: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: here)
    vit = made().model.vit
    images = torch.rand(2, 3, 16, 16)
    before = vit(images)
    assert all(block.attn.fused_attn for block in vit.blocks)
    avoid_slow_attention(vit, precision, device)
    assert [block.attn.fused_attn for block in vit.blocks] == [fused, fused]
    assert torch.allclose(vit(images), before, atol=1e-5)
