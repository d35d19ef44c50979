"""Every cure computes its formula inside a model: what it gives is what the formula written by hand gives."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc

from .by_hand import BY_NAME, GPT2, Case, assert_same, by_hand, change, hf
from .tiny_models import Tiny, build

# --- on tokens, in the layout and with the mask of the model ---

FORMULAS: dict[str, tuple[dict[str, Any], Any]] = {
    "contra_norm": ({"scale": 0.3, "axis": "features"}, lambda x, **c: uc.contra_norm(x, 0.3, axis="features", **c)),
    "pair_norm": ({"mode": "SI"}, lambda x, **c: uc.pair_norm(x, mode="SI", **c)),
    "feat_scale": ({}, lambda x, **c: uc.feat_scale(x, 0.25, 0.75, **c)),
}


@pytest.mark.parametrize("cure", FORMULAS)
@pytest.mark.parametrize(
    "name", ["BertModel", "vit_tiny_patch16_224", "encoder-post-sequence-first", "encoder-pre-batch-first"]
)
def test_cures_that_mix_tokens(name: str, cure: str) -> None:
    case, (options, formula) = BY_NAME[name], FORMULAS[cure]
    model = case.model()
    plain = case.run(model)
    handle = uc.attach(model, cure, at="attention.residual", tokens="all", **options)
    if cure == "feat_scale":
        torch.testing.assert_close(case.run(model), plain, rtol=0, atol=1e-12)  # it begins with nothing
        for layer in handle.cures.values():
            nn.init.constant_(layer.low, 0.25)
            nn.init.constant_(layer.high, 0.75)
    reference = by_hand(case, "attention.residual", new=change(case, formula))
    assert_same(case.run(model), case.run(reference), plain)


@pytest.mark.parametrize("next_to", ["", "dropout", "node_norm"])
@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("cure", ["residual", "initial_residual", "pre_activation_residual"])
def test_residuals_of_convolutions(cure: str, layers: int | None, next_to: str) -> None:
    """They add the input, or what the first or the previous convolution gave: before dropout, after a norm."""
    tiny = build("gcn", blocks=4)
    tiny.model.dropout.p = 0.5
    plain, edges = copy.deepcopy(tiny.model.train(next_to == "dropout")), tiny.batch["edge_index"]
    if next_to == "node_norm":
        uc.attach(tiny.model, "node_norm", layers=":-1")
    handle = uc.attach(tiny.model, cure, scale=0.3, layers=layers)
    assert handle.blocks == ((1, 2) if layers is None else (2,))  # the others change the number of features
    torch.manual_seed(0)
    found = tiny.output()
    torch.manual_seed(0)
    x, outputs = tiny.batch["x"], []
    for number, conv in enumerate(plain.convs):
        out = conv(x, edges)
        out = uc.node_norm(out) if next_to == "node_norm" and number < 3 else out
        if number in handle.blocks:
            kinds = {
                "residual": (1, x),
                "initial_residual": (0.7, outputs[0]),
                "pre_activation_residual": (1, outputs[-1]),
            }
            own, other = kinds[cure]
            out = own * out + 0.3 * other
        outputs.append(out)
        x = plain.dropout(out.relu()) if number < 3 else out
    torch.testing.assert_close(found, x)


def test_gradients_reach_the_previous_block() -> None:
    """A last layer without weights passes nothing on, so that gradients come by the connection alone."""
    tiny = build("gcn", blocks=4)
    nn.init.zeros_(tiny.model.convs[2].lin.weight)
    uc.attach(tiny.model, "pre_activation_residual", layers=2)
    tiny.output().square().sum().backward()
    assert float(tiny.model.convs[1].lin.weight.grad.abs().sum()) > 0


def test_residual_of_named_modules() -> None:
    tiny = build("mlp")
    plain, x = copy.deepcopy(tiny.model), tiny.batch["x"]
    uc.attach(tiny.model, "residual", at="block", scale=2.0, **tiny.where)
    for layer in plain.layers:
        x = x + torch.relu(layer(x) + 2 * x)
    torch.testing.assert_close(tiny.output(), x)


def test_the_tensor_of_the_first_block_before_it_is_changed_in_place() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)) for _ in range(3)))
    x, plain = torch.randn(4, 6), copy.deepcopy(model)
    uc.attach(model, "initial_residual", scale=0.5, modules=["0.0", "1.0", "2.0"], layout="vectors")
    initial = plain[0][0](x)
    y = initial.relu()
    for layer in plain[1:]:
        y = (0.5 * layer[0](y) + 0.5 * initial).relu()
    torch.testing.assert_close(model(x), y)


# --- in the blocks of a vision transformer of timm, written out ---

VIT: dict[str, dict[str, Any]] = {
    **{cure: {"scale": 0.7} for cure in ("initial_residual", "value_residual", "neutreno", "centered_attention")},
    **{cure: {} for cure in ("layer_norm_scaling", "layer_scale", "output_gate")},
    "gfsa": {"scale": 0.5},
}


@pytest.mark.parametrize("layers", [None, "last"])
@pytest.mark.parametrize("cure", VIT)
@torch.no_grad()
def test_cures_of_a_vit(cure: str, layers: str | None) -> None:
    """What the first block had is that of block 0, also if only later blocks are selected."""
    tiny = build("timm_vit")
    plain: Any = copy.deepcopy(tiny.model)
    handle = uc.attach(tiny.model, cure, **VIT[cure], layers=layers)
    gates = {key.split()[1]: made for key, made in handle.cures.items()}
    x = initial = plain._pos_embed(plain.patch_embed(tiny.batch["x"]))
    first_v = plain.blocks[0].attn.qkv(plain.blocks[0].norm1(x)).unflatten(-1, (3, 2, -1))[:, :, 2].transpose(1, 2)
    for number, block in enumerate(plain.blocks):
        here = cure if number in handle.blocks else ""
        shrink = (number + 1) ** -0.5 if here == "layer_norm_scaling" else 1.0
        strength = 0.1 if here == "layer_scale" else 1.0
        x = 0.3 * x + 0.7 * initial if here == "initial_residual" else x
        seen = shrink * block.norm1(x)
        q, k, v = block.attn.qkv(seen).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        maps = (q @ k.mT * block.attn.scale).softmax(-1)
        context = maps @ v
        match here:
            case "value_residual":
                context = maps @ (0.7 * first_v + 0.3 * v)
            case "neutreno":
                context = context + 0.7 * (first_v - v)
            case "centered_attention":
                context = context - 0.7 * v.mean(-2, keepdim=True)
            case "gfsa":
                context = context + 0.5 * (maps + 3 * (maps @ maps - maps)) @ v
            case "output_gate":
                gate = torch.sigmoid(seen @ gates[str(number)].weight.mT)
                context = context * gate.unflatten(-1, (2, -1)).transpose(1, 2)
        x = x + strength * block.attn.proj(context.transpose(1, 2).flatten(2))
        x = x + strength * block.mlp(shrink * block.norm2(x))
    assert handle.blocks == (
        (2,) if layers else (1, 2) if cure in ("initial_residual", "value_residual", "neutreno") else (0, 1, 2)
    )
    torch.testing.assert_close(tiny.output(), plain.forward_head(plain.norm(x)), rtol=1e-4, atol=1e-5)


# --- on attention of transformers, by the maps that the models themselves return ---


def maps_of(tiny: Tiny) -> Tensor:
    tiny.model.set_attn_implementation("eager")
    found: Tensor = tiny.model(**tiny.batch, output_attentions=True).attentions[0]
    return found


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])  # with padding; causal; with shared values
def test_gfsa_applies_the_map_twice(name: str, implementation: str) -> None:
    tiny, maps = build(name, blocks=1), maps_of(build(name, blocks=1))
    model = tiny.model
    model.set_attn_implementation(implementation)
    saved: dict[str, Tensor] = {}
    config = model.config.to_dict()
    (made,) = uc.attach(model, "gfsa", scale=0.5, order=3).cures.values()
    made.register_forward_pre_hook(
        lambda m, args, kwargs: saved.update(heads=args[0], v=args[1], **kwargs), with_kwargs=True
    )
    tiny.output()
    real = tiny.batch["attention_mask"].bool()[:, None, :, None].expand_as(saved["v"])
    expected = maps @ saved["v"]
    torch.testing.assert_close(saved["heads"][real], expected[real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(saved["second"][real], (maps @ expected)[real], rtol=1e-4, atol=1e-5)
    assert model.config.to_dict() == config
    found = uc.diagnose(model, [tiny.batch], plan=uc.Plan(baseline=0))  # which reads maps by eager attention
    assert found.layers
    assert model.config._attn_implementation == implementation


BIG_CODE = hf("GPTBigCodeModel", GPT2, "h", projection="attn.c_proj", causal=True)
VALUES = {  # model -> the module of the values; its last features are theirs
    **dict.fromkeys(("BertModel", "RobertaModel", "ElectraModel"), "attention.self.value"),
    "AlbertModel": "attention.value",
    "DistilBertModel": "attention.v_lin",
    "MPNetModel": "attention.attn.v",
    "DebertaV2Model": "attention.self.value_proj",
    "ModernBertModel": "attn.Wqkv",
    **dict.fromkeys(("ViTModel", "DeiTModel", "Dinov2Model"), "attention.v_proj"),
    **dict.fromkeys(("BartModel-encoder", "BartModel-decoder", "CLIPVisionModel", "CLIPTextModel"), "self_attn.v_proj"),
    **dict.fromkeys(("LlamaModel", "Gemma2Model"), "self_attn.v_proj"),
    **dict.fromkeys(("GPT2Model", "GPTBigCodeModel"), "attn.c_attn"),
}
HEADS = {"LlamaModel": (4, 2), "Gemma2Model": (4, 2), "GPTBigCodeModel": (2, 1)}  # of queries, of values
FUSED = ("BertModel", "GPT2Model", "LlamaModel", "ViTModel")
EXACT = ("BertModel", "GPT2Model")  # others compute maps or norms in float32
RUNS = [(name, "eager", "right") for name in VALUES]
RUNS += [(name, attention, "left") for name in FUSED[:2] for attention in ("eager", "sdpa")]
RUNS += [("LlamaModel", "sdpa", "left")]  # eager gives NaN in float64 by itself
RUNS += [(name, "sdpa", "right") for name in FUSED]


def seen_in(model: Any, paths: dict[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """Run the model, and return the output (v) and the input (context) of modules."""
    seen: dict[str, Any] = {}
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda m, args, out, key=key: seen.setdefault(key, out if key == "v" else args[0])
        )
        for key, path in paths.items()
    ]
    seen["output"] = model(**given)
    for hook in hooks:
        hook.remove()
    return seen


def attn_scale_by_hand(maps: Tensor, v: Tensor, scale: Tensor, case: Case, mask: Tensor | None) -> Tensor:
    """Return A'v, where A' = E + (1 + s)(A − E) and E is attention that is the same for all that a token may see."""
    even = torch.ones_like(maps[:, :1]).tril() if case.causal else torch.ones_like(maps[:, :1])
    even = even if mask is None else even * mask[:, None, None, :]
    even = even / even.sum(-1, keepdim=True).clamp(min=1)
    return ((even + (1 + scale)[:, None, None] * (maps - even)) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("name", "attention", "pad"), RUNS)
@torch.no_grad()
def test_attn_scale_gives_the_context_of_the_scaled_map(name: str, attention: str, pad: str) -> None:
    case = replace(BIG_CODE if name == "GPTBigCodeModel" else BY_NAME[name], noise=0.3)
    model, eager, given, mask = case.model(), case.model(), dict(case.batch), case.mask
    if pad == "left":
        mask = case.mask.flip(1)
        given = {"input_ids": given["input_ids"].flip(1), "attention_mask": mask.long()}
    model.config._attn_implementation, eager.config._attn_implementation = attention, "eager"
    block = f"{case.blocks}.0"
    paths = {"v": f"{block}.{VALUES[name]}", "context": f"{block}.{case.projection}"}
    plain = seen_in(eager, paths, {**given, "output_attentions": True})
    heads, of_values = HEADS.get(name, (2, 2))
    v = plain["v"][..., -of_values * 16 // heads :].unflatten(-1, (of_values, -1)).transpose(1, 2)
    v = v.repeat_interleave(heads // of_values, 1)
    part = case.where.get("part")
    maps = plain["output"][f"{part}_attentions" if part else "attentions"][0]
    close = 1e-10 if name in EXACT else 1e-5
    real = slice(None) if mask is None else mask
    torch.testing.assert_close((maps @ v).transpose(1, 2).flatten(2)[real], plain["context"][real], rtol=0, atol=close)
    scale = torch.tensor([0.5, -0.3, 0.2, 0.9], dtype=torch.float64)[:heads]
    expected = attn_scale_by_hand(maps, v, scale, case, mask)
    before = case.output(model, **given)
    with uc.attach(model, "attn_scale", layers=None if name == "AlbertModel" else 0, **case.where) as handle:
        torch.testing.assert_close(case.output(model, **given)[real], before[real], rtol=0, atol=1e-12)
        (cure,) = handle.cures.values()
        cure.scale.copy_(scale)
        found = seen_in(model, {"context": paths["context"]}, given)["context"]
        after = case.output(model, **given)
    assert (found - plain["context"])[real].abs().max() > 1e-2
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=close)
    assert (after - before)[real].abs().max() > 1e-3
    assert torch.equal(case.output(model, **given)[real], before[real])


def test_learned_scales_get_gradients_of_the_whole_model() -> None:
    case, step, losses = BY_NAME["GPT2Model"], 1e-4, []
    model = case.model()
    cure = next(iter(uc.attach(model, "attn_scale").cures.values()))
    case.output(model, **case.batch)[0].square().sum().backward()
    for sign in (1, -1):
        with torch.no_grad():
            cure.scale[1] = sign * step
            losses.append(case.output(model, **case.batch)[0].square().sum())
    torch.testing.assert_close((losses[0] - losses[1]) / (2 * step), cure.scale.grad[1], rtol=1e-3, atol=1e-5)
