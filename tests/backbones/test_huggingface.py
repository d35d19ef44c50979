"""Every architecture as a tiny random model of the library: blocks, places, masks, attention maps, random twins."""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import uncollapse as uc  # noqa: E402
from uncollapse import backbones  # noqa: E402
from uncollapse.backbones import huggingface  # noqa: E402
from uncollapse.backbones.sites import Block, Context, Site, Stack, sets_with_mask  # noqa: E402

ALL_PLACES = {
    "block",
    *("attention.input", "attention.context", "attention.output", "attention.residual", "attention.norm"),
    *("mlp.output", "mlp.residual", "mlp.norm"),
}
POST_NORM = (
    *("BertModel", "RobertaModel", "ElectraModel", "DistilBertModel", "AlbertModel", "XLMRobertaModel", "MPNetModel"),
    "DebertaV2Model",
)
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
SEQ2SEQ = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 32},
}


@dataclass(frozen=True, eq=False)
class Case:
    """A model and what should be found in it. `places`: whether all are known. `final`: path of the last norm."""

    model: str
    config: dict[str, Any]
    prefix: int = 0
    causal: bool = False
    final: str | None = None
    places: bool = True
    maps: bool = True
    inputs: str = "text"
    path: str = ""

    @property
    def config_class(self) -> str:
        return self.model.removesuffix("Model").removesuffix("Encoder") + "Config"


def text(model: str, **facts: Any) -> Case:
    return Case(model, {**TEXT, **facts.pop("config", {})}, **facts)


def image(model: str, **facts: Any) -> Case:
    return Case(model, {**IMAGE, **facts.pop("config", {})}, inputs="image", **facts)


def decoder(model: str, **facts: Any) -> Case:
    return Case(model, {**DECODER, **facts.pop("config", {})}, causal=True, **{"final": "norm", **facts})


MODERN = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
DISTIL = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24, "vocab_size": 40, "max_position_embeddings": 32}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 40, "n_positions": 32}
OPT = {"ffn_dim": 24, "word_embed_proj_dim": 16, **TEXT}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2, "vocab_size": 40}
CONV = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_conv_pos_embeddings": 8}

