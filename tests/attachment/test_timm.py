"""Cures in vision transformers of timm: every place against a forward pass written by hand, prefix tokens, padding."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

timm = pytest.importorskip("timm")

import uncollapse as uc  # noqa: E402

from .by_hand import At, Before, assert_clean, assert_same, written_in  # noqa: E402

SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
ENDS = {"final.norm.input", "final.norm"}
# name -> options, whether it has a last norm
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "vit_tiny_patch16_224": ({}, True),
    "vit_small_patch14_reg4_dinov2": ({"init_values": 0.5}, True),
    "deit_tiny_distilled_patch16_224": ({}, True),
    "deit3_small_patch16_224": ({"init_values": 0.5}, True),
    "vit_base_patch16_gap_224": ({"fc_norm": True}, False),
    "beit_base_patch16_224": ({"init_values": 0.5}, False),
    "eva02_tiny_patch14_224": ({}, False),
    "vit_base_patch16_rpn_224": ({}, False),
    "vit_small_patch16_dinov3": ({"init_values": 0.5}, True),
}
OPTIONS: dict[str, Any] = {"scale": 0.5, "temperature": 0.7}


def build(name: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **{**SIZES, **MODELS[name][0], **options}).eval().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def cure(x: Tensor, **context: Any) -> Tensor:
    return uc.contra_norm(x, **OPTIONS, **context)


def _scaled(block: Any, number: int, x: Tensor) -> Tensor:
    if hasattr(block, f"ls{number}"):
        return getattr(block, f"ls{number}")(x)
    gamma = getattr(block, f"gamma_{number}", None)
    return x if gamma is None else gamma * x


def _attention(block: Any, at: At, x: Tensor, options: dict[str, Any]) -> Tensor:
    """The projection with the cure in front of it, if that is the place."""
    kept = block.attn.proj
    if at.place == "attention.context" and not isinstance(kept, Before):
        block.attn.proj = Before(kept, before=at.change)
    return block.attn(x, **options)


def pre_norm(block: Any, at: At, x: Tensor, **options: Any) -> Tensor:
    x = at("attention.input", x)
    h = at("attention.norm", block.norm1(at("attention.norm.input", x)))
    h = block.drop_path1(_scaled(block, 1, _attention(block, at, h, options)))
    x = at("attention.residual", x + at("attention.output", h))
    h = at("mlp.norm", block.norm2(at("mlp.norm.input", x)))
    h = block.drop_path2(_scaled(block, 2, block.mlp(h)))
    x = x + at("mlp.output", h)
    return at("block", at("mlp.residual", x))


def res_post_norm(block: Any, at: At, x: Tensor, **options: Any) -> Tensor:
    x = at("attention.input", x)
    h = block.norm1(at("attention.norm.input", _attention(block, at, x, options)))
    x = at("attention.residual", x + at("attention.output", block.drop_path1(h)))
    h = block.norm2(at("mlp.norm.input", block.mlp(x)))
    x = x + at("mlp.output", block.drop_path2(h))
    return at("block", at("mlp.residual", x))


def reference(model: Any, place: str, change: Any = cure, layers: slice = slice(None)) -> Any:
    forward = res_post_norm if type(model.blocks[0]).__name__ == "ResPostBlock" else pre_norm
    return written_in(model, lambda m: list(m.blocks)[layers], forward, At(place, change))


def run(model: Any, seed: int = 3) -> Tensor:
    torch.manual_seed(seed)
    with torch.no_grad():
        return model(images())


@pytest.mark.parametrize("name", MODELS)
def test_every_place(name: str) -> None:
    model, original = build(name), build(name)
    plain = run(model)
    assert ENDS.issubset(uc.places(model)) == MODELS[name][1]
    assert len(uc.places(model)) > 8
    for place in uc.places(model):
        with uc.attach(model, "contra_norm", at=place, **OPTIONS, tokens="all"):
            assert_same(run(model), run(reference(original, place)), plain)
    assert_clean(model)
    assert torch.equal(run(model), plain)


def test_in_some_blocks_only() -> None:
    model, original = build(), build()
    plain = run(model)
    for place in ("attention.residual", "mlp.output", "block"):
        with uc.attach(model, "contra_norm", at=place, layers="1:3", **OPTIONS, tokens="all"):
            assert_same(run(model), run(reference(original, place, layers=slice(1, 3))), plain)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"])
def test_while_whole_paths_drop_out(name: str) -> None:
    model, original = (build(name, drop_path_rate=0.5).train() for _ in range(2))
    plain = run(model)
    assert not torch.equal(plain, run(model, seed=4))
    for place in uc.places(model):
        with uc.attach(model, "contra_norm", at=place, **OPTIONS, tokens="all"):
            assert_same(run(model), run(reference(original, place)), plain)


def test_several_places_at_once() -> None:
    model, original = build(), build()
    chosen = ("attention.residual", "mlp.norm.input", "block")
    for place in reversed(chosen):  # the order in which tokens pass them counts, not that of the calls
        uc.attach(model, "contra_norm", at=place, **OPTIONS, tokens="all")
    by_hand = written_in(original, lambda m: m.blocks, pre_norm, At(chosen, cure))
    assert_same(run(model), run(by_hand), run(original))


class Published(nn.Module):
    """What the published code puts in place of a LayerNorm: dense, as simple as it gets."""

    def __init__(self, norm: nn.LayerNorm, scale: float, temperature: float) -> None:
        super().__init__()
        self.norm, self.scale, self.temperature = norm, scale, temperature

    def forward(self, x: Tensor) -> Tensor:
        unit = x / x.norm(dim=-1, keepdim=True)
        weights = (unit @ unit.mT / self.temperature).softmax(-1)
        return self.norm(x - self.scale * weights @ x)


@pytest.mark.parametrize("options", [{}, {"preset": "vit"}, {"learnable": True}], ids=str)
def test_the_published_form(options: dict[str, Any]) -> None:
    model = build("deit_tiny_distilled_patch16_224")
    plain, published = run(model), copy.deepcopy(model)
    norms = [(path, module) for path, module in published.named_modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * 3 + 1
    for path, module in norms:
        published.set_submodule(path, Published(module, **OPTIONS))
    handle = uc.attach(model, "contra_norm", at="norms", **OPTIONS, **options, tokens="all")
    assert len(handle.cures) == 7
    assert_same(run(model), run(published), plain)


def test_prefix_tokens_stay_as_they_are() -> None:
    for name, prefix in (("vit_tiny_patch16_224", 1), ("deit_tiny_distilled_patch16_224", 2)):
        model, original = build(name), build(name)
        plain = run(model)

        def patches(x: Tensor, prefix: int = prefix) -> Tensor:
            return torch.cat([x[:, :prefix], cure(x[:, prefix:])], 1)

        for place in ("attention.residual", "attention.norm.input", "block", "final.norm"):
            with uc.attach(model, "contra_norm", at=place, tokens="patches", **OPTIONS):
                found, uncured = model.forward_features(images()), original.forward_features(images())
                assert_same(found, reference(original, place, patches).forward_features(images()), uncured)
                everything = reference(original, place).forward_features(images())
                assert (found - everything).abs().max() > 1e-3
        assert torch.equal(run(model), plain)


def test_masks_of_attention() -> None:
    """They are (n, n), (b, 1, n, n) or a hint; True is what may be seen."""
    model, original, n = *(build(class_token=False, global_pool="avg") for _ in range(2)), 4
    earlier = torch.ones(n, n, dtype=torch.bool).tril()
    first = torch.ones(2, 1, n, n, dtype=torch.bool)
    first[1, :, :, 3] = False
    hidden = {"attn_mask": first}, {"mask": first[:, 0, 0]}
    causal = {"causal": True}
    for given, context in (
        ({"is_causal": True}, causal),
        ({"attn_mask": earlier}, causal),
        ({"attn_mask": torch.zeros(n, n, dtype=torch.float64).masked_fill(~earlier, -torch.inf)}, causal),
        hidden,
    ):
        plain = model.forward_features(images(), **given)
        expected = reference(original, "attention.residual", lambda x, c=context: cure(x, **c))
        with uc.attach(model, "contra_norm", **OPTIONS, tokens="all"):
            found = model.forward_features(images(), **given)
            assert_same(found, expected.forward_features(images(), **given), plain)
            without = reference(original, "attention.residual").forward_features(images(), **given)
            assert (found - without).abs().max() > 1e-3


def test_padding_of_images_of_any_size() -> None:
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = timm.create_model("naflexvit_base_patch16_gap", **sizes).eval().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    grid = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij"), -1).reshape(1, 6, 2)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    patches = torch.randn(2, 6, 768, dtype=torch.float64)
    batch = {"patches": patches, "patch_coord": grid.expand(2, 6, 2), "patch_valid": valid}
    noise = {**batch, "patches": patches + 5 * torch.randn_like(patches) * ~valid[..., None]}
    mask = torch.cat([valid.new_ones(2, model.num_prefix_tokens), valid], 1)
    plain, original = model(batch), copy.deepcopy(model)
    for place in uc.places(model):
        if place in ENDS:
            continue
        with uc.attach(model, "contra_norm", at=place, **OPTIONS, tokens="all"):
            assert_same(model(batch), reference(original, place, lambda x: cure(x, mask=mask))(batch), plain)
            torch.testing.assert_close(model(noise), model(batch), atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("name", ["pair_norm", "feat_scale", "contra_norm"])
def test_other_cures(name: str) -> None:
    model, original = build(), build()
    plain = run(model)
    options = {"contra_norm": {"scale": 0.3, "axis": "features"}, "pair_norm": {"mode": "SI"}}.get(name, {})
    handle = uc.attach(model, name, at="attention.residual", **options, tokens="all")
    by_hand = {
        "contra_norm": lambda x: uc.contra_norm(x, 0.3, axis="features"),
        "pair_norm": lambda x: uc.pair_norm(x, mode="SI"),
        "feat_scale": lambda x: uc.feat_scale(x, 0.25, 0.75),
    }[name]
    if name == "feat_scale":
        assert torch.equal(run(model), plain)  # it begins with nothing
        for layer in handle.cures.values():
            nn.init.constant_(layer.low, 0.25)
            nn.init.constant_(layer.high, 0.75)
    assert len(handle.cures) == 3
    assert_same(run(model), run(reference(original, "attention.residual", by_hand)), plain)
