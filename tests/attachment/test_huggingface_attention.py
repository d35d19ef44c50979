"""AttnScale in models of transformers equals A'v with attention maps that the models themselves return."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import uncollapse as uc  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 40, "n_positions": 32, "pad_token_id": 0}
BLOCK = {"BertModel": "encoder.layer.0", "ViTModel": "layers.0", "GPT2Model": "h.0", "LlamaModel": "layers.0"}
PROJECTION = {
    **{"BertModel": "attention.output.dense", "ViTModel": "attention.o_proj"},
    **{"GPT2Model": "attn.c_proj", "LlamaModel": "self_attn.o_proj"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "BertModel": TEXT,
    "ViTModel": {**SIZES, "image_size": 8, "patch_size": 4},
    "GPT2Model": GPT2,
    "LlamaModel": {**TEXT, "num_key_value_heads": 2},
}
CAUSAL = ("GPT2Model", "LlamaModel")


class Given(nn.Module):
    """A projection that gets another context than the one that it is called with."""

    def __init__(self, inner: nn.Module, context: Tensor) -> None:
        super().__init__()
        self.inner, self.context = inner, context

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape == self.context.shape
        result: Tensor = self.inner(self.context)
        return result


def build(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name.removesuffix("Model") + "Config")(**CONFIGS[name])
    model: Any = getattr(transformers, name)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def batch(name: str, pad: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    if name == "ViTModel":
        return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, slice(5, 7) if pad == "right" else slice(0, 2) if pad == "left" else slice(0)] = 0
    return {"input_ids": torch.randint(3, 40, (2, 7)), "attention_mask": mask}


def values(name: str, block: Any, x: Tensor) -> Tensor:
    """v of each head (b, 4, n, 4), from what enters the block."""
    if name == "BertModel":
        v = block.attention.self.value(x)
    elif name == "ViTModel":
        v = block.attention.v_proj(block.layernorm_before(x))
    elif name == "GPT2Model":
        v = block.attn.c_attn(block.ln_1(x)).chunk(3, -1)[2]
    else:  # each head of the values serves two of the queries
        v = block.self_attn.v_proj(block.input_layernorm(x)).unflatten(-1, (2, 1, 4)).expand(-1, -1, -1, 2, -1)
        v = v.flatten(2)
    return v.unflatten(-1, (4, 4)).transpose(1, 2)


def uniform(name: str, given: dict[str, Tensor], n: int) -> Tensor:
    """The map (b, 1, n, n) that spreads each row evenly over the keys that it may see."""
    seen = torch.ones(2, 1, n, n, dtype=torch.float64)
    if name in CAUSAL:
        seen = seen.tril()
    if "attention_mask" in given:
        seen = seen * given["attention_mask"][:, None, None, :]
    return seen / seen.sum(-1, keepdim=True).clamp(min=1)


CASES = [(name, pad) for name in BLOCK for pad in ("none", "right", "left") if name != "ViTModel" or pad == "none"]


@pytest.mark.parametrize(("name", "pad"), CASES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_the_context_is_that_of_the_scaled_map(name: str, pad: str, attention: str) -> None:
    model, reference, given = build(name), build(name), batch(name, pad)
    model.config._attn_implementation, reference.config._attn_implementation = attention, "eager"
    shown = reference(**given, output_attentions=True, output_hidden_states=True)
    v = values(name, reference.get_submodule(BLOCK[name]), shown.hidden_states[0])
    scale = torch.tensor([0.5, -0.3, 1.0, 0.0], dtype=torch.float64)
    even = uniform(name, given, v.shape[-2])
    scaled = even + (1 + scale)[:, None, None] * (shown.attentions[0] - even)
    context = (scaled @ v).transpose(1, 2).flatten(2)
    owner, _, last = f"{BLOCK[name]}.{PROJECTION[name]}".rpartition(".")
    projection = reference.get_submodule(f"{owner}.{last}")
    setattr(reference.get_submodule(owner), last, Given(projection, context))
    expected, plain = reference(**given).last_hidden_state, model(**given).last_hidden_state
    with uc.attach(model, "attn_scale") as attachment:
        begins = model(**given).last_hidden_state
        (cure,) = attachment.cures.values()
        assert tuple(cure.scale.shape) == (4,)
        cure.scale.copy_(scale)
        cured = model(**given).last_hidden_state
    real = given["attention_mask"].bool() if "attention_mask" in given else slice(None)
    torch.testing.assert_close(begins[real], plain[real], rtol=0, atol=1e-12)
    assert (cured - plain)[real].abs().max() > 1e-2
    close = 1e-10 if name in ("BertModel", "GPT2Model") else 1e-5  # the others compute maps or norms in float32
    torch.testing.assert_close(cured[real], expected[real], rtol=0, atol=close)
    assert torch.equal(model(**given).last_hidden_state[real], plain[real])


def test_learned_scales_get_gradients_of_the_whole_model() -> None:
    model, given = copy.deepcopy(build("LlamaModel")), batch("LlamaModel", "right")
    (cure,) = uc.attach(model, "attn_scale").cures.values()
    step = 1e-3
    model(**given).last_hidden_state[0].square().sum().backward()
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            cure.scale[1] = sign * step
            losses.append(model(**given).last_hidden_state[0].square().sum())
    assert abs((losses[0] - losses[1]) / (2 * step) - cure.scale.grad[1]) < 1e-2 * abs(cure.scale.grad[1]) + 1e-3


UNKNOWN = (
    ("T5EncoderModel", "T5Config", {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "vocab_size": 40}),
    ("GPTBigCodeModel", "GPTBigCodeConfig", {**GPT2, "multi_query": False}),  # head by head with queries and keys
    ("RoFormerModel", "RoFormerConfig", {**TEXT, "rotary_value": True}),  # rotated behind their module
    ("ConvBertModel", "ConvBertConfig", {**TEXT, "embedding_size": 16}),  # half of the heads are convolutions
)


@pytest.mark.parametrize(("name", "kind", "config"), UNKNOWN, ids=[name for name, _, _ in UNKNOWN])
def test_values_that_are_not_known_are_an_error(name: str, kind: str, config: dict[str, Any]) -> None:
    model = getattr(transformers, name)(getattr(transformers, kind)(**config))
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match="needs the values of attention"):
        uc.attach(model, "attn_scale")
    assert dict(model.named_modules()) == before


SEQ2SEQ = {
    **{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 40, "max_position_embeddings": 32},
}
MODERN = {**TEXT, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
RELATIVE = {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DISTIL = {"dim": 16, "n_layers": 1, "n_heads": 4, "hidden_dim": 24, "vocab_size": 40, "max_position_embeddings": 32}
IMAGE = CONFIGS["ViTModel"]
# model, config, block, the module of the values, the projection, whether it is a decoder
OTHERS: tuple[tuple[str, dict[str, Any], str, str, str, bool], ...] = (
    ("RobertaModel", TEXT, "encoder.layer.0", "attention.self.value", "attention.output.dense", False),
    ("GPTBigCodeModel", GPT2, "h.0", "attn.c_attn", "attn.c_proj", True),
    ("ElectraModel", TEXT, "encoder.layer.0", "attention.self.value", "attention.output.dense", False),
    (
        "AlbertModel",
        TEXT,
        "encoder.albert_layer_groups.0.albert_layers.0",
        "attention.value",
        "attention.dense",
        False,
    ),
    ("DistilBertModel", DISTIL, "transformer.layer.0", "attention.v_lin", "attention.out_lin", False),
    ("MPNetModel", TEXT, "encoder.layer.0", "attention.attn.v", "attention.attn.o", False),
    ("DebertaV2Model", RELATIVE, "encoder.layer.0", "attention.self.value_proj", "attention.output.dense", False),
    ("ModernBertModel", MODERN, "layers.0", "attn.Wqkv", "attn.Wo", False),
    ("BartModel", SEQ2SEQ, "encoder.layers.0", "self_attn.v_proj", "self_attn.out_proj", False),
    ("BartModel", SEQ2SEQ, "decoder.layers.0", "self_attn.v_proj", "self_attn.out_proj", True),
    ("DeiTModel", IMAGE, "layers.0", "attention.v_proj", "attention.o_proj", False),
    ("Dinov2Model", IMAGE, "encoder.layer.0", "attention.v_proj", "attention.o_proj", False),
    ("CLIPVisionModel", IMAGE, "encoder.layers.0", "self_attn.v_proj", "self_attn.out_proj", False),
    ("CLIPTextModel", TEXT, "encoder.layers.0", "self_attn.v_proj", "self_attn.out_proj", True),
    (
        "Gemma2Model",
        {**TEXT, "num_key_value_heads": 2, "head_dim": 4},
        "layers.0",
        "self_attn.v_proj",
        "self_attn.o_proj",
        True,
    ),
)


@pytest.mark.parametrize(
    ("name", "config", "block", "value", "projection", "causal"), OTHERS, ids=[f"{o[0]}-{o[2]}" for o in OTHERS]
)
@torch.no_grad()
def test_every_kind_of_block_has_its_values(
    name: str, config: dict[str, Any], block: str, value: str, projection: str, causal: bool
) -> None:
    """The values are read off the plain model; its own maps times them must be its context."""
    torch.manual_seed(0)
    made = getattr(transformers, name.removesuffix("Model") + "Config")(**config)
    made._attn_implementation = "eager"
    model = getattr(transformers, name)(made).double().eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    given = batch("ViTModel" if config is IMAGE else name, "right")
    mask = None if config is IMAGE else given["attention_mask"]
    part, prefix = None, ""
    if name == "BartModel":
        part, prefix = block.partition(".")[0], f"{block.partition('.')[0]}_"
        given = {**given, **{f"decoder_{k}": v for k, v in given.items()}}
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(f"{block}.{value}").register_forward_hook(lambda m, a, o: seen.update(v=o)),
        model.get_submodule(f"{block}.{projection}").register_forward_hook(lambda m, a, o: seen.update(context=a[0])),
    ]
    shown = model(**given, output_attentions=True)
    for hook in hooks:
        hook.remove()
    heads = {"Gemma2Model": 2, "GPTBigCodeModel": 1}.get(name, 4)
    v = seen["v"][..., -heads * 4 :].unflatten(-1, (heads, 4)).transpose(1, 2).repeat_interleave(4 // heads, 1)
    attention = shown[f"{prefix}attentions"][0]
    torch.testing.assert_close((attention @ v).transpose(1, 2).flatten(2), seen["context"], rtol=0, atol=1e-5)
    even = torch.ones_like(attention[:, :1]).tril() if causal else torch.ones_like(attention[:, :1])
    even = even if mask is None else even * mask[:, None, None, :]
    even = even / even.sum(-1, keepdim=True)
    scale = torch.tensor([0.5, -0.3, 1.0, 0.1], dtype=torch.float64)
    scaled = even + (1 + scale)[:, None, None] * (attention - even)
    expected = (scaled @ v).transpose(1, 2).flatten(2)
    with uc.attach(model, "attn_scale", part=part) as attachment:
        (cure,) = attachment.cures.values()
        cure.scale.copy_(scale)
        inner = model.get_submodule(f"{block}.{projection}")
        hook = inner.register_forward_hook(lambda m, a, o: seen.update(cured=a[0]))
        model(**given)
        hook.remove()
    real = slice(None) if mask is None else mask.bool()
    assert (seen["cured"] - seen["context"])[real].abs().max() > 1e-2
    torch.testing.assert_close(seen["cured"][real], expected[real], rtol=0, atol=1e-5)