CASES = (
    text("BertModel"),
    text("RobertaModel"),
    text("ElectraModel", config={"embedding_size": 8}),
    Case("DistilBertModel", DISTIL),
    text("AlbertModel", config={"embedding_size": 8}),
    text("XLMRobertaModel"),
    text("MPNetModel"),
    text("DebertaV2Model", maps=False, config={"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    text("ModernBertModel", config=MODERN, final="final_norm"),
    text("RobertaPreLayerNormModel", places=False, final="LayerNorm"),  # the names of BERT, but other forward passes
    image("ViTModel", prefix=1, final="layernorm"),
    image("DeiTModel", prefix=2, final="layernorm"),
    image("Dinov2Model", prefix=1, final="layernorm", config={"layerscale_value": 0.3}),
    image("Dinov2WithRegistersModel", prefix=4, final="layernorm", config={"num_register_tokens": 3}),
    image("BeitModel", prefix=1, places=False),  # scales of its own in the residuals
    image("Data2VecVisionModel", prefix=1, places=False, maps=False),
    image("CLIPVisionModel", prefix=1),  # its last norm sees the class token alone
    image("SiglipVisionModel"),
    text("CLIPTextModel", causal=True, final="final_layer_norm"),
    Case("GPT2Model", GPT2, causal=True, final="ln_f"),
    decoder("LlamaModel"),
    decoder("MistralModel"),
    decoder("Qwen2Model"),
    decoder("GemmaModel"),
    decoder("Gemma2Model"),
    decoder("PhiModel", places=False, final="final_layernorm"),  # attention and MLP side by side
    decoder("Olmo2Model", places=False),  # norms behind attention and MLP
    decoder("GPTNeoXModel", places=False, final="final_layer_norm"),
    Case("OPTModel", OPT, causal=True, places=False, final="decoder.final_layer_norm", path="decoder"),
    Case("T5EncoderModel", T5, places=False, maps=False, path="encoder", final="encoder.final_layer_norm"),
    Case("Wav2Vec2Model", {**SIZES, **CONV, "num_conv_pos_embedding_groups": 2}, places=False, inputs="sound"),
)
KNOWN = tuple(case for case in CASES if case.places)
MAPPED = tuple(case for case in CASES if case.maps)
TOKENS = tuple(case for case in CASES if case.inputs == "text")


def each(cases: tuple[Case, ...]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.model)


@functools.cache
def build(case: Case) -> nn.Module:
    """Tests that change the model copy it first."""
    torch.manual_seed(0)
    config = getattr(transformers, case.config_class)(**case.config)
    model: nn.Module = getattr(transformers, case.model)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # no norm or scale is the identity
    return model


@functools.cache
def batch(kind: str) -> dict[str, Tensor]:
    """Two sequences of seven tokens, the second with two of padding at its end; or two images, or two sounds."""
    torch.manual_seed(1)
    if kind == "image":
        return {"pixel_values": torch.randn(2, 3, 8, 8)}
    if kind == "sound":
        return {"input_values": torch.randn(2, 800)}
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(3, 40, (2, 7)) * mask, "attention_mask": mask}


def the_stack(model: nn.Module) -> Stack:
    (stack,) = huggingface.stacks(model)
    return stack


def read(model: nn.Module, sites: set[Site], run: Callable[[], Any]) -> tuple[dict[Site, list[Tensor]], Any]:
    """What is at the sites at each call of their modules, and what the model gives."""
    seen: dict[Site, list[Tensor]] = {site: [] for site in sites}

    def note(site: Site, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value = site.read((args, kwargs), output)
        assert value is not None, site
        seen[site].append(value)

    hooks = [
        model.get_submodule(site.path).register_forward_hook(functools.partial(note, site), with_kwargs=True)
        for site in sites
    ]
    try:
        with torch.no_grad():
            return seen, run()
    finally:
        for hook in hooks:
            hook.remove()


def context_of(model: nn.Module, stack: Stack, run: Callable[[], Any]) -> Context:
    """What the stack reads from the arguments of its module."""
    seen: list[Context] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(stack.context(args, kwargs))

    hook = model.get_submodule(stack.path).register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            run()
    finally:
        hook.remove()
    (context,) = seen
    return context


def implementations(model: Any) -> list[str]:
    return [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]


@each(CASES)
def test_what_is_found(case: Case) -> None:
    model = build(case)
    stack = the_stack(model)
    assert stack.path == case.path
    assert stack.family == "huggingface"
    assert stack.architecture == type(model.get_submodule(case.path)).__name__
    assert [block.name for block in stack.blocks] == ["block 0", "block 1", "block 2"]
    fronts = set() if case.model in POST_NORM else {"attention.norm.input", "mlp.norm.input"}
    assert set(stack.places()) == (ALL_PLACES | fronts if case.places else {"block"})
    assert stack.embed is not None
    assert stack.embed.side == "input"
    assert stack.final == (Site(case.final) if case.final else None)
    assert all((block.attention is not None) == case.maps for block in stack.blocks)
    assert (stack.expose_attention is not None) == case.maps
    assert json.loads(json.dumps(stack.facts))["hidden_size"] == 16
    assert stack.facts["heads"] == 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [("BertModel", "text encoder"), ("LlamaModel", "decoder"), ("CLIPTextModel", None), ("Wav2Vec2Model", None)],
)
def test_language_models_have_a_kind(name: str, kind: str | None) -> None:
    (case,) = (case for case in CASES if case.model == name)
    assert the_stack(build(case)).facts.get("kind") == kind


@each(CASES)
def test_prefix_mask_and_causality_are_read(case: Case) -> None:
    model, inputs = build(case), batch(case.inputs)
    context = context_of(model, the_stack(model), lambda: model(**inputs))
    assert context.prefix == case.prefix
    assert context.causal == case.causal
    if case.inputs == "text":
        assert context.mask is not None
        assert torch.equal(context.mask, inputs["attention_mask"].bool())
    else:
        assert context.mask is None


@each(CASES)
def test_blocks_give_the_hidden_states_of_the_library(case: Case) -> None:
    model, inputs = build(case), batch(case.inputs)
    stack = the_stack(model)
    assert stack.embed is not None
    finals = {stack.final} if stack.final else set()
    sites = {stack.embed, *(block.places["block"] for block in stack.blocks), *finals}
    seen, output = read(model, sites, lambda: model(**inputs, output_hidden_states=True))
    states = [seen[stack.embed][0], *(seen[b.places["block"]][b.call] for b in stack.blocks)]
    assert len(output.hidden_states) == 4
    for expected, state in zip(output.hidden_states[:-1], states[:-1], strict=True):
        torch.testing.assert_close(state, expected)
    if stack.final is not None:
        torch.testing.assert_close(seen[stack.final][0], output.last_hidden_state)
        torch.testing.assert_close(model.get_submodule(stack.final.path)(states[-1]), output.last_hidden_state)
    else:
        torch.testing.assert_close(states[-1], output.hidden_states[-1])


@each(KNOWN)
def test_places_hold_what_their_names_say(case: Case) -> None:
    model, inputs = build(case), batch(case.inputs)
    stack = the_stack(model)
    sites = {site for block in stack.blocks for site in block.places.values()}
    seen, _ = read(model, sites, lambda: model(**inputs))
    for block in stack.blocks:
        at = {place: seen[site][block.call] for place, site in block.places.items()}
        torch.testing.assert_close(at["attention.residual"], at["attention.input"] + at["attention.output"])
        _check_context(model, block, at)
        if block.places["mlp.residual"] == block.places["block"]:  # a norm in front of attention and MLP
            norm = model.get_submodule(block.places["attention.norm"].path)
            torch.testing.assert_close(norm(at["attention.input"]), at["attention.norm"])
            torch.testing.assert_close(at["mlp.residual"], at["attention.residual"] + at["mlp.output"])
        else:  # a norm behind each
            norm = model.get_submodule(block.places["mlp.norm"].path)
            torch.testing.assert_close(at["mlp.residual"], at["attention.norm"] + at["mlp.output"])
            torch.testing.assert_close(norm(at["mlp.residual"]), at["block"])
            torch.testing.assert_close(at["mlp.norm"], at["block"])


def _check_context(model: nn.Module, block: Block, at: dict[str, Tensor]) -> None:
    """The output projection of what is in `attention.context` is what attention gives, but for norm and scale."""
    given = model.get_submodule(block.places["attention.context"].path)(at["attention.context"])
    output = model.get_submodule(block.places["attention.output"].path)
    if "LayerScale" in type(output).__name__ or "RMSNorm" in type(output).__name__:
        given = output(given)
    torch.testing.assert_close(given, at["attention.output"])


def test_written_tokens_reach_the_rest_of_the_model() -> None:
    model, inputs = build(CASES[0]), batch("text")
    block = the_stack(model).blocks[1]
    shift = torch.linspace(-1, 1, 16)
    for place, site in block.places.items():
        module = model.get_submodule(site.path)
        if site.side == "input":
            hook = module.register_forward_pre_hook(lambda m, args: (args[0] + shift, *args[1:]))
        else:
            hook = module.register_forward_hook(lambda m, args, output: output + shift)
        with torch.no_grad():
            changed = model(**inputs).last_hidden_state
            hook.remove()
            assert not torch.allclose(changed, model(**inputs).last_hidden_state, atol=1e-3), place


@each(TOKENS)
def test_causal_means_that_no_token_sees_a_later_one(case: Case) -> None:
    model, inputs = build(case), batch("text")
    last = the_stack(model).blocks[-1]
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][0, -1] = 3 + (other["input_ids"][0, -1] + 1) % 30
    before, after = (
        read(model, {last.places["block"]}, lambda given=given: model(**given))[0][last.places["block"]][last.call]
        for given in (inputs, other)
    )
    assert torch.allclose(before[0, 0], after[0, 0], atol=1e-6) == case.causal


