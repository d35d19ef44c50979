"""AttnScale in models of transformers equals A'v with attention maps that the models themselves return."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import uncollapse as uc

from .by_hand import BY_NAME, GPT2, hf

BIG_CODE = hf("GPTBigCodeModel", GPT2, "h", projection="attn.c_proj", causal=True)
# model -> the module of the values; its last features are theirs
VALUES = {
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
ONE_HEAD = ("LlamaModel", "Gemma2Model", "GPTBigCodeModel")  # of values, for two of queries
FUSED = ("BertModel", "GPT2Model", "LlamaModel", "ViTModel")
EXACT = ("BertModel", "GPT2Model")  # others compute maps or norms in float32
RUNS = [(name, "eager", "right") for name in VALUES]
RUNS += [(name, attention, "left") for name in FUSED[:2] for attention in ("eager", "sdpa")]
RUNS += [("LlamaModel", "sdpa", "left")]  # eager gives NaN in float64 by itself
RUNS += [(name, "sdpa", "right") for name in FUSED]


def seen_in(model: Any, paths: dict[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """Run the model, and note the output (v) or the input (context) of modules."""
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


@pytest.mark.parametrize(("name", "attention", "pad"), RUNS)
@torch.no_grad()
def test_the_context_is_that_of_the_scaled_map(name: str, attention: str, pad: str) -> None:
    case = replace(BIG_CODE if name == "GPTBigCodeModel" else BY_NAME[name], noise=0.3)
    model, eager, given, mask = case.model(), case.model(), dict(case.batch), case.mask
    if pad == "left":
        mask = case.mask.flip(1)
        given = {"input_ids": given["input_ids"].flip(1), "attention_mask": mask.long()}
    model.config._attn_implementation, eager.config._attn_implementation = attention, "eager"
    block = f"{case.blocks}.0"
    paths = {"v": f"{block}.{VALUES[name]}", "context": f"{block}.{case.projection}"}
    plain = seen_in(eager, paths, {**given, "output_attentions": True})
    heads = 1 if name in ONE_HEAD else 2
    v = plain["v"][..., -heads * 8 :].unflatten(-1, (heads, 8)).transpose(1, 2).repeat_interleave(2 // heads, 1)
    part = case.where.get("part")
    maps = plain["output"][f"{part}_attentions" if part else "attentions"][0]
    close = 1e-10 if name in EXACT else 1e-5
    real = slice(None) if mask is None else mask
    torch.testing.assert_close((maps @ v).transpose(1, 2).flatten(2)[real], plain["context"][real], rtol=0, atol=close)
    even = torch.ones_like(maps[:, :1]).tril() if case.causal else torch.ones_like(maps[:, :1])
    even = even if mask is None else even * mask[:, None, None, :]
    even = even / even.sum(-1, keepdim=True).clamp(min=1)
    scale = torch.tensor([0.5, -0.3], dtype=torch.float64)
    expected = ((even + (1 + scale)[:, None, None] * (maps - even)) @ v).transpose(1, 2).flatten(2)
    before = case.output(model, **given)
    with uc.attach(model, "attn_scale", layers=None if name == "AlbertModel" else 0, **case.where) as handle:
        torch.testing.assert_close(case.output(model, **given)[real], before[real], rtol=0, atol=1e-12)
        (cure,) = handle.cures.values()
        assert tuple(cure.scale.shape) == (2,)
        cure.scale.copy_(scale)
        passes: list[Tensor] = []
        inner = model.get_submodule(paths["context"])
        inner.register_forward_hook(lambda m, args, out: passes.append(args[0]))
        after = case.output(model, **given)
    assert (passes[0] - plain["context"])[real].abs().max() > 1e-2
    torch.testing.assert_close(passes[0][real], expected[real], rtol=0, atol=close)
    assert (after - before)[real].abs().max() > 1e-3
    assert torch.equal(case.output(model, **given)[real], before[real])


def test_learned_scales_get_gradients_of_the_whole_model() -> None:
    case = BY_NAME["LlamaModel"]
    model, step, losses = case.model(), 1e-3, []
    cure = next(iter(uc.attach(model, "attn_scale").cures.values()))
    case.output(model, **case.batch)[0].square().sum().backward()
    for sign in (1, -1):
        with torch.no_grad():
            cure.scale[1] = sign * step
            losses.append(case.output(model, **case.batch)[0].square().sum())
    assert abs((losses[0] - losses[1]) / (2 * step) - cure.scale.grad[1]) < 1e-2 * abs(cure.scale.grad[1]) + 1e-3
