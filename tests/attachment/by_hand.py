"""The table of models and places that tests of `attach` run over, with every block written by hand: no hooks in here.

A `Case` is an architecture, a batch with padding where it takes any, and a function that computes one of its blocks and
calls `touch(place, x)` at each place. `by_hand` writes a cure into a copy of the model with it.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.attachment.write_hooks import HOOKS
from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()
import timm  # noqa: E402
import transformers  # noqa: E402

SCALE = 0.6
Touch = Callable[[str, Tensor], Tensor]
Step = Callable[[Tensor], Tensor]
Formula = Callable[..., Tensor]  # tokens (b, n, d), and mask, causal -> tokens

POST_NORM = (
    *("attention.input", "attention.context", "attention.output", "attention.residual", "attention.norm"),
    *("mlp.output", "mlp.residual", "mlp.norm", "block"),
)
PRE_NORM = (
    *("attention.input", "attention.norm.input", "attention.norm", "attention.context", "attention.output"),
    *("attention.residual", "mlp.norm.input", "mlp.norm", "mlp.output", "mlp.residual", "block"),
)
RES_POST_NORM = tuple(place for place in PRE_NORM if place not in ("attention.norm", "mlp.norm"))
FINAL = ("final.norm.input", "final.norm")
BLOCK = ("block",)


def contra(x: Tensor, **context: Any) -> Tensor:
    """The cure of most tests."""
    return uc.contra_norm(x, SCALE, **context)


@dataclass(frozen=True, eq=False)
class Case:
    """A model and its blocks by hand.

    build: without weights of its own. batch: arguments. blocks: path of their list. write: (block, x, touch, given) ->
    output, None if only what leaves a block is known. projection: where heads enter it, within a block. final: the last
    norm. mask: True = real. close: how exact, as some norms compute in float32. noise: of weights, on top of their
    start. output: model and arguments -> tensor. where: arguments of `attach`.
    """

    name: str
    build: Callable[[], Any]
    batch: Mapping[str, Any]
    blocks: str
    write: Callable[..., Any] | None = None
    places: tuple[str, ...] = POST_NORM
    projection: str = ""
    final: str = ""
    mask: Tensor | None = None
    causal: bool = False
    prefix: int = 0
    sequence_first: bool = False
    close: float = 1e-10
    noise: float = 0.1
    output: Callable[..., Tensor] = lambda model, **batch: model(**batch).last_hidden_state
    where: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def model(self, dtype: torch.dtype = torch.float64) -> Any:
        """A model of its own, always with the same weights, in evaluation mode."""
        return copy.deepcopy(_built(self)).to(dtype)

    def all_places(self) -> tuple[str, ...]:
        return (*self.places, *(FINAL if self.final else ()))

    def run(self, model: nn.Module, **changes: Any) -> Tensor:
        with torch.no_grad():
            return self.output(model, **{**self.batch, **changes})


@functools.cache
def _built(case: Case) -> Any:
    torch.manual_seed(0)
    model: nn.Module = case.build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(case.noise * torch.randn_like(parameter))  # no norm or scale is the identity
    return model


# --- a cure in the blocks, by hand ---


class Around(nn.Module):
    """A module with something before and after it."""

    def __init__(self, inner: nn.Module, before: Step = lambda x: x, after: Step = lambda x: x) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.after(self.inner(self.before(x), *args, **kwargs))


def change(case: Case, formula: Formula = contra, tokens: str = "all") -> Step:
    """The formula on what lies at a site: with the mask, in the layout, and without prefix tokens if so asked."""

    def new(x: Tensor) -> Tensor:
        flip = case.sequence_first and x.dim() == 3
        sets = x.transpose(0, 1) if flip else x
        skip = case.prefix if tokens == "patches" else 0
        context: dict[str, Any] = {} if case.mask is None else {"mask": case.mask[:, skip:]}
        context |= {"causal": True} if case.causal else {}
        made = torch.cat([sets[:, :skip], formula(sets[:, skip:], **context)], 1)
        return made.transpose(0, 1) if flip else made

    return new


def by_hand(case: Case, *places: str, where: Any = None, new: Step | None = None, model: Any = None) -> Any:
    """A copy of the model with hand-written blocks, and the formula at places of all blocks. where: place -> blocks."""
    model, new = copy.deepcopy(case.model() if model is None else model), new or change(case)
    where = where or dict.fromkeys(places, range(100))
    model.use_nested_tensor = False  # torch's fast path would pack padded batches
    ends = tuple(place for place in where if place in FINAL)
    if ends:
        replace(model, case.final, *(functools.partial(_touch, ends, new, end) for end in FINAL))
    for number, block in enumerate(model.get_submodule(case.blocks)):
        here = tuple(place for place, blocks in where.items() if number in blocks)
        write(case, block, functools.partial(_touch, here, new))
    return model


def write(case: Case, block: Any, touch: Touch) -> None:
    """Replace the forward pass of a block."""
    if case.projection:
        replace(block, case.projection, functools.partial(touch, "attention.context"))
    block.forward = types.MethodType(functools.partial(_forward, case.write or _output_only, touch), block)


def replace(module: nn.Module, path: str, *around: Step) -> None:
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, Around(module.get_submodule(path), *around))


def _touch(places: tuple[str, ...], new: Step, here: str, x: Tensor) -> Tensor:
    return new(x) if here in places else x


def _forward(written: Callable[..., Any], touch: Touch, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if written is _output_only:
        return _output_only(block, touch, *args, **kwargs)
    given = inspect.signature(type(block).forward).bind(block, *args, **kwargs)
    given.apply_defaults()
    _, tokens, *others = given.arguments.items()
    named = dict(others)
    named.update(named.pop("kwargs", {}))
    return written(block, tokens[1], touch, named)


def _output_only(block: Any, touch: Touch, *args: Any, **kwargs: Any) -> Any:
    output = type(block).forward(block, *args, **kwargs)
    if isinstance(output, Tensor):
        return touch("block", output)
    return type(output)([touch("block", output[0]), *output[1:]])


def assert_same(found: Tensor, expected: Tensor, uncured: Tensor, close: float = 1e-10) -> None:
    """What came is what was expected, and the cure made a clear difference to it."""
    torch.testing.assert_close(found, expected, atol=close, rtol=1e-8)
    assert (expected - uncured).abs().max() > max(1e-3, 100 * close)


def assert_clean(model: nn.Module) -> None:
    """Nothing of a cure is left in the model."""
    assert uc.attachments(model) == ()
    for name, module in model.named_modules():
        assert not module._forward_hooks, name
        assert not module._forward_pre_hooks, name
        assert HOOKS not in module.__dict__, name
        assert "uncollapse" not in module._modules, name


# --- blocks ---


def post_norm(x: Tensor, touch: Touch, attend: Step, norm: Step, mlp: Step, mlp_norm: Step) -> Tensor:
    """x → norm(x + attention(x)) → norm(y + mlp(y)), with every place in its order."""
    x = touch("attention.input", x)
    y = touch("attention.norm", norm(touch("attention.residual", x + touch("attention.output", attend(x)))))
    z = touch("mlp.residual", y + touch("mlp.output", mlp(y)))
    return touch("block", touch("mlp.norm", mlp_norm(z)))


def pre_norm(x: Tensor, touch: Touch, norm: Step, attend: Step, mlp_norm: Step, mlp: Step) -> Tensor:
    """x → x + attention(norm(x)) → y + mlp(norm(y)). A residual that was touched stays so in the stream."""
    x = touch("attention.input", x)
    seen = touch("attention.norm", norm(touch("attention.norm.input", x)))
    y = touch("attention.residual", x + touch("attention.output", attend(seen)))
    seen = touch("mlp.norm", mlp_norm(touch("mlp.norm.input", y)))
    return touch("block", touch("mlp.residual", y + touch("mlp.output", mlp(seen))))


def chain(*steps: Step) -> Step:
    return lambda x: functools.reduce(lambda y, step: step(y), steps, x)


def bert(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    a, mlp = b.attention, chain(b.intermediate, b.output.dense, b.output.dropout)
    attend = lambda h: a.output.dropout(a.output.dense(a.self(h, g["attention_mask"])[0]))  # noqa: E731
    return post_norm(x, touch, attend, a.output.LayerNorm, mlp, b.output.LayerNorm)


def albert(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    """Its attention is written out: the residual lies inside of it."""
    a = b.attention

    def attend(h: Tensor) -> Tensor:
        q, k, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in (a.query, a.key, a.value))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, g["attention_mask"])
        return a.output_dropout(a.dense(heads.transpose(1, 2).flatten(2)))

    return post_norm(x, touch, attend, a.LayerNorm, chain(b.ffn, b.activation, b.ffn_output), b.full_layer_layer_norm)


def distilbert(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    attend = lambda h: b.attention(h, attention_mask=g["attention_mask"])[0]  # noqa: E731
    return post_norm(x, touch, attend, b.sa_layer_norm, b.ffn, b.output_layer_norm)


def mpnet(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> tuple[Tensor]:
    a, mlp = b.attention, chain(b.intermediate, b.output.dense, b.output.dropout)
    attend = lambda h: a.dropout(a.attn(h, g["attention_mask"], g["position_bias"])[0])  # noqa: E731
    return (post_norm(x, touch, attend, a.LayerNorm, mlp, b.output.LayerNorm),)


def deberta(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> tuple[Tensor, None]:
    """Queries may be given; the residual runs from them. They are not in what is tested here."""
    a, rest = b.attention, {name: g[name] for name in ("relative_pos", "rel_embeddings")}
    assert g.get("query_states") is None
    attend = lambda h: a.output.dropout(a.output.dense(a.self(h, g["attention_mask"], **rest)[0]))  # noqa: E731
    mlp = chain(b.intermediate, b.output.dense, b.output.dropout)
    return post_norm(x, touch, attend, a.output.LayerNorm, mlp, b.output.LayerNorm), None


def bart_encoder(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    attend = lambda h: b.self_attn(h, attention_mask=g["attention_mask"])[0]  # noqa: E731
    return post_norm(x, touch, attend, b.self_attn_layer_norm, chain(b.fc1, b.activation_fn, b.fc2), b.final_layer_norm)


def bart_decoder(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    """Between attention and MLP it looks at the encoder; that has no places of its own."""
    x = touch("attention.input", x)
    attended = touch("attention.output", b.self_attn(x, attention_mask=g["attention_mask"])[0])
    y = touch("attention.norm", b.self_attn_layer_norm(touch("attention.residual", x + attended)))
    other, mask = g["encoder_hidden_states"], g["encoder_attention_mask"]
    y = b.encoder_attn_layer_norm(y + b.encoder_attn(y, key_value_states=other, attention_mask=mask)[0])
    z = touch("mlp.residual", y + touch("mlp.output", b.fc2(b.activation_fn(b.fc1(y)))))
    return touch("block", touch("mlp.norm", b.final_layer_norm(z)))


def plain_pre_norm(norm: str, attention: str, mlp_norm: str, mlp: str, *, given: bool = True) -> Callable[..., Tensor]:
    """A block of one attention and one MLP with norms in front; `mlp` and `attention` are chains of modules."""

    def block(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
        first, *after = attention.split()
        attend = lambda h: getattr(b, first)(h, **(g if given else {}))[0]  # noqa: E731
        steps = [getattr(b, name) for name in after]
        feed = chain(*(getattr(b, name) for name in mlp.split()))
        return pre_norm(x, touch, getattr(b, norm), chain(attend, *steps), getattr(b, mlp_norm), feed)

    return block


def gpt2(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    attend = lambda h: b.attn(h, attention_mask=g["attention_mask"])[0]  # noqa: E731
    return pre_norm(x, touch, b.ln_1, attend, b.ln_2, b.mlp)


def timm_block(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    def scaled(number: int, h: Tensor) -> Tensor:
        gamma = getattr(b, f"gamma_{number}", None)
        h = getattr(b, f"ls{number}")(h) if hasattr(b, f"ls{number}") else h if gamma is None else gamma * h
        return getattr(b, f"drop_path{number}")(h)

    given = {name: value for name, value in g.items() if value is not None and value is not False}
    if type(b).__name__ != "ResPostBlock":
        attend, mlp = (lambda h: scaled(1, b.attn(h, **given))), (lambda h: scaled(2, b.mlp(h)))
        return pre_norm(x, touch, b.norm1, attend, b.norm2, mlp)
    x = touch("attention.input", x)
    h = b.norm1(touch("attention.norm.input", b.attn(x, **given)))
    x = touch("attention.residual", x + touch("attention.output", b.drop_path1(h)))
    h = b.norm2(touch("mlp.norm.input", b.mlp(x)))
    return touch("block", touch("mlp.residual", x + touch("mlp.output", b.drop_path2(h))))


def torch_layer(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    side = "tgt" if "memory" in g else "src"
    masks = {"attn_mask": g[f"{side}_mask"], "key_padding_mask": g[f"{side}_key_padding_mask"]}
    feed = chain(b.linear1, b.activation, b.dropout, b.linear2)
    branches = {"attention": lambda h: b.self_attn(h, h, h, **masks, need_weights=False)[0], "mlp": feed}
    if side == "tgt":
        memory, padding = g["memory"], g["memory_key_padding_mask"]
        look = lambda h: b.multihead_attn(h, memory, memory, key_padding_mask=padding, need_weights=False)[0]  # noqa: E731
        branches = {"attention": branches["attention"], "cross": look, "mlp": feed}
    x = touch("attention.input", x)
    for number, (name, branch) in enumerate(branches.items(), start=1):
        norm, dropout = getattr(b, f"norm{number}"), getattr(b, f"dropout{number}")
        if b.norm_first:
            h = touch(f"{name}.norm", norm(touch(f"{name}.norm.input", x)))
            x = touch(f"{name}.residual", x + touch(f"{name}.output", dropout(branch(h))))
        else:
            h = x + touch(f"{name}.output", dropout(branch(x)))
            x = touch(f"{name}.norm", norm(touch(f"{name}.residual", h)))
    return touch("block", x)


# --- the table ---

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0}
DECODER = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "bos_token_id": 1}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
DISTIL = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24, "vocab_size": 40, "max_position_embeddings": 32}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 40, "n_positions": 32, "pad_token_id": 0}
MODERN = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2, "vocab_size": 40}
BART = {
    **{"d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 32},
}
XLM = {"emb_dim": 16, "n_layers": 3, "n_heads": 2, "n_words": 40, "causal": True}
XLNET = {"d_model": 16, "n_layer": 3, "n_head": 2, "d_inner": 24, "vocab_size": 40, "attn_type": "uni"}

TWO_PARTS = {  # part -> its output
    **{"encoder": "encoder_last_hidden_state", "decoder": "last_hidden_state"},
    **{"vision_model": "image_embeds", "text_model": "text_embeds"},
}
MASK = torch.tensor([[1] * 7, [1] * 5 + [0] * 2]).bool()
OTHER_MASK = torch.tensor([[1] * 4 + [0] * 2, [1] * 6]).bool()
_draw = torch.Generator().manual_seed(1)
IDS = torch.randint(3, 40, (2, 7), generator=_draw)
WORDS = {"input_ids": IDS * MASK, "attention_mask": MASK.long()}
PAIR = {**WORDS, "decoder_input_ids": IDS[:, 1:], "decoder_attention_mask": OTHER_MASK.long()}
PIXELS = {"pixel_values": torch.randn(2, 3, 8, 8, generator=_draw, dtype=torch.float64)}
IMAGES = torch.randn(2, 3, 16, 16, generator=_draw, dtype=torch.float64)
TOKENS = torch.randn(2, 5, 8, generator=_draw, dtype=torch.float64)
MEMORY = torch.randn(2, 5, 8, generator=_draw, dtype=torch.float64)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)


def hf(name: str, config: Any, blocks: str, write: Any = None, projection: str = "", **options: Any) -> Case:
    """A model of transformers; of one with two parts, the part that `blocks` begins with."""
    stem, part, shown = name.removesuffix("Model").removesuffix("Encoder"), blocks.partition(".")[0], name
    defaults: dict[str, Any] = {"batch": WORDS, "mask": MASK}
    if "image_size" in config:
        defaults = {"batch": PIXELS, "places": PRE_NORM, "prefix": 1}
    if name in ("BartModel", "T5Model"):
        defaults = {"batch": PAIR, "mask": MASK if part == "encoder" else OTHER_MASK}
    if name == "CLIPModel":
        defaults = {"batch": {**WORDS, **PIXELS}, "places": PRE_NORM}
    if name in ("BartModel", "T5Model", "CLIPModel"):
        defaults |= {"where": {"part": part}, "output": lambda model, **batch: model(**batch)[TWO_PARTS[part]]}
        shown = f"{name}-{part}"

    def build() -> Any:
        return getattr(transformers, name)(getattr(transformers, f"{stem}Config")(**config))

    return Case(shown, build, blocks=blocks, write=write, projection=projection, **{**defaults, **options})


def vit(name: str, prefix: int, *, norm: bool = True, places: tuple[str, ...] = PRE_NORM, **options: Any) -> Case:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    build = functools.partial(timm.create_model, name, pretrained=False, **{**sizes, **options})
    output = lambda model, **batch: model(**batch)  # noqa: E731
    block = ("blocks", timm_block, places, "attn.proj", "norm" if norm else "")
    return Case(name, build, {"x": IMAGES}, *block, prefix=prefix, noise=0.3, output=output)


def stack(kind: str, norm_first: bool, batch_first: bool) -> Case:
    """An encoder or a decoder of torch, with padding or a causal mask."""
    layer_kind = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    turn = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))

    def build() -> Any:
        layer = layer_kind(8, 2, 16, dropout=0.0, norm_first=norm_first, batch_first=batch_first)
        if kind == "encoder":
            return nn.TransformerEncoder(
                layer, 3, norm=nn.LayerNorm(8), enable_nested_tensor=batch_first and not norm_first
            )
        return nn.TransformerDecoder(layer, 3, norm=nn.LayerNorm(8))

    batch: dict[str, Any] = {"src": turn(TOKENS), "src_key_padding_mask": PADDING}
    if kind == "decoder":
        masks = {"tgt_mask": CAUSAL.isinf(), "tgt_key_padding_mask": PADDING}
        batch = {"tgt": turn(TOKENS), "memory": turn(MEMORY), **masks}
    branches = ("attention", "mlp") if kind == "encoder" else ("attention", "cross", "mlp")
    ends = ("norm.input", "norm", "output", "residual") if norm_first else ("norm", "output", "residual")
    real = turn(~PADDING[..., None])
    return Case(
        f"{kind}-{'pre' if norm_first else 'post'}-{'batch' if batch_first else 'sequence'}-first",
        build,
        batch,
        "layers",
        torch_layer,
        ("block", "attention.input", *(f"{branch}.{end}" for branch in branches for end in ends)),
        final="norm",
        mask=~PADDING,
        causal=kind == "decoder",
        sequence_first=not batch_first,
        noise=0.4,
        output=lambda model, **given: model(**given) * real,  # torch computes padding as it likes
    )


BERT = ("encoder.layer", bert, "attention.output.dense")
LLAMA: dict[str, Any] = {"places": PRE_NORM, "final": "norm", "causal": True, "close": 1e-4}
llama = plain_pre_norm("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
GEMMA = ("self_attn post_attention_layernorm", "pre_feedforward_layernorm", "mlp post_feedforward_layernorm")
gemma2 = plain_pre_norm("input_layernorm", *GEMMA)
modern = plain_pre_norm("attn_norm", "attn", "mlp_norm", "mlp")
hf_vit = plain_pre_norm("layernorm_before", "attention", "layernorm_after", "mlp", given=False)
dinov2 = plain_pre_norm("norm1", "attention layer_scale1", "norm2", "mlp layer_scale2", given=False)
clip = plain_pre_norm("layer_norm1", "self_attn", "layer_norm2", "mlp")
DINOV2 = ("encoder.layer", dinov2, "attention.o_proj")
LAST, OUT, SHARED = "text_model.final_layer_norm", "self_attn.out_proj", "encoder.albert_layer_groups.0.albert_layers"
OPT = {"ffn_dim": 24, "word_embed_proj_dim": 16, **TEXT}
CLIP = {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": IMAGE}
DINO: dict[str, Any] = {**IMAGE, "layerscale_value": 0.3}
TEXTS = (
    hf("BertModel", TEXT, *BERT),
    hf("RobertaModel", TEXT, *BERT),
    hf("ElectraModel", {**TEXT, "embedding_size": 8}, *BERT),
    hf("AlbertModel", {**TEXT, "embedding_size": 8}, SHARED, albert, "attention.dense"),
    hf("DistilBertModel", DISTIL, "transformer.layer", distilbert, "attention.out_lin"),
    hf("MPNetModel", TEXT, "encoder.layer", mpnet, "attention.attn.o"),
    hf("DebertaModel", {**TEXT, **RELATIVE}, "encoder.layer", deberta, "attention.output.dense"),
    hf("DebertaV2Model", {**TEXT, **RELATIVE}, "encoder.layer", deberta, "attention.output.dense"),
    hf("ModernBertModel", {**TEXT, **MODERN}, "layers", modern, "attn.Wo", places=PRE_NORM, final="final_norm"),
    hf("BartModel", BART, "encoder.layers", bart_encoder, OUT),
    hf("BartModel", BART, "decoder.layers", bart_decoder, OUT, causal=True),
    hf("CLIPTextModel", TEXT, "encoder.layers", clip, OUT, places=PRE_NORM, final="final_layer_norm", causal=True),
    hf("CLIPModel", CLIP, "text_model.encoder.layers", clip, OUT, mask=MASK, causal=True, final=LAST),
    hf("GPT2Model", GPT2, "h", gpt2, "attn.c_proj", places=PRE_NORM, final="ln_f", causal=True),
    hf("LlamaModel", DECODER, "layers", llama, "self_attn.o_proj", **LLAMA),
    hf("Gemma2Model", {**DECODER, "sliding_window": 3}, "layers", gemma2, "self_attn.o_proj", **LLAMA),
)
VISION = (
    hf("ViTModel", IMAGE, "layers", hf_vit, "attention.o_proj", final="layernorm"),
    hf("DeiTModel", IMAGE, "layers", hf_vit, "attention.o_proj", final="layernorm", prefix=2),
    hf("Dinov2Model", DINO, *DINOV2, final="layernorm"),
    hf("Dinov2WithRegistersModel", {**DINO, "num_register_tokens": 3}, *DINOV2, prefix=4, final="layernorm"),
    hf("CLIPVisionModel", IMAGE, "encoder.layers", clip, OUT),
    hf("CLIPModel", CLIP, "vision_model.encoder.layers", clip, OUT, prefix=1),
    vit("vit_tiny_patch16_224", 1),
    vit("vit_small_patch14_reg4_dinov2", 5, init_values=0.5),
    vit("deit_tiny_distilled_patch16_224", 2),
    vit("deit3_small_patch16_224", 1, init_values=0.5),
    vit("vit_base_patch16_gap_224", 0, norm=False, fc_norm=True),
    vit("beit_base_patch16_224", 1, norm=False, init_values=0.5),
    vit("eva02_tiny_patch14_224", 1, norm=False),
    vit("vit_base_patch16_rpn_224", 0, norm=False, places=RES_POST_NORM),
    vit("vit_small_patch16_dinov3", 5, init_values=0.5),
)
STACKS = tuple(
    stack(kind, norm_first, batch_first)
    for kind in ("encoder", "decoder")
    for norm_first in (True, False)
    for batch_first in (True, False)
)
# Of these only what leaves a block is known; the decoders say that they are causal each in its own way.
OUTPUTS = (
    hf("T5EncoderModel", T5, "encoder.block", places=BLOCK, final="encoder.final_layer_norm", close=1e-5),
    hf("T5Model", T5, "encoder.block", places=BLOCK, final="encoder.final_layer_norm", close=1e-5),
    hf("T5Model", T5, "decoder.block", places=BLOCK, final="decoder.final_layer_norm", close=1e-5, causal=True),
    hf("OPTModel", OPT, "decoder.layers", places=BLOCK, final="decoder.final_layer_norm", causal=True),
    hf("OpenAIGPTModel", GPT2, "h", places=BLOCK, causal=True),
)
CASES = (*TEXTS, *VISION, *STACKS, *OUTPUTS)
BY_NAME = {case.name: case for case in CASES}