@each(MAPPED)
def test_attention_maps(case: Case) -> None:
    model, inputs = build(case), batch(case.inputs)
    stack = the_stack(model)
    assert stack.expose_attention is not None
    maps = {block.attention for block in stack.blocks if block.attention}
    before = implementations(model)
    with torch.no_grad():
        fused = model(**inputs).last_hidden_state
    with stack.expose_attention(model):
        seen, output = read(model, maps, lambda: model(**inputs))
    assert implementations(model) == before
    real = inputs.get("attention_mask", torch.ones(fused.shape[:2])).bool()
    assert (output.last_hidden_state - fused)[real].abs().max() < 1e-5
    for block in stack.blocks:
        assert block.attention is not None
        weights = seen[block.attention][block.call]
        n = fused.shape[1]
        assert weights.shape == (2, 2, n, n)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, n))
        assert (weights.transpose(1, 3)[~real] == 0).all()  # nobody looks at padding
        assert not case.causal or (weights.triu(1) == 0).all()


def test_the_implementation_of_attention_is_restored_after_an_error() -> None:
    model = build(CASES[0])
    stack, before = the_stack(model), implementations(model)
    assert stack.expose_attention is not None
    assert set(before) == {"sdpa"}

    def fail() -> None:
        with stack.expose_attention(model):
            assert set(implementations(model)) == {"eager"}
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert implementations(model) == before


