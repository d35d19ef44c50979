"""Vision transformers in any size: what is built, talking heads against a reference, and what is refused."""

import copy
import math
from typing import Any

import pytest
import torch
from tests.lab.experiments.vit.tiny_vision import KINDS, SIZES, images, tiny_vit
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.models.vision_classifier import TalkingHeads, build_vit, put_cure, sizes_of

PREFIX = {"class token": 1, "distilled": 2, "no class token": 0, "registers": 5, "pooled registers": 4}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["timm", "xavier"])
def test_every_kind_of_prefix_and_both_starts(kind: str, init: str) -> None:
    model: Any = build_vit(
        KINDS[kind]["name"], 5, init=init, **(SIZES | {k: v for k, v in KINDS[kind].items() if k != "name"})
    )
    assert model.num_prefix_tokens == PREFIX[kind]
    assert model.eval()(images()).shape == (4, 5)
    assert sizes_of(model) == SIZES | {"img_size": [32, 32], "patch_size": [8, 8]}


def test_xavier_depends_on_the_width_and_timm_does_not() -> None:
    for init, expected in (("timm", 0.02), ("xavier", math.sqrt(2 / (24 + 72)))):
        with use_seed(0):
            weight = build_vit("deit_tiny_patch16_224", 5, init=init, **SIZES).get_parameter("blocks.0.attn.qkv.weight")
        assert float(weight.detach().std()) == pytest.approx(expected, rel=0.1)


def test_sizes_of_zero_are_the_models_own() -> None:
    model = build_vit("test_vit", 7, depth=0, embed_dim=None, num_heads=0, img_size=0, patch_size=0, drop_path_rate=0.0)
    assert sizes_of(model) == {
        "depth": 6,
        "embed_dim": 64,
        "num_heads": 2,
        "img_size": [160, 160],
        "patch_size": [16, 16],
    }


