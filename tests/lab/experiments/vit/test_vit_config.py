"""Settings of a run on images: those that do nothing, those that contradict each other; and the model at its start."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from tests.lab.experiments.vit.tiny_vision import CLASSES, images, tiny_config

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.lab.config import fields as configs
from uncollapse.lab.engine.seeding import get_random_state
from uncollapse.lab.experiments.vit import config as vision
from uncollapse.lab.experiments.vit.config import Config

DEFAULTS = {field.name: field.default for field in fields(Config)}


@pytest.mark.parametrize(
    "idle",
    [
        {"cure": "none", "at": "block", "scale": 0.7, "temperature": 2.0, "identity": "yes", "dual": True},
        {"cure": "attn_scale", "average": "unit", "pre_norm": True, "learnable": True, "positive": True},
        {"absolute": True},
        {"contrast_form": "released"},
        {"patch_dropout": 0.5},
        {"mix_twice": True},
        {"crop": "padded", "least_area": 0.5},
        {"mixup": 0.0, "mix_switch": 0.1},
        {"cutmix": 0.0, "mix_switch": 0.1},
    ],
)
def test_settings_that_do_nothing_make_no_other_run(idle: dict[str, Any]) -> None:
    acting = {name: idle[name] for name in ("cure", "crop", "mixup", "cutmix") if name in idle}
    config = Config(**idle)
    assert config == Config(**acting)
    assert configs.identity("vit", config) == configs.identity("vit", Config(**acting))
    assert all(getattr(config, name) == DEFAULTS[name] for name in idle if name not in acting)


@pytest.mark.parametrize(
    "acting",
    [
        {"cure": "contra_norm", "scale": 0.7, "identity": "scale", "dual": True, "average": "unit"},
        {"learnable": True, "positive": True},
        {"pre_norm": True},
        {"cosine_loss": 1.0, "absolute": True},
        {"contrast_loss": 1.0, "contrast_form": "released"},
        {"mixing_loss": 1.0, "patch_dropout": 0.5, "mix_twice": True, "mixup": 0.0},
        {"head": 1000},
        {"test_each_epoch": True},
        {"crop": "resized", "least_area": 0.5},
        {"mix_switch": 0.1},
        {"identity": "scale"},  # s(x − m) with a fixed scale is a form of its own
        {"teacher": "regnety_160"},
    ],
)
def test_settings_that_act_stay(acting: dict[str, Any]) -> None:
    config = Config(**acting)
    assert {name: getattr(config, name) for name in acting} == acting
    assert configs.identity("vit", config) != configs.identity("vit", Config())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mixing_loss": 1.0}, "--mixup 0 --cutmix 1"),
        ({"mixing_loss": 1.0, "mixup": 0.0, "cutmix": 0.0}, "cutmix 0"),
        ({"positive": True}, "--learnable"),
        ({"lr": 1e-6}, "lr_floor"),
        ({"epochs": 5, "warmup": 5.0}, r"--warmup 0\.5"),
        ({"cure": "attn_scale", "talking_heads": True}, "talking_heads"),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        configs.build(Config, values)


def test_settings_that_just_fit() -> None:
    Config(lr=1e-5)
    Config(lr=0.0)
    Config(epochs=6)
    Config(epochs=1, warmup=0.0)


def test_the_same_seed_gives_the_same_weights_whatever_the_cure_and_the_losses() -> None:
    before = get_random_state()[0]["cpu"]
    plain = vision.build(tiny_config(seed=2), len(CLASSES)).vit.state_dict()
    for changes in ({"cure": "contra_norm"}, {"cure": "attn_scale"}, {"mixing_loss": 1.0, "cutmix": 1.0}):
        vit: Any = vision.build(tiny_config(seed=2, **changes), len(CLASSES)).vit
        own = vit.state_dict()
        assert all(torch.equal(own[name], plain[name]) for name in plain)
    other = vision.build(tiny_config(seed=3), len(CLASSES)).vit.state_dict()
    assert not torch.equal(other["pos_embed"], plain["pos_embed"])
    assert torch.equal(get_random_state()[0]["cpu"], before)


@pytest.mark.parametrize("identity", ["no", "yes", "scale"])
def test_contra_norm_as_the_settings_say(identity: str) -> None:
    config = tiny_config(cure="contra_norm", at="block", scale=0.4, identity=identity, temperature=2.0, dual=True)
    (attachment,) = uc.attachments(vision.build(config, len(CLASSES)).vit)
    said = attachment.options
    expected = {"scale": 0.4, "identity": vision.IDENTITY[identity], "temperature": 2.0, "dual": True}
    assert {name: said[name] for name in expected} == expected
    assert attachment.at == ("block",)


def test_sizes_go_into_the_model() -> None:
    config = tiny_config(depth=3, width=32, heads=4, image=24, patch=6, drop_path=0.2, talking_heads=True)
    vit: Any = vision.build(config, 7).vit
    assert (len(vit.blocks), vit.embed_dim, vit.blocks[0].attn.num_heads, vit.num_classes) == (3, 32, 4, 7)
    assert (vit.patch_embed.img_size, vit.patch_embed.patch_size) == ((24, 24), (6, 6))
    assert vit.blocks[2].drop_path1.drop_prob == pytest.approx(0.2)
    assert vit.eval()(images(side=24)).shape == (4, 7)


def test_a_head_may_have_more_outputs_than_classes() -> None:
    model = vision.build(tiny_config(head=12, mixing_loss=1.0, cutmix=1.0), len(CLASSES))
    assert model.vit(images()).shape == (4, 12)
    assert model.patch_head is not None
    assert model.patch_head(torch.zeros(1, 24)).shape == (1, 12)
    with pytest.raises(UsageError, match="--head 5"):
        vision.build(tiny_config(head=4), len(CLASSES))


def test_a_patch_head_only_for_the_mixing_loss() -> None:
    assert vision.build(tiny_config(cosine_loss=1.0), 5).patch_head is None
    model = vision.build(tiny_config(mixing_loss=1.0, cutmix=1.0, patch_dropout=0.4), 5)
    head: Any = model.patch_head
    assert (head[0].p, head[1].out_features) == (0.4, 5)


def test_a_place_that_the_model_does_not_have() -> None:
    with pytest.raises(UsageError, match=r"'attention\.residual'"):
        vision.build(tiny_config(cure="contra_norm", at="attention.residul"), 5)