def clip() -> Any:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=8)
    return transformers.CLIPModel(config).eval()


def test_towers_are_stacks_of_their_own() -> None:
    model = clip()
    words, picture = huggingface.stacks(model)
    assert (words.path, picture.path) == ("text_model", "vision_model")
    inputs = {**batch("text"), **batch("image")}
    contexts = [context_of(model, stack, lambda: model(**inputs)) for stack in (words, picture)]
    assert [(c.prefix, c.causal, c.mask is not None) for c in contexts] == [(0, True, True), (1, False, False)]
    assert backbones.find(model, part="vision_model").path == "vision_model"
    with pytest.raises(ValueError, match=r"select one.*text_model.*vision_model"):
        backbones.find(model)


def test_other_towers_keep_their_attention() -> None:
    model = clip()
    model.text_model.config._attn_implementation_internal = "eager"
    words, picture = huggingface.stacks(model)
    assert words.expose_attention is not None
    assert picture.expose_attention is not None
    with picture.expose_attention(model):
        assert model.config._attn_implementation == "sdpa"
    with words.expose_attention(model):
        assert model.vision_model.config._attn_implementation == "sdpa"
    assert model.text_model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("groups", "inner"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_each_pass_of_albert_is_a_block(groups: int, inner: int) -> None:
    config = {**TEXT, "embedding_size": 8, "num_hidden_layers": 5}
    case = Case("AlbertModel", {**config, "num_hidden_groups": groups, "inner_group_num": inner})
    model = build(case)
    stack = the_stack(model)
    assert len(stack.blocks) == 5 * inner
    assert len({(block.places["block"], block.call) for block in stack.blocks}) == 5 * inner
    assert stack.embed is not None
    sites = {stack.embed, *(block.places["block"] for block in stack.blocks)}
    seen, output = read(model, sites, lambda: model(**batch("text"), output_hidden_states=True))
    states = [seen[stack.embed][0], *(seen[b.places["block"]][b.call] for b in stack.blocks)]
    assert len(states) == len(output.hidden_states)
    for state, expected in zip(states, output.hidden_states, strict=True):
        torch.testing.assert_close(state, expected)


def test_mask_is_read_by_position_and_by_name() -> None:
    model, inputs = build(CASES[0]), batch("text")
    stack = the_stack(model)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for run in (lambda: model(ids, mask), lambda: model(ids, attention_mask=mask), lambda: model(ids, mask.float())):
        read_mask = context_of(model, stack, run).mask
        assert read_mask is not None
        assert torch.equal(read_mask, mask.bool())
    assert context_of(model, stack, lambda: model(ids)).mask is None


def test_mask_of_another_shape_is_refused() -> None:
    stack = the_stack(build(CASES[0]))
    with pytest.raises(ValueError, match=r"shape.*\(2, 1, 7, 7\)"):
        stack.context((), {"attention_mask": torch.ones(2, 1, 7, 7)})
    with pytest.raises(ValueError, match="got dict"):
        stack.context((), {"attention_mask": {"full_attention": None}})


def test_heads_and_wrappers() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.BertConfig(**TEXT)
            self.towers = nn.ModuleDict({"words": transformers.BertForSequenceClassification(config)})
            self.again = self.towers["words"].bert.encoder.layer  # a second name for the same blocks

        def forward(self, ids: Tensor, mask: Tensor) -> Any:
            return self.towers["words"](ids, attention_mask=mask)

    model = Mine().eval()
    stack = backbones.find(model)
    assert stack.path == "towers.words.bert"
    assert stack.blocks[2].places["block"] == Site("towers.words.bert.encoder.layer.2")
    inputs = tuple(batch("text").values())
    context = context_of(model, stack, lambda: model(*inputs))
    assert context.mask is not None
    assert torch.equal(context.mask, inputs[1].bool())
    _check_twin(model, stack)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("T5Model", {**T5, "num_layers": 2, "num_decoder_layers": 3}),
        ("BartModel", SEQ2SEQ),
        ("MBartModel", SEQ2SEQ),
        ("WhisperModel", {**SEQ2SEQ, "max_source_positions": 8, "num_mel_bins": 4, "pad_token_id": 0}),
    ],
)
def test_encoder_and_decoder(model: str, config: dict[str, Any]) -> None:
    built = build(Case(model, config))
    ids, mask = batch("text").values()
    first = {"input_features": torch.randn(2, 4, 16)} if model == "WhisperModel" else batch("text")
    inputs = {**first, "decoder_input_ids": ids[:, :6], "decoder_attention_mask": mask[:, :6]}
    encoder, decoding = huggingface.stacks(built)
    assert [(s.path, len(s.blocks)) for s in (encoder, decoding)] == [("encoder", 2), ("decoder", 3)]
    contexts = [context_of(built, stack, lambda: built(**inputs)) for stack in (encoder, decoding)]
    assert [context.causal for context in contexts] == [False, True]
    assert contexts[1].mask is not None
    assert torch.equal(contexts[1].mask, mask[:, :6].bool())
    assert (contexts[0].mask is None) == (model == "WhisperModel")
    for stack, name in ((encoder, "encoder"), (decoding, "decoder")):
        sites = {block.places["block"] for block in stack.blocks}
        seen, output = read(built, sites, lambda: built(**inputs, output_hidden_states=True))
        expected = output[f"{name}_hidden_states"]
        assert len(expected) == len(stack.blocks) + 1
        for block, state in zip(stack.blocks[:-1], expected[1:-1], strict=True):
            torch.testing.assert_close(seen[block.places["block"]][0], state)