def test_the_same_seed_gives_the_same_weights_and_talking_draws_nothing() -> None:
    states = []
    for talking in (False, False, True):
        with use_seed(3):
            states.append(build_vit("deit_tiny_patch16_224", 5, talking_heads=talking, **SIZES).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert len(states[2]) == len(states[0]) + 2 * SIZES["depth"]


def test_48_blocks() -> None:
    model: Any = build_vit("deit_tiny_patch16_224", 5, **(SIZES | {"depth": 48, "drop_path_rate": 0.5}))
    assert len(model.blocks) == 48
    assert model.blocks[47].drop_path1.drop_prob == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("deit_tiny_patch16_223", {}, "deit_tiny_patch16_224"),
        ("deit_tinny", {}, r"no model 'deit_tinny'\. timm.list_models"),  # davit_tiny resembles it, but cannot be built
        ("deit_tiny_patch16_224.none", {}, "none"),
        ("resnet50", {}, "vit_"),
        ("swin_tiny_patch4_window7_224", {}, "plain"),
        ("beit_base_patch16_224", {}, "plain"),
        ("vit_small_plus_patch16_dinov3", {}, "plain"),
        ("vit_tiny_r_s16_p8_224", {}, "plain"),
        ("vit_tiny_patch16_224", {"embed_dim": 25}, "embed_dim 25.*divisible"),
        ("vit_tiny_patch16_224", {"img_size": 33}, "such as 32"),
        ("vit_tiny_patch16_224", {"img_size": 4}, "such as 8"),
        ("vit_tiny_patch16_224", {"tokens": 3}, "tokens"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_vit(name, 5, **(SIZES | changes))


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": True}, {"scale_attn_norm": True}, {"name": "vit_base_patch16_xp_224"}],
    ids=["norm of queries", "norm of outputs", "parallel blocks"],
)
def test_talking_heads_refuse_what_they_would_compute_differently(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="plain attention"):
        tiny_vit(talking_heads=True, **changes)


def test_talking_heads_refuse_other_attention() -> None:
    from timm.layers import Attention
    from timm.models.beit import Attention as OfBeit

    wide = Attention(24, num_heads=3, attn_head_dim=16)
    for attention in (OfBeit(24, num_heads=3), wide, nn.MultiheadAttention(24, 3), None):
        with pytest.raises(UsageError, match=type(attention).__name__):
            TalkingHeads(attention)


def reference(heads: TalkingHeads, x: Tensor) -> Tensor:
    """Talking-Heads Attention with loops over images and heads, in float64."""
    count, d = heads.num_heads, x.shape[-1] // heads.num_heads
    before, after = heads.before.weight.detach().double(), heads.after.weight.detach().double()
    out = []
    for tokens in x.double():
        q, k, v = (tokens @ heads.qkv.weight.double().T + heads.qkv.bias.double()).chunk(3, -1)
        parts = [slice(d * head, d * (head + 1)) for head in range(count)]
        logits = [q[:, part] @ k[:, part].T / math.sqrt(d) for part in parts]
        talked = [sum(float(before[g, h]) * logits[h] for h in range(count)).softmax(-1) for g in range(count)]
        maps = [sum(float(after[g, h]) * talked[h] for h in range(count)) for g in range(count)]
        joined = torch.cat([m @ v[:, part] for m, part in zip(maps, parts, strict=True)], -1)
        out.append(joined @ heads.proj.weight.double().T + heads.proj.bias.double())
    return torch.stack(out)


def test_talking_heads_against_a_reference() -> None:
    heads = tiny_vit(talking_heads=True).blocks[0].attn
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(heads.before.weight, torch.eye(3))
    torch.testing.assert_close(heads(x).double(), reference(heads, x), rtol=1e-4, atol=1e-5)


def test_heads_that_do_not_talk_are_timms_attention() -> None:
    plain, talking = tiny_vit(), tiny_vit()
    for block, other in zip(talking.blocks, plain.blocks, strict=True):
        block.attn = TalkingHeads(block.attn)
        other.attn.fused_attn = False
    with torch.no_grad():
        assert torch.equal(talking(images()), plain(images()))
    for other in plain.blocks:
        other.attn.fused_attn = True
    torch.testing.assert_close(talking(images()), plain(images()), rtol=1e-5, atol=1e-6)


def test_talking_heads_come_back_from_a_state_dict_and_copies_are_their_own() -> None:
    model, again = tiny_vit(talking_heads=True), tiny_vit(talking_heads=True, seed=1)
    expected = model(images())
    assert not torch.equal(again(images()), expected)
    again.load_state_dict(model.state_dict())
    twin = copy.deepcopy(model)
    assert torch.equal(again(images()), expected)
    twin.blocks[0].attn.reset_parameters()
    assert torch.equal(twin.blocks[0].attn.before.weight, torch.eye(3))
    assert torch.equal(model(images()), expected)
    assert not torch.equal(twin(images()), expected)


def test_talking_heads_learn() -> None:
    model = build_vit("deit_tiny_patch16_224", 5, talking_heads=True, **SIZES)
    for parameter in model.get_submodule("head").parameters():
        nn.init.normal_(parameter)
    model(images()).square().sum().backward()
    for name in ("before", "after"):
        gradient = model.get_parameter(f"blocks.0.attn.{name}.weight").grad
        assert gradient is not None
        assert float(gradient.abs().max()) > 0


def test_a_diagnosis_reads_the_maps_of_talking_heads() -> None:
    model = tiny_vit(talking_heads=True)  # behind the second map rows sum to anything
    found = uc.diagnose(model, [images()], attention=True, plan=uc.Plan(baseline=0))
    seen: list[Tensor] = []
    handle = model.blocks[1].attn.attn_drop.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(images())
    handle.remove()
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(4, 3, 17))
    layer = next(layer for layer in found.layers if layer.name == "block 1")
    assert layer.measures["attention_std"].mean > 0


def test_no_mask_for_talking_heads() -> None:
    heads = tiny_vit(talking_heads=True).blocks[0].attn
    with pytest.raises(ValueError, match="mask"):
        heads(torch.zeros(1, 2, 24), attn_mask=torch.ones(2, 2, dtype=torch.bool))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cure", ["contra_norm", "attn_scale", "feat_scale"])
def test_cures_in_every_kind(kind: str, cure: str) -> None:
    model, plain = tiny_vit(**KINDS[kind]), tiny_vit(**KINDS[kind])
    put_cure(model, "none")
    assert torch.equal(model(images()), plain(images()))
    put_cure(model, cure, **({"scale": 0.5, "at": "norms"} if cure == "contra_norm" else {}))
    for name, parameter in model.named_parameters():
        if "uncollapse" in name:
            nn.init.constant_(parameter, 0.5)
    assert len(uc.attachments(model)) == 1
    with torch.no_grad():
        assert float((model(images()) - plain(images())).abs().max()) > 1e-3


def test_cures_that_do_not_fit_are_one_sentence() -> None:
    with pytest.raises(UsageError, match="attn_scale"):
        put_cure(tiny_vit(talking_heads=True), "attn_scale")
    with pytest.raises(UsageError, match="normz"):
        put_cure(tiny_vit(), "contra_norm", scale=0.1, at="normz")
