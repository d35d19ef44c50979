"""A cure at every place of every kind of block equals the block written by hand with the formula at that place.

The references use no hooks: forward passes are replaced by hand-written ones, and modules by others around them.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import uncollapse as uc  # noqa: E402

SCALE = 0.6
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
DISTIL = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24, "vocab_size": 40, "max_position_embeddings": 32}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 40, "n_positions": 32, "pad_token_id": 0}
MODERN = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
BART = {
    **{"d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 32},
}

POST_NORM = (
    *("attention.input", "attention.context", "attention.output", "attention.residual", "attention.norm"),
    *("mlp.output", "mlp.residual", "mlp.norm", "block"),
)
PRE_NORM = (
    *("attention.input", "attention.norm.input", "attention.norm", "attention.context", "attention.output"),
    *("attention.residual", "mlp.norm.input", "mlp.norm", "mlp.output", "mlp.residual", "block"),
)
FINAL = ("final.norm.input", "final.norm")
BERT_NUMBERS = {
    **{1: "attention.input", 2: "attention.context", 3: "attention.output", 4: "attention.norm"},
    **{5: "mlp.output", 6: "mlp.norm", 7: "attention.residual", 8: "mlp.residual"},
}
ALBERT_NUMBERS = {
    **{1: "attention.input", 2: "attention.context", 3: "attention.output", 4: "attention.residual"},
    **{5: "attention.norm", 6: "mlp.output", 7: "mlp.residual", 8: "mlp.norm"},
}

Touch = Callable[[str, Tensor], Tensor]
Step = Callable[[Tensor], Tensor]


def post_norm(x: Tensor, touch: Touch, attend: Step, norm: Step, mlp: Step, mlp_norm: Step) -> Tensor:
    """x → norm(x + attention(x)) → norm(y + mlp(y)), with every place in its order."""
    x = touch("attention.input", x)
    attended = touch("attention.output", attend(x))
    y = touch("attention.norm", norm(touch("attention.residual", x + attended)))
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
    a = b.attention
    return post_norm(
        x,
        touch,
        lambda h: a.output.dropout(a.output.dense(a.self(h, g["attention_mask"])[0])),
        a.output.LayerNorm,
        chain(b.intermediate, b.output.dense, b.output.dropout),
        b.output.LayerNorm,
    )


def albert(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    """Its attention is written out: the residual lies inside of it."""
    a = b.attention

    def attend(h: Tensor) -> Tensor:
        q, k, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in (a.query, a.key, a.value))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, g["attention_mask"])
        context: Tensor = a.output_dropout(a.dense(heads.transpose(1, 2).flatten(2)))
        return context

    return post_norm(x, touch, attend, a.LayerNorm, chain(b.ffn, b.activation, b.ffn_output), b.full_layer_layer_norm)


def distilbert(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    attend = lambda h: b.attention(h, attention_mask=g["attention_mask"])[0]  # noqa: E731
    return post_norm(x, touch, attend, b.sa_layer_norm, b.ffn, b.output_layer_norm)


def mpnet(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> tuple[Tensor]:
    a = b.attention
    attend = lambda h: a.dropout(a.attn(h, g["attention_mask"], g["position_bias"])[0])  # noqa: E731
    mlp = chain(b.intermediate, b.output.dense, b.output.dropout)
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
    mlp = chain(b.fc1, b.activation_fn, b.fc2)
    return post_norm(x, touch, attend, b.self_attn_layer_norm, mlp, b.final_layer_norm)


def bart_decoder(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    """Between attention and MLP it looks at the encoder; that has no places of its own."""
    x = touch("attention.input", x)
    attended = touch("attention.output", b.self_attn(x, attention_mask=g["attention_mask"])[0])
    y = touch("attention.norm", b.self_attn_layer_norm(touch("attention.residual", x + attended)))
    other, mask = g["encoder_hidden_states"], g["encoder_attention_mask"]
    y = b.encoder_attn_layer_norm(y + b.encoder_attn(y, key_value_states=other, attention_mask=mask)[0])
    z = touch("mlp.residual", y + touch("mlp.output", b.fc2(b.activation_fn(b.fc1(y)))))
    return touch("block", touch("mlp.norm", b.final_layer_norm(z)))


def modernbert(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    return pre_norm(x, touch, b.attn_norm, lambda h: b.attn(h, **g)[0], b.mlp_norm, b.mlp)


def vit(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    return pre_norm(x, touch, b.layernorm_before, lambda h: b.attention(h)[0], b.layernorm_after, b.mlp)


def dinov2(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    attend = lambda h: b.layer_scale1(b.attention(h)[0])  # noqa: E731
    return pre_norm(x, touch, b.norm1, attend, b.norm2, chain(b.mlp, b.layer_scale2))


def clip(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    return pre_norm(x, touch, b.layer_norm1, lambda h: b.self_attn(hidden_states=h, **g)[0], b.layer_norm2, b.mlp)


def gpt2(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    attend = lambda h: b.attn(h, attention_mask=g["attention_mask"])[0]  # noqa: E731
    return pre_norm(x, touch, b.ln_1, attend, b.ln_2, b.mlp)


def llama(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    attend = lambda h: b.self_attn(hidden_states=h, **g)[0]  # noqa: E731
    return pre_norm(x, touch, b.input_layernorm, attend, b.post_attention_layernorm, b.mlp)


def gemma2(b: Any, x: Tensor, touch: Touch, g: dict[str, Any]) -> Tensor:
    attend = lambda h: b.post_attention_layernorm(b.self_attn(hidden_states=h, **g)[0])  # noqa: E731
    mlp = chain(b.mlp, b.post_feedforward_layernorm)
    return pre_norm(x, touch, b.input_layernorm, attend, b.pre_feedforward_layernorm, mlp)


@dataclass(frozen=True, eq=False)
class Case:
    """An architecture and its block by hand. close: how exact, as norms of Llama and Gemma compute in float32."""

    model: str
    config: dict[str, Any]
    write: Callable[..., Any]
    projection: str
    blocks: str
    places: tuple[str, ...] = POST_NORM
    final: str = ""
    causal: bool = False
    inputs: str = "text"
    part: str | None = None
    close: float = 1e-10


BERT = ("attention.output.dense", "encoder.layer")
LLAMA: dict[str, Any] = {"places": PRE_NORM, "final": "norm", "causal": True, "close": 1e-4}
VIT: dict[str, Any] = {"places": PRE_NORM, "inputs": "image"}
CASES = (
    Case("BertModel", TEXT, bert, *BERT),
    Case("RobertaModel", TEXT, bert, *BERT),
    Case("ElectraModel", {**TEXT, "embedding_size": 8}, bert, *BERT),
    Case(
        "AlbertModel",
        {**TEXT, "embedding_size": 8},
        albert,
        "attention.dense",
        "encoder.albert_layer_groups.0.albert_layers",
    ),
    Case("DistilBertModel", DISTIL, distilbert, "attention.out_lin", "transformer.layer"),
    Case("MPNetModel", TEXT, mpnet, "attention.attn.o", "encoder.layer"),
    Case("DebertaModel", {**TEXT, **RELATIVE}, deberta, *BERT),
    Case("DebertaV2Model", {**TEXT, **RELATIVE}, deberta, *BERT),
    Case("ModernBertModel", {**TEXT, **MODERN}, modernbert, "attn.Wo", "layers", PRE_NORM, "final_norm"),
    Case("BartModel", BART, bart_encoder, "self_attn.out_proj", "encoder.layers", part="encoder"),
    Case("BartModel", BART, bart_decoder, "self_attn.out_proj", "decoder.layers", part="decoder", causal=True),
    Case("ViTModel", IMAGE, vit, "attention.o_proj", "layers", final="layernorm", **VIT),
    Case("DeiTModel", IMAGE, vit, "attention.o_proj", "layers", final="layernorm", **VIT),
    Case(
        "Dinov2Model",
        {**IMAGE, "layerscale_value": 0.3},
        dinov2,
        "attention.o_proj",
        "encoder.layer",
        final="layernorm",
        **VIT,
    ),
    Case("CLIPVisionModel", IMAGE, clip, "self_attn.out_proj", "encoder.layers", **VIT),
    Case("CLIPTextModel", TEXT, clip, "self_attn.out_proj", "encoder.layers", PRE_NORM, "final_layer_norm", True),
    Case("GPT2Model", GPT2, gpt2, "attn.c_proj", "h", PRE_NORM, "ln_f", True),
    Case("LlamaModel", DECODER, llama, "self_attn.o_proj", "layers", **LLAMA),
    Case("Gemma2Model", {**DECODER, "sliding_window": 3}, gemma2, "self_attn.o_proj", "layers", **LLAMA),
)


def name_of(case: Case) -> str:
    return f"{case.model}-{case.part}" if case.part else case.model


@functools.cache
def build(case: Case) -> Any:
    """Tests copy it."""
    torch.manual_seed(0)
    config = getattr(transformers, case.model.removesuffix("Model") + "Config")(**case.config)
    model: nn.Module = getattr(transformers, case.model)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # no norm or scale is the identity
    return model


@functools.cache
def batch(case: Case) -> dict[str, Tensor]:
    """Two sequences of seven tokens, the second with two of padding at its end; or two images."""
    torch.manual_seed(1)
    if case.inputs == "image":
        return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    given = {"input_ids": torch.randint(3, 40, (2, 7)) * mask, "attention_mask": mask}
    if case.model != "BartModel":
        return given
    other = torch.ones(2, 6, dtype=torch.long)
    other[0, 4:] = 0
    return {**given, "decoder_input_ids": torch.randint(3, 40, (2, 6)), "decoder_attention_mask": other}


def mask_of(case: Case) -> Tensor | None:
    given = batch(case).get("decoder_attention_mask" if case.part == "decoder" else "attention_mask")
    return None if given is None else given.bool()


@torch.no_grad()
def run(model: nn.Module, case: Case) -> Tensor:
    output = model(**batch(case))
    hidden: Tensor = output.encoder_last_hidden_state if case.part == "encoder" else output.last_hidden_state
    return hidden


class Around(nn.Module):
    """A module with something before and after it."""

    def __init__(self, inner: nn.Module, before: Step, after: Step) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


def replace(module: nn.Module, path: str, before: Step, after: Step) -> None:
    owner = module.get_submodule(path.rpartition(".")[0])
    setattr(owner, path.rpartition(".")[2], Around(module.get_submodule(path), before, after))


def by_hand(case: Case, place: str, layers: tuple[int, ...] = (0, 1, 2), **options: Any) -> nn.Module:
    """A copy of the model with hand-written blocks and the formula at a place of some of them."""
    model = copy.deepcopy(build(case))
    blocks = list(model.get_submodule(case.blocks))
    if place.startswith("final"):
        new = functools.partial(touch_at, case, place, options)
        replace(model, case.final, functools.partial(new, "final.norm.input"), functools.partial(new, "final.norm"))
    for number, block in enumerate(blocks):
        touch = functools.partial(touch_at, case, place if number in layers else "nowhere", options)
        replace(block, case.projection, functools.partial(touch, "attention.context"), nn.Identity())
        block.forward = types.MethodType(functools.partial(forward, case.write, touch), block)
    return model


def forward(write: Callable[..., Any], touch: Touch, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(type(block).forward).bind(block, *args, **kwargs)
    given.apply_defaults()
    named = dict(given.arguments)
    named.update(named.pop("kwargs", {}))
    del named["self"]
    return write(block, named.pop("hidden_states"), touch, named)


def touch_at(case: Case, place: str, options: dict[str, Any], here: str, x: Tensor) -> Tensor:
    if here != place:
        return x
    return uc.contra_norm(x, SCALE, mask=mask_of(case), causal=case.causal, **options)


each = pytest.mark.parametrize("case", CASES, ids=name_of)


@each
def test_every_place_is_the_one_written_by_hand(case: Case) -> None:
    model = copy.deepcopy(build(case))
    plain = run(model, case)
    torch.testing.assert_close(run(by_hand(case, "nowhere"), case), plain, rtol=0, atol=case.close)
    expected_places = {*case.places, *(FINAL if case.final else ())}
    assert set(uc.places(model, part=case.part)) == expected_places
    for place in sorted(expected_places):
        with uc.attach(model, "contra_norm", scale=SCALE, at=place, part=case.part, tokens="all"):
            cured = run(model, case)
        expected = run(by_hand(case, place), case)
        assert (cured - plain).abs().max() > 100 * case.close, place
        torch.testing.assert_close(cured, expected, rtol=0, atol=case.close, msg=lambda m, p=place: f"{p}: {m}")
    assert torch.equal(run(model, case), plain)


TABLES = {
    "BertModel": BERT_NUMBERS,
    "RobertaModel": BERT_NUMBERS,
    "ElectraModel": BERT_NUMBERS,
    "AlbertModel": ALBERT_NUMBERS,
}


def case_of(model: str) -> Case:
    return next(case for case in CASES if case.model == model)


@pytest.mark.parametrize("name", TABLES)
def test_numbers_of_the_paper_are_places_of_the_hand_written_block(name: str) -> None:
    case, model = case_of(name), copy.deepcopy(build(case_of(name)))
    seen = [run(model, case)]
    for number, place in TABLES[name].items():
        with uc.attach(model, "contra_norm", scale=SCALE, at=number, tokens="all") as attachment:
            cured = run(model, case)
        assert attachment.at == (place,)
        torch.testing.assert_close(cured, run(by_hand(case, place), case), rtol=0, atol=case.close)
        assert all((cured - other).abs().max() > 1e-3 for other in seen), number  # each number is a place of its own
        seen.append(cured)
    for number in (0, 9, -1):
        with pytest.raises(ValueError, match=f"no place with the number {number}.*attention.residual \\(") as error:
            uc.attach(model, "contra_norm", scale=SCALE, at=number, tokens="all")
        assert all(place in str(error.value) for place in POST_NORM)


@pytest.mark.parametrize("name", ["ViTModel", "LlamaModel"])
def test_a_number_where_there_are_none_is_an_error_that_lists_places(name: str) -> None:
    model = build(case_of(name))
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match="has no place with the number 7") as error:
        uc.attach(model, "contra_norm", scale=SCALE, at=7, tokens="all")
    assert all(place in str(error.value) for place in (*PRE_NORM, *FINAL))
    assert dict(model.named_modules()) == before


def published(x: Tensor, identity: bool) -> Tensor:
    """The formula of the published code, dense: (1 + s)x − s·softmax(x̂x̂ᵀ)x for BERT, x − s·softmax(x̂x̂ᵀ)x for ALBERT."""
    unit = x / x.norm(dim=-1, keepdim=True)
    mean = (unit @ unit.transpose(-1, -2)).softmax(-1) @ x
    return (1 + SCALE) * x - SCALE * mean if identity else x - SCALE * mean


@pytest.mark.parametrize(("name", "preset", "number"), [("BertModel", "bert", 7), ("AlbertModel", "albert", 4)])
def test_the_published_formula_at_the_published_position(name: str, preset: str, number: int) -> None:
    case, ids = case_of(name), torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(2))
    model, reference = copy.deepcopy(build(case)), copy.deepcopy(build(case))
    for block in reference.get_submodule(case.blocks):
        touch = lambda here, x: published(x, preset == "bert") if here == "attention.residual" else x  # noqa: E731
        block.forward = types.MethodType(functools.partial(forward, case.write, touch), block)
    with torch.no_grad():
        plain, expected = model(ids).last_hidden_state, reference(ids).last_hidden_state
        with uc.attach(model, "contra_norm", scale=SCALE, at=number, preset=preset, tokens="all"):
            cured = model(ids).last_hidden_state
    assert (cured - plain).abs().max() > 1e-2
    torch.testing.assert_close(cured, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", [case for case in CASES if case.model != "AlbertModel"], ids=name_of)
def test_two_places_and_chosen_blocks(case: Case) -> None:
    """One cure in the first and the last block, another one in between."""
    model, layers = copy.deepcopy(build(case)), {"attention.residual": (0, 2), "mlp.output": (1,)}
    reference = by_hand(case, "nowhere")
    for number, block in enumerate(reference.get_submodule(case.blocks)):
        places = [place for place, chosen in layers.items() if number in chosen]
        touch = functools.partial(touch_at_any, case, places)
        block.forward = types.MethodType(functools.partial(forward, case.write, touch), block)
    plain = run(model, case)
    for place, chosen in layers.items():
        uc.attach(model, "contra_norm", scale=SCALE, at=place, layers=list(chosen), part=case.part, tokens="all")
    cured = run(model, case)
    assert (cured - plain).abs().max() > 100 * case.close
    torch.testing.assert_close(cured, run(reference, case), rtol=0, atol=case.close)
    uc.detach(model)
    assert torch.equal(run(model, case), plain)


def touch_at_any(case: Case, places: list[str], here: str, x: Tensor) -> Tensor:
    return touch_at(case, here if here in places else "nowhere", {}, here, x)


ALBERT = case_of("AlbertModel")
CHOICES: tuple[tuple[Any, tuple[int, ...]], ...] = (
    (None, (0, 1, 2, 3, 4, 5)),
    ("last 4", (2, 3, 4, 5)),
    ([0, 3], (0, 3)),
    (slice(1, None, 2), (1, 3, 5)),
    (-1, (5,)),
)


@functools.cache
def albert_of_six(groups: int) -> Any:
    torch.manual_seed(0)
    sizes = {**TEXT, "embedding_size": 8, "num_hidden_layers": 6, "num_hidden_groups": groups}
    model = transformers.AlbertModel(transformers.AlbertConfig(**sizes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def albert_by_hand(model: Any, passes: tuple[int, ...], place: str) -> Tensor:
    """The passes in a loop of their own, over the model's layers."""
    given = batch(ALBERT)
    x = model.encoder.embedding_hidden_mapping_in(model.embeddings(given["input_ids"]))
    mask = given["attention_mask"].bool()[:, None, None, :].expand(-1, -1, 7, -1)
    groups = model.encoder.albert_layer_groups
    for number in range(6):
        block = groups[number * len(groups) // 6].albert_layers[0]
        touch = functools.partial(touch_at, ALBERT, place if number in passes else "nowhere", {})
        x = albert(block, x, touch, {"attention_mask": mask})
    return x


@pytest.mark.parametrize("place", ["attention.residual", "block"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("layers", "passes"), CHOICES, ids=[str(chosen) for chosen, _ in CHOICES])
def test_layers_of_albert_are_passes_counted_anew_in_each_call(
    layers: Any, passes: Any, groups: int, place: str
) -> None:
    model = copy.deepcopy(albert_of_six(groups))
    plain = run(model, ALBERT)
    torch.testing.assert_close(albert_by_hand(model, (), place), plain, rtol=0, atol=1e-10)
    expected = albert_by_hand(model, passes, place)
    with uc.attach(model, "contra_norm", scale=SCALE, at=place, layers=layers, tokens="all") as attachment:
        first, second = run(model, ALBERT), run(model, ALBERT)
    assert attachment.blocks == passes
    assert (first - plain).abs().max() > 1e-3
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-10)


def test_a_pass_that_fails_does_not_shift_the_count_of_albert() -> None:
    model = copy.deepcopy(albert_of_six(1))
    uc.attach(model, "contra_norm", scale=SCALE, layers=[0, 3], tokens="all")
    expected, block = run(model, ALBERT), model.get_submodule(ALBERT.blocks)[0]
    sound, left = block.activation, [None, None]
    block.activation = Around(sound, lambda x: left.pop() or x, nn.Identity())  # fails in the third pass
    with pytest.raises(IndexError):
        run(model, ALBERT)
    block.activation = sound
    assert torch.equal(run(model, ALBERT), expected)


def test_the_passes_of_albert_share_one_learned_scale() -> None:
    model = copy.deepcopy(albert_of_six(1))
    before = {name for name, _ in model.named_parameters()}
    attachment = uc.attach(model, "contra_norm", scale=SCALE, learnable=True, tokens="all")
    (cure,) = attachment.cures.values()
    (new,) = {name for name, _ in model.named_parameters()} - before
    assert model.get_parameter(new) is cure.scale_param
    cure.scale_param.data.fill_(SCALE)  # it was rounded to float32
    expected = albert_by_hand(albert_of_six(1), tuple(range(6)), "attention.residual")
    torch.testing.assert_close(run(model, ALBERT), expected, rtol=0, atol=1e-10)
    model(**batch(ALBERT)).last_hidden_state.square().sum().backward()
    assert cure.scale_param.grad.abs().min() > 0


SPREAD = ("BertModel", "DebertaV2Model", "ViTModel", "CLIPTextModel", "GPT2Model", "LlamaModel")


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("ran_before", [False, True], ids=["fresh", "ran before"])
def test_hidden_states_and_attentions_are_those_of_the_cured_stream(name: str, ran_before: bool) -> None:
    case = case_of(name)
    model, wanted = copy.deepcopy(build(case)), {"output_hidden_states": True, "output_attentions": True}
    model.config._attn_implementation = "eager"
    plain = model(**batch(case), **wanted) if ran_before else copy.deepcopy(model)(**batch(case), **wanted)
    for place in ("attention.residual", "block", "mlp.norm"):
        reference = by_hand(case, place)
        reference.config._attn_implementation = "eager"
        expected = reference(**batch(case), output_hidden_states=True).hidden_states
        with uc.attach(model, "contra_norm", scale=SCALE, at=place, tokens="all"):
            cured = model(**batch(case), **wanted)
        assert len(cured.attentions) == 3
        assert all(a.shape == b.shape for a, b in zip(cured.attentions, plain.attentions, strict=True))
        assert (cured.attentions[2] - plain.attentions[2]).abs().max() > 100 * case.close
        for number, (got, want) in enumerate(zip(cured.hidden_states, expected, strict=True)):
            torch.testing.assert_close(got, want, rtol=0, atol=case.close, msg=lambda m, k=(place, number): f"{k}: {m}")
            assert number == 0 or (got - plain.hidden_states[number]).abs().max() > 100 * case.close


@pytest.mark.parametrize("name", [n for n in SPREAD if n != "DebertaV2Model"])
def test_eager_and_fused_attention_give_the_same(name: str) -> None:
    case = case_of(name)
    fused = copy.deepcopy(build(case))
    eager = copy.deepcopy(fused)
    assert fused.config._attn_implementation == "sdpa"
    eager.config._attn_implementation = "eager"
    for model in (fused, eager):
        uc.attach(model, "contra_norm", scale=SCALE, tokens="all")
    real = slice(None) if mask_of(case) is None else mask_of(case)
    torch.testing.assert_close(run(fused, case)[real], run(eager, case)[real], rtol=0, atol=max(case.close, 1e-6))


REGISTERS = Case(
    "Dinov2WithRegistersModel",
    {**IMAGE, "layerscale_value": 0.3, "num_register_tokens": 3},
    dinov2,
    "attention.o_proj",
    "encoder.layer",
    final="layernorm",
    **VIT,
)
PREFIXES = {"ViTModel": 1, "DeiTModel": 2, "Dinov2Model": 1, "CLIPVisionModel": 1, "Dinov2WithRegistersModel": 4}


@pytest.mark.parametrize("name", PREFIXES)
def test_tokens_in_front_of_the_patches_can_be_left_alone(name: str) -> None:
    case, k = REGISTERS if name == REGISTERS.model else case_of(name), PREFIXES[name]
    model = copy.deepcopy(build(case))
    plain = run(model, case)
    for place in ("attention.residual", "mlp.output", "attention.context"):

        def touch(here: str, x: Tensor, place: str = place) -> Tensor:
            return torch.cat([x[:, :k], uc.contra_norm(x[:, k:], SCALE)], 1) if here == place else x

        reference = copy.deepcopy(build(case))
        for block in reference.get_submodule(case.blocks):
            replace(block, case.projection, functools.partial(touch, "attention.context"), nn.Identity())
            block.forward = types.MethodType(functools.partial(forward, case.write, touch), block)
        with uc.attach(model, "contra_norm", scale=SCALE, at=place, tokens="patches"):
            cured = run(model, case)
        assert (cured - plain).abs().max() > 1e-3
        torch.testing.assert_close(cured, run(reference, case), rtol=0, atol=1e-10)