def test_tokens_in_front_of_the_batch() -> None:
    config = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": 40}
    model = build(Case("XLNetModel", config))
    stack, inputs = the_stack(model), batch("text")
    site = stack.blocks[0].places["block"]
    seen, output = read(model, {site}, lambda: model(**inputs, output_hidden_states=True))
    context = context_of(model, stack, lambda: model(**inputs))
    sets, mask = sets_with_mask(seen[site][0], stack.layout, context)
    torch.testing.assert_close(sets, output.hidden_states[1])
    assert mask is not None
    assert torch.equal(mask, inputs["attention_mask"].bool())


def test_stages_are_one_stack() -> None:
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [1, 2], "window_size": 2}
    model = build(Case("SwinModel", sizes))
    stack = the_stack(model)
    assert [b.path for b in stack.blocks] == [f"encoder.layers.{n}" for n in ("0.blocks.0", "0.blocks.1", "1.blocks.0")]
    assert (stack.places(), stack.width) == (("block",), None)
    site = stack.blocks[2].places["block"]
    seen, _ = read(model, {site}, lambda: model(torch.randn(2, 3, 16, 16)))
    assert seen[site][0].shape == (2, 16, 16)


def test_an_mlp_in_chunks_has_no_places() -> None:
    model = build(text("BertModel", config={"chunk_size_feed_forward": 2}))
    assert set(the_stack(model).places()) == {place for place in ALL_PLACES if not place.startswith("mlp.")}


