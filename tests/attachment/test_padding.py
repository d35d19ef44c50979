"""Padding does not count, unless it is asked to, and no token of a decoder sees a later one."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc

from .by_hand import (
    BY_NAME,
    CASES,
    SCALE,
    XLM,
    XLNET,
    Around,
    Case,
    assert_clean,
    assert_same,
    by_hand,
    change,
    contra,
    hf,
    replace,
    timm,
)
from .tiny_models import build

T5 = ("T5EncoderModel", "T5Model-encoder", "T5Model-decoder")
EAGER_ONLY = ("MPNetModel", "DebertaModel", "DebertaV2Model", *T5, "Gemma2Model", "OpenAIGPTModel")
OWN_POSITIONS = ("RobertaModel", *T5, "OPTModel")  # they count real tokens themselves
NO_POSITIONS = ("DistilBertModel", "MPNetModel", "BartModel-encoder", "BartModel-decoder", "OpenAIGPTModel", "XLMModel")
ONE_WAY = hf("XLMModel", XLM, "attentions", places=("block",), causal=True)
UNPADDED = hf("XLNetModel", XLNET, "layer", places=("block",), causal=True)  # it fails by itself with padding
TEXTS = [case for case in CASES if "input_ids" in case.batch and "pixel_values" not in case.batch] + [ONE_WAY]
DECODERS = [case for case in TEXTS if case.causal] + [UNPADDED]


@functools.cache
def model_of(case: Case, attention: str = "", dtype: torch.dtype = torch.float64) -> Any:
    """Tests leave it as it was."""
    model = case.model(dtype)
    model.config._attn_implementation = attention or (
        "eager" if case.name in (*EAGER_ONLY, "XLMModel", "XLNetModel") else "sdpa"
    )
    return model


def ids(n: int, seed: int = 1) -> Tensor:
    """Tokens that are all different."""
    return torch.randperm(36, generator=torch.Generator().manual_seed(seed))[:n] + 3


def run(model: Any, case: Case, tokens: Tensor, mask: Tensor | None, positions: Tensor | None = None) -> Tensor:
    """What leaves the last block of the part, and the norm after it."""
    given = {"input_ids": tokens, "attention_mask": mask}
    if case.where:
        given["decoder_input_ids"] = ids(4, 5).expand(len(tokens), -1)
    if case.where.get("part") == "decoder":
        given = {"input_ids": given["decoder_input_ids"], "decoder_input_ids": tokens, "decoder_attention_mask": mask}
    if positions is not None:
        given["position_ids"] = positions
    with torch.no_grad():
        return case.output(model, **given)


def padded(n: int, right: int, left: int) -> tuple[Tensor, Tensor, Tensor]:
    """A sequence of n tokens with padding around it, next to a longer one; their masks and positions."""
    mask = torch.zeros(2, left + n + right, dtype=torch.long)
    mask[0, left : left + n] = mask[1] = 1
    tokens = torch.zeros_like(mask)
    tokens[0, left : left + n], tokens[1] = ids(n), ids(mask.shape[1], 2)
    return tokens, mask, (mask.cumsum(1) - 1).clamp(min=0)


ATTENTIONS = [(case, "eager") for case in TEXTS]
ATTENTIONS += [(case, "sdpa") for case in TEXTS if case.name not in (*EAGER_ONLY, "XLMModel")]


OTHER_CURES = {"BertModel": ("feat_scale", "attn_scale", "pair_norm"), "LlamaModel": ("feat_scale", "attn_scale")}


def strengthen(handle: uc.Attachment) -> None:
    """Learned scales begin at 0, where a cure does nothing."""
    for parameter in handle.parameters():
        parameter.data.copy_(torch.linspace(-0.5, 0.9, parameter.numel()).view_as(parameter))


@pytest.mark.parametrize(("case", "attention"), ATTENTIONS, ids=str)
def test_real_tokens_do_not_depend_on_padding(case: Case, attention: str) -> None:
    """Within a block, at its end, after the last one: everywhere the mask comes from another place."""
    # Some eager models of the library give NaN for rows that see nothing in float64, where the mask overflows.
    in_float = (case.causal or case.name == "ModernBertModel") and attention == "eager"
    dtype, close = (torch.float32, 1e-4) if in_float else (torch.float64, max(case.close, 1e-9))
    model, n, alone = model_of(case, attention, dtype), 5, ids(5)[None]
    plain = run(model, case, alone, None)
    pads = [(2, 0), (4, 0)] + ([(0, 3), (1, 2)] if case.name not in NO_POSITIONS else [])
    places = {"attention.context", "attention.residual", "block", "final.norm"} & {*uc.places(model, **case.where)}
    cures: list[tuple[str, dict[str, Any]]] = [("contra_norm", {"scale": SCALE, "at": place}) for place in places]
    for cure, options in [*cures, *((other, {}) for other in OTHER_CURES.get(case.name, ()))]:
        with uc.attach(model, cure, **options, **case.where) as handle:
            strengthen(handle)
            expected = run(model, case, alone, None)
            assert (expected - plain).abs().max() > 100 * close, (cure, options)
            ones = run(model, case, alone, torch.ones(1, n, dtype=torch.long))
            torch.testing.assert_close(ones, expected, rtol=0, atol=close)
            for right, left in pads:
                tokens, mask, positions = padded(n, right, left)
                own = case.name in (*OWN_POSITIONS, *NO_POSITIONS)
                got = run(model, case, tokens, mask, None if own else positions)
                difference = (got[0, left : left + n] - expected[0]).abs().max()
                assert difference <= close, f"{cure} {options}, {right} right, {left} left: {difference}"


@pytest.mark.parametrize("case", DECODERS, ids=str)
def test_no_token_of_a_decoder_sees_a_later_one(case: Case) -> None:
    """By changed tokens, and by gradients of the embeddings of tokens that are all different."""
    model, tokens, k = model_of(case), ids(7)[None], 4
    changed = torch.cat([tokens[:, :k], ids(30)[None, 20:23]], 1)
    plain = run(model, case, tokens, None)
    known = uc.places(model, **case.where)
    attached: list[tuple[str, dict[str, Any]]] = [("contra_norm", {"at": place, "scale": SCALE}) for place in known]
    attached += [(cure, {}) for cure in ("feat_scale", "attn_scale") if "attention.context" in known]
    for cure, options in attached:
        with uc.attach(model, cure, **case.where, **options) as handle:
            strengthen(handle)
            first, second = run(model, case, tokens, None), run(model, case, changed, None)
            touched = embeddings_touched(model, case, tokens, k)
        assert (first - plain)[:, 1:].abs().max() > 100 * case.close, (cure, options)
        assert (first - second)[:, k:].abs().max() > 100 * case.close, (cure, options)
        assert torch.allclose(first[:, :k], second[:, :k], rtol=0, atol=1e-12), (cure, options)
        assert touched[tokens[0, k:]].abs().max() == 0, (cure, options)
        assert touched[tokens[0, :k]].abs().min() > 0, (cure, options)


def embeddings_touched(model: Any, case: Case, tokens: Tensor, k: int) -> Tensor:
    """How the outputs before k depend on the embedding of each token of the vocabulary."""
    given = {"input_ids": tokens, "attention_mask": None}
    if case.where:
        known = torch.zeros(1, 2, 16, dtype=torch.float64)
        model, given = model.decoder, {"input_ids": tokens, "encoder_hidden_states": known}
    output = model(**given).last_hidden_state[:, :k]
    total = (output * torch.randn(output.shape, dtype=output.dtype)).sum()
    return torch.autograd.grad(total, model.get_input_embeddings().weight)[0].abs().sum(1)


MISFITS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("contra_norm", {"scale": SCALE, "dual": True}),
    ("contra_norm", {"scale": SCALE, "axis": "features"}),
    ("contra_norm", {"scale": SCALE, "preset": "bert_v2"}),
    ("contra_norm", {"scale": SCALE, "sample": 2}),
    ("pair_norm", {}),
)


@pytest.mark.parametrize("case", DECODERS, ids=str)
def test_cures_that_read_later_tokens_do_not_fit_decoders(case: Case) -> None:
    model = model_of(case)
    attributes = [set(vars(m)) for m in model.modules()]
    for cure, options in MISFITS:
        with pytest.raises(ValueError, match=r"later|causal"):
            uc.attach(model, cure, **case.where, **options)
        assert_clean(model)
    assert attributes == [set(vars(m)) for m in model.modules()]


# --- torch and timm: masks in every form ---

TORCH, TIMM = BY_NAME["encoder-pre-batch-first"], BY_NAME["vit_tiny_patch16_224"]
HIDDEN = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
SEEN = torch.ones(2, 1, 5, 5, dtype=torch.bool)
SEEN[1, :, :, 3] = False
ALONE, SHORT = torch.randn(5, 8, dtype=torch.float64), torch.arange(5) > 2
STACKS = [BY_NAME[f"encoder-{kind}-first"] for kind in ("pre-batch", "pre-sequence", "post-batch")]


def of_features(**given: Any) -> Any:
    return lambda model: model.forward_features(TIMM.batch["x"], **given)


def of_float_padding(case: Case) -> Any:
    hidden = torch.zeros(2, 5, dtype=torch.float64).masked_fill(case.batch["src_key_padding_mask"], -torch.inf)
    return lambda model: case.run(model, src_key_padding_mask=hidden)


def of_triangle(**given: Any) -> Any:
    return lambda model: model(TORCH.batch["src"], **given)


def of_one_sequence(model: Any) -> Tensor:
    return model(ALONE, src_key_padding_mask=SHORT)[:3]


CAUSAL = {"causal": True}
MASKS: tuple[tuple[Case, Any, Any], ...] = (  # case, call, the mask that the cure must get
    *((case, of_float_padding(case), change(case)) for case in STACKS),
    *((case, of_one_sequence, {"mask": ~SHORT}) for case in STACKS[:2]),
    *((TORCH, of_triangle(mask=HIDDEN, **hint), CAUSAL) for hint in ({}, {"is_causal": True})),
    (TORCH, of_triangle(mask=HIDDEN.isinf()), CAUSAL),
    (TIMM, of_features(is_causal=True), CAUSAL),
    *((TIMM, of_features(attn_mask=mask), CAUSAL) for mask in (HIDDEN, ~HIDDEN.isinf())),
    (TIMM, of_features(attn_mask=SEEN), {"mask": SEEN[:, 0, 0]}),
)


@pytest.mark.parametrize(("case", "call", "context"), MASKS)
@torch.no_grad()
def test_forms_of_masks(case: Case, call: Any, context: Any) -> None:
    model = case.model()
    plain, new = call(model), functools.partial(contra, **context) if isinstance(context, dict) else context
    for place in ("attention.residual", "mlp.output", "block", "final.norm"):
        with uc.attach(model, "contra_norm", at=place, scale=SCALE, tokens="all"):
            assert_same(call(model), call(by_hand(case, place, new=new)), plain)
    if context is CAUSAL:
        uc.attach(model, "pair_norm")
        with pytest.raises(RuntimeError, match="causal"):
            call(model)


@torch.no_grad()
def test_padding_of_images_of_any_size() -> None:
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    model = timm.create_model("naflexvit_base_patch16_gap", **sizes).eval().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(3))[None].expand(2, 6, 2)
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    patches = torch.randn(2, 6, 768, dtype=torch.float64)
    batch = {"patches": patches, "patch_coord": grid, "patch_valid": valid}
    noise = {**batch, "patches": patches + 5 * torch.randn_like(patches) * ~valid[..., None]}
    mask = torch.cat([valid.new_ones(2, model.num_prefix_tokens), valid], 1)
    plain = model(batch)
    for place in ("attention.context", "attention.residual", "block"):
        reference = by_hand(TIMM, place, new=lambda x: contra(x, mask=mask), model=model)
        with uc.attach(model, "contra_norm", at=place, scale=SCALE, tokens="all"):
            assert_same(model(batch), reference(batch), plain)
            torch.testing.assert_close(model(noise), model(batch), atol=1e-10, rtol=1e-8)


# --- padding that counts, as in published code ---

WORDS = {"input_ids": torch.randint(5, 40, (2, 9), generator=torch.Generator().manual_seed(0))}
WORDS["attention_mask"] = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
NORMS = {"bert": "attention.output.LayerNorm", "albert": "attention.LayerNorm"}


def published(x: Tensor) -> Tensor:
    """(1 + s)x − s·softmax(x̂x̂ᵀ)x over all tokens, token by token."""
    made = torch.empty_like(x)
    for b, rows in enumerate(x):
        unit = [row / row.norm() for row in rows]
        for i, row in enumerate(rows):
            weights = torch.stack([torch.exp(unit[i] @ other) for other in unit])
            mean = sum(w * other for w, other in zip(weights / weights.sum(), rows, strict=True))
            made[b, i] = (1 + SCALE) * row - SCALE * mean
    return made


@torch.no_grad()
def layers(model: nn.Module, **words: Tensor) -> Tensor:
    """Tokens of all layers (layers, b, n, d)."""
    return torch.stack(model(**(words or WORDS), output_hidden_states=True).hidden_states)


@pytest.mark.parametrize("kind", NORMS)
def test_counted_is_the_published_form(kind: str) -> None:
    """The layer of the published code stands in the forward pass itself, in front of the norm of the attention."""
    model = build(kind).model.double()
    plain, reference = layers(model), copy.deepcopy(model)
    for path in [name for name, _ in model.named_modules() if name.endswith(NORMS[kind])]:
        replace(reference, path, published)
    uc.attach(model, "contra_norm", scale=SCALE, identity=True, padding="counted")
    assert_same(layers(model), layers(reference), plain)


@pytest.mark.parametrize(
    ("cure", "options"),
    [
        ("contra_norm", {"scale": SCALE}),
        ("contra_norm", {"scale": SCALE, "axis": "features"}),
        ("contra_norm", {"scale": SCALE, "dual": True}),
        ("pair_norm", {}),
        ("feat_scale", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", NORMS)
def test_a_sentence_alone_and_in_a_batch(kind: str, cure: str, options: dict[str, Any]) -> None:
    model, differences, unpadded = build(kind).model.double(), {}, {}
    alone = {name: value[1:, :4] for name, value in WORDS.items()}
    for padding in ("masked", "counted"):
        with uc.attach(model, cure, padding=padding, **options) as handle:
            for number, parameter in enumerate(handle.parameters()):
                parameter.data.fill_(0.4 * (number % 2))  # FeatScale begins where it does nothing
            differences[padding] = (layers(model, **alone)[:, 0] - layers(model)[:, 1, :4]).abs().amax((1, 2))
            unpadded[padding] = layers(model, **{**WORDS, "attention_mask": torch.ones(2, 9).long()})
    assert differences["masked"].max() < 1e-12
    assert differences["counted"][1:].min() > 1e-9  # 0 but for rounding where padding is masked
    torch.testing.assert_close(unpadded["masked"], unpadded["counted"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["hf_vit", "timm_vit"])
@pytest.mark.parametrize("tokens", ["all", "patches"])
def test_images_have_no_padding_to_count(kind: str, tokens: Any) -> None:
    tiny = build(kind)
    plain, found = tiny.output(), []
    for padding in ("masked", "counted"):
        with uc.attach(tiny.model, "contra_norm", scale=SCALE, tokens=tokens, padding=padding):
            found.append(tiny.output())
    assert torch.equal(*found)
    assert not torch.allclose(found[0], plain, atol=1e-3)


def test_counted_vectors_are_one_set_as_ever() -> None:
    model = build("mlp").model.double()
    x = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = model(x)
    where: dict[str, Any] = {"modules": "layers.2", "layout": "vectors", "at": "block"}
    reference = copy.deepcopy(model)
    reference.layers[2] = Around(reference.layers[2], after=lambda y: published(y[None])[0])
    with uc.attach(model, "contra_norm", scale=SCALE, identity=True, padding="counted", **where):
        assert_same(model(x), reference(x), plain)
