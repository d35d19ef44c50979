"""The vision transformers of timm, tiny and random: places, prefix tokens, attention maps, nesting, random twins."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

timm = pytest.importorskip("timm")

from uncollapse import backbones  # noqa: E402
from uncollapse.backbones.sites import sets_with_mask  # noqa: E402

from .reading import read_all, record  # noqa: E402

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
RES_POST = {
    *("attention.context", "attention.norm.input", "attention.output", "attention.residual"),
    *("mlp.norm.input", "mlp.output", "mlp.residual"),
}
PRE_NORM = {*RES_POST, "attention.norm", "mlp.norm"}
# name -> options, prefix tokens, has a final norm, places beside the two that every block has
MODELS: dict[str, tuple[dict[str, Any], int, bool, set[str]]] = {
    "vit_tiny_patch16_224": ({}, 1, True, PRE_NORM),
    "vit_small_patch14_reg4_dinov2": ({"init_values": 0.5, "drop_path_rate": 0.2}, 5, True, PRE_NORM),
    "vit_base_patch16_gap_224": ({"fc_norm": True}, 0, False, PRE_NORM),
    "deit_tiny_distilled_patch16_224": ({}, 2, True, PRE_NORM),
    "deit3_small_patch16_224": ({"init_values": 0.5}, 1, True, PRE_NORM),
    "beit_base_patch16_224": ({"init_values": 0.5}, 1, False, PRE_NORM),
    "eva02_tiny_patch14_224": ({}, 1, False, PRE_NORM),
    "vit_small_patch16_dinov3": ({"init_values": 0.5}, 5, True, PRE_NORM),
    "vit_relpos_base_patch16_cls_224": ({"init_values": 0.5}, 1, True, PRE_NORM),
    "vit_base_patch16_rpn_224": ({}, 0, False, RES_POST),
    "vit_base_patch16_xp_224": ({}, 1, True, set()),
    "vit_small_patch16_18x2_224": ({}, 1, True, set()),
}
MAPPED = [name for name in MODELS if "18x2" not in name]  # two attentions side by side have no single map


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **{**SIZES, **MODELS[name][0], **options}).eval()
    for parameter in model.parameters():  # what timm starts with is so near to zero that mistakes would not show
        nn.init.normal_(parameter, std=0.2)
    return model


def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_blocks_and_places(name: str) -> None:
    _, prefix, has_final, expected = MODELS[name]
    model, x = build(name), images()
    stack = backbones.find(model)
    seen = read_all(model, stack, x)
    assert [block.name for block in stack.blocks] == ["block 0", "block 1", "block 2"]
    assert (stack.path, stack.family, stack.architecture) == ("", "timm", type(model).__name__)
    assert set(stack.places()) == {"block", "attention.input", *expected}
    assert (stack.final is not None) == has_final
    found = stack.context((x,), {})
    assert (found.prefix, found.mask, found.causal) == (prefix, None, False)
    assert seen["embed"].shape == (2, 16 + prefix, 16)
    assert sets_with_mask(seen[0, "block"], stack.layout, found)[0].shape == (2, 16, 16)
    any_size = model.patch_embed.strict_img_size is False
    assert json.loads(json.dumps(stack.facts)).get("grid") == (None if any_size else [4, 4])


@pytest.mark.parametrize("name", MODELS)
def test_values_against_the_model_itself(name: str) -> None:
    _, prefix, has_final, _ = MODELS[name]
    model, x = build(name), images()
    seen = read_all(model, backbones.find(model), x)
    with torch.no_grad():
        last, blocks = model.forward_intermediates(x, output_fmt="NLC")
    for number, expected in enumerate(blocks):
        torch.testing.assert_close(seen[number, "block"][:, prefix:], expected)
    torch.testing.assert_close(seen["embed"], seen[0, "attention.input"])
    torch.testing.assert_close(seen["final"] if has_final else seen[2, "block"], last)


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name][3]])
def test_places_relate_as_their_names_say(name: str) -> None:
    model = build(name)
    stack = backbones.find(model)
    seen = read_all(model, stack, images())
    for number, block in enumerate(model.blocks):
        at = {place: seen[number, place] for place in stack.places()}
        torch.testing.assert_close(at["attention.residual"], at["attention.input"] + at["attention.output"])
        torch.testing.assert_close(at["mlp.residual"], at["attention.residual"] + at["mlp.output"])
        torch.testing.assert_close(at["block"], at["mlp.residual"])
        if "attention.norm" in at:
            torch.testing.assert_close(at["attention.norm"], block.norm1(at["attention.input"]))
            torch.testing.assert_close(at["mlp.norm"], block.norm2(at["attention.residual"]))
            assert torch.equal(at["attention.norm.input"], at["attention.input"])
            assert torch.equal(at["mlp.norm.input"], at["attention.residual"])
            assert not torch.allclose(at["attention.norm"], at["attention.input"])


@pytest.mark.parametrize("name", MAPPED)
def test_attention_maps(name: str) -> None:
    model, x = build(name), images()
    stack = backbones.find(model)
    with torch.no_grad():
        fused = model(x)
        with stack.expose_attention(model):
            maps = record(model, {n: block.attention for n, block in enumerate(stack.blocks)}, x)
            torch.testing.assert_close(model(x), fused, atol=1e-5, rtol=1e-4)
    tokens = 16 + MODELS[name][1]
    for (attention,) in maps.values():
        assert attention.shape == (2, 2, tokens, tokens)
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 2, tokens))
    assert record(model, {0: stack.blocks[0].attention}, x)[0] == []  # fused again


def test_attention_is_fused_again_after_an_error() -> None:
    model = build("vit_tiny_patch16_224")
    model.blocks[1].attn.fused_attn = False
    stack = backbones.find(model)
    with pytest.raises(RuntimeError, match="within"), stack.expose_attention(model):
        raise RuntimeError("within")
    assert [block.attn.fused_attn for block in model.blocks] == [True, False, True]


def test_blocks_side_by_side_have_no_map() -> None:
    stack = backbones.find(build("vit_small_patch16_18x2_224"))
    assert stack.expose_attention is None
    assert all(block.attention is None for block in stack.blocks)


def test_nested_in_a_model_of_ones_own() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"eye": build("vit_tiny_patch16_224", num_classes=0)})
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.parts["eye"](x))

    model = Mine().eval()
    stack = backbones.find(model)
    assert stack.path == "parts.eye"
    seen = read_all(model, stack, images())
    with torch.no_grad():
        expected = model.parts["eye"].forward_features(images())
    torch.testing.assert_close(seen["final"], expected)
    with stack.expose_attention(model):
        assert record(model, {0: stack.blocks[0].attention}, images())[0][0].shape == (2, 2, 17, 17)
    twin = stack.reinitialize(model)
    assert not torch.allclose(twin.head.weight, model.head.weight)


def test_padding_of_images_of_any_size() -> None:
    model = timm.create_model("naflexvit_base_patch16_gap", embed_dim=16, depth=2, num_heads=2, num_classes=3).eval()
    stack = backbones.find(model)
    coordinates = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij"), -1).reshape(1, 6, 2)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    patches = {"patches": torch.randn(2, 6, 768), "patch_coord": coordinates.expand(2, 6, 2), "patch_valid": valid}
    prefix = model.num_prefix_tokens
    for args, kwargs in (((patches,), {}), ((patches["patches"],), {"patch_valid": valid})):
        found = stack.context(args, kwargs)
        assert torch.equal(found.mask, torch.cat([torch.ones(2, prefix, dtype=torch.bool), valid], 1))
    tokens, mask = sets_with_mask(
        record(model, {0: stack.blocks[0].places["block"]}, patches)[0][0], stack.layout, found
    )
    assert tokens.shape == (2, 6, 16)
    assert torch.equal(mask, valid)
    assert "grid" not in stack.facts


def test_causal_when_asked() -> None:
    stack = backbones.find(build("vit_tiny_patch16_224"))
    assert stack.context((images(),), {"is_causal": True}).causal
    assert stack.context((), {}).prefix == 1


@pytest.mark.parametrize("name", MODELS)
def test_random_twin(name: str) -> None:
    model = build(name)
    stack = backbones.find(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    twin = stack.reinitialize(model)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)  # the twin does not depend on the state either
    again = stack.reinitialize(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for key, value in twin.state_dict().items():
        assert value.shape == before[key].shape
        assert torch.equal(value, again.state_dict()[key])
        assert not torch.equal(value, before[key])
    assert torch.isfinite(twin(images())).all()
    assert not twin.training


def test_random_twin_begins_as_timm_would_have_it() -> None:
    model = build("eva02_tiny_patch14_224")
    twin = backbones.find(model).reinitialize(model)
    deviations = [float(block.attn.proj.weight.detach().std()) for block in twin.blocks]
    expected = [0.02 / (2 * number) ** 0.5 for number in (1, 2, 3)]  # timm scales by depth
    assert deviations == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("swin_tiny_patch4_window7_224", "4 × SwinTransformerStage in layers"),
        ("cait_xxs24_224", "24 × LayerScaleBlock in blocks"),
        ("tnt_s_patch16_224", "12 × Block in blocks"),
    ],
)
def test_other_orders_of_tokens_are_taken_from_the_modules(name: str, remark: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    stack = backbones.find_all(model)[0]
    assert stack.family == "named"
    assert remark in stack.remark