def test_blocks_that_look_at_an_encoder_keep_to_what_is_sure() -> None:
    model = build(Case("GPT2Model", {**GPT2, "add_cross_attention": True}))  # its second norm may see another residual
    assert the_stack(model).places() == ("block",)
    assert the_stack(model).blocks[0].attention == Site("h.0.attn", what="attention")


def test_a_decoder_that_looks_both_ways_is_not_causal() -> None:
    case = decoder("Gemma3TextModel", config={"use_bidirectional_attention": True})
    assert not the_stack(build(case)).context((), {}).causal
    assert the_stack(build(decoder("Gemma3TextModel"))).context((), {}).causal


def test_models_without_attention() -> None:
    model = transformers.MambaModel(transformers.MambaConfig(hidden_size=8, num_hidden_layers=2, vocab_size=40))
    stack = the_stack(model)
    assert [block.path for block in stack.blocks] == ["layers.0", "layers.1"]
    assert not stack.knows_causality  # it is found out


def test_funnel_has_an_encoder_in_stages_and_a_decoder() -> None:
    sizes = {"d_model": 16, "d_inner": 16, "n_head": 2, "d_head": 8, "vocab_size": 40, "block_sizes": [2, 1]}
    model = transformers.FunnelModel(transformers.FunnelConfig(**sizes, num_decoder_layers=1)).eval()
    assert [(s.path, len(s.blocks)) for s in huggingface.stacks(model)] == [("encoder", 3), ("decoder", 1)]


def test_blocks_outside_transformers_are_left_to_others() -> None:
    class Attention(nn.Module):
        pass

    assert huggingface.stacks(nn.ModuleList([Attention(), Attention()])) == ()


def _check_twin(model: nn.Module, stack: Stack) -> None:
    assert stack.reinitialize is not None
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    twin, again = stack.reinitialize(model), stack.reinitialize(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(twin) is type(model)
    assert not twin.training
    drawn = [name for name, value in before.items() if name.endswith("weight") and value.dim() == 2]
    new = twin.state_dict()
    assert {name: value.shape for name, value in new.items()} == {n: v.shape for n, v in before.items()}
    assert all(value.dtype == new[name].dtype for name, value in before.items())
    assert any(stack.blocks[0].places["block"].path in name for name in drawn)
    assert not any(torch.equal(new[name], before[name]) for name in drawn)
    assert all(torch.equal(value, new[name]) for name, value in again.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@each(CASES)
def test_random_twin(case: Case) -> None:
    model = build(case)
    _check_twin(model, the_stack(model))


def test_random_twin_of_a_changed_model() -> None:
    model: Any = copy.deepcopy(build(CASES[0])).to(torch.bfloat16).train()
    model.encoder.layer = model.encoder.layer[:2]
    model.pooler = None
    _check_twin(model, the_stack(model))
    assert model.training


def test_no_random_twin_where_weights_are_not_those_of_the_class() -> None:
    added: Any = copy.deepcopy(build(CASES[0]))
    added.encoder.layer[0].adapter = nn.Linear(2, 2)
    other: Any = copy.deepcopy(build(CASES[0]))
    other.embeddings.word_embeddings = nn.Embedding(50, 16)
    quantized: Any = copy.deepcopy(build(CASES[0]))
    quantized.pooler.dense.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    for model, says in ((added, "adapters"), (other, "size mismatch"), (quantized, "quantized")):
        reinitialize = the_stack(model).reinitialize
        assert reinitialize is not None
        with pytest.raises(ValueError, match=rf"(?s)random baseline.*{says}"):
            reinitialize(model)


def zoo_model(kind: str) -> Any:
    """A small model of a type with its first batch, as the zoo builds it: with padding."""
    from tests.zoo.transformers_models import build as build_small

    torch.manual_seed(0)
    built = build_small("transformers", kind)
    return built.model.eval(), built.batches[0]


def diagnose_small(model: nn.Module, inputs: Any, **where: Any) -> Any:
    return uc.diagnose(model, [inputs], plan=uc.Plan(baseline=0), tokens="all", **where)


@pytest.mark.parametrize(
    ("kind", "part", "mask"),
    [
        ("canine", "initial_char_encoder", "attention_mask"),
        ("git", "encoder", "attention_mask"),
        ("paligemma", "language_model", "attention_mask"),
        ("zaya", None, "attention_mask"),
        ("fsmt", "encoder", "attention_mask"),
        ("pegasus_x", "encoder", "attention_mask"),
    ],
)
def test_padding_is_left_out_where_the_model_makes_the_mask(kind: str, part: str | None, mask: str) -> None:
    model, inputs = zoo_model(kind)
    found = diagnose_small(model, inputs, part=part)
    assert int(inputs[mask].sum()) < inputs[mask].numel()
    assert {layer.tokens for layer in found.layers} == {int(inputs[mask].sum())}


def test_blocks_that_take_the_sequence_first_are_not_read_along_the_batch() -> None:
    model, inputs = zoo_model("fsmt")
    found = diagnose_small(model, {name: value for name, value in inputs.items() if "mask" not in name}, part="encoder")
    assert found.sequences == len(inputs["input_ids"])


def test_images_next_to_texts_have_no_padding() -> None:
    """BridgeTower passes the mask of the texts to the module that runs both."""
    model, inputs = zoo_model("bridgetower")
    found = diagnose_small(model, inputs, part="cross_modal_image_layers")
    assert found.layers[-1].tokens % len(inputs["input_ids"]) == 0


@pytest.mark.parametrize(("kind", "part", "says"), [("git", "encoder", "part="), ("prophetnet", "decoder", "side by")])
def test_masks_and_streams_that_a_cure_cannot_respect_are_refused(kind: str, part: str, says: str) -> None:
    model, inputs = zoo_model(kind)
    with uc.attach(model, "contra_norm", scale=0.1, part=part, causal=False), pytest.raises(RuntimeError, match=says):
        model(**inputs)


def test_a_part_whose_tokens_do_not_fit_the_mask_is_refused_with_the_other_parts() -> None:
    model, inputs = zoo_model("prophetnet")
    with pytest.raises(ValueError, match="part='encoder'"):
        diagnose_small(model, inputs)
    found = diagnose_small(model, inputs, part="encoder")
    assert found.layers[-1].tokens == int(inputs["attention_mask"].sum())


def test_blocks_that_hooks_do_not_see_are_named_with_what_is_inside() -> None:
    model, inputs = zoo_model("squeezebert")
    with pytest.raises(ValueError, match=r"modules=\['encoder.layers.\*.output'\]"):
        diagnose_small(model, inputs)
    found = diagnose_small(model, inputs, modules="encoder.layers.*.output")
    assert {layer.dim for layer in found.layers[1:]} == {model.config.hidden_size}
