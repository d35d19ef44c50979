"""A cure at every place of every model of the table equals the block written by hand with the formula at that place."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc

from . import by_hand as table
from .by_hand import (
    BY_NAME,
    CASES,
    FINAL,
    MASK,
    POST_NORM,
    SCALE,
    VISION,
    Case,
    assert_clean,
    assert_same,
    by_hand,
    change,
)

each = pytest.mark.parametrize("case", CASES, ids=str)


def some(*names: str) -> Any:
    return pytest.mark.parametrize("case", [BY_NAME[name] for name in names], ids=str)


def cured(case: Case, model: nn.Module, **options: Any) -> Tensor:
    with uc.attach(model, "contra_norm", **{"scale": SCALE, "tokens": "all", **case.where, **options}):
        return case.run(model)


@each
def test_every_place(case: Case) -> None:
    model = case.model()
    plain = case.run(model)
    torch.testing.assert_close(case.run(by_hand(case)), plain, rtol=0, atol=case.close)
    assert set(uc.places(model, **case.where)) == set(case.all_places())
    for place in case.all_places():
        expected = case.run(by_hand(case, place))
        assert_same(cured(case, model, at=place), expected, plain, case.close)
    assert_clean(model)
    assert torch.equal(case.run(model), plain)


@each
def test_gradients(case: Case) -> None:
    """Of the model's weights, and of a learned scale, at the cure's own place."""
    model, place = case.model(), "attention.residual" if len(case.places) > 1 else "block"
    handle = uc.attach(model, "contra_norm", scale=SCALE, learnable=True, tokens="all", **case.where)
    for scale in handle.parameters():
        nn.init.constant_(scale, SCALE)  # it was rounded to float32
    assert handle.at == (place,)
    reference = by_hand(case, place)
    found = []
    for one in (model, reference):
        output = case.output(one, **case.batch)
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
        found.append({name: p.grad for name, p in one.named_parameters() if p.grad is not None})
    assert len(found[0].keys() & found[1].keys()) > 10
    for name in found[0].keys() & found[1].keys():
        torch.testing.assert_close(found[0][name], found[1][name], atol=max(case.close, 1e-9), rtol=1e-4, msg=name)
    assert all(scale.grad.abs().max() > 1e-6 for scale in handle.parameters())


@pytest.mark.parametrize("case", [c for c in CASES if len(c.places) > 1 and c.name != "AlbertModel"], ids=str)
def test_two_places_and_selected_blocks(case: Case) -> None:
    """One cure in the first and the last block, another one in between; not in the order of the calls."""
    model, where = case.model(), {"block": [2], "mlp.output": [1], "attention.residual": [0, 2]}
    plain = case.run(model)
    handles = [
        uc.attach(model, "contra_norm", scale=SCALE, at=place, layers=layers, tokens="all", **case.where)
        for place, layers in where.items()
    ]
    assert_same(case.run(model), case.run(by_hand(case, where=where)), plain, case.close)
    handles[2].remove()
    assert_same(case.run(model), case.run(by_hand(case, where=dict([*where.items()][:2]))), plain, case.close)
    uc.detach(model)
    assert torch.equal(case.run(model), plain)


@pytest.mark.parametrize("case", [case for case in VISION if case.prefix and not case.where], ids=str)
def test_prefix_tokens_stay_as_they_are_by_default(case: Case) -> None:
    model = case.model()
    output = (lambda m: case.run(m)) if case.name.endswith("Model") else (lambda m: m.forward_features(**case.batch))
    with torch.no_grad():
        plain = output(model)
        for place in ("attention.residual", "attention.context", "block", *(FINAL if case.final else ())):
            with uc.attach(model, "contra_norm", scale=SCALE, at=place):
                found = output(model)
            assert_same(found, output(by_hand(case, place, new=change(case, tokens="patches"))), plain, case.close)
            assert (found - output(by_hand(case, place))).abs().max() > 1e-3
        if case.name.endswith("Model"):
            assert torch.equal(case.run(model), plain)


@some("vit_tiny_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224")
def test_while_whole_paths_drop_out(case: Case) -> None:
    model = case.model().train()
    for block in model.blocks:
        block.drop_path1, block.drop_path2 = table.timm.layers.DropPath(0.5), table.timm.layers.DropPath(0.5)

    def seeded(one: nn.Module, seed: int = 3) -> Tensor:
        torch.manual_seed(seed)
        return case.run(one)

    plain = seeded(model)
    assert not torch.equal(plain, seeded(model, 4))
    for place in case.places:
        with uc.attach(model, "contra_norm", scale=SCALE, at=place, tokens="all"):
            found = seeded(model)
        assert_same(found, seeded(by_hand(case, place, model=model)), plain)


# --- norms, numbers of the paper, published forms ---


@some(
    "deit_tiny_distilled_patch16_224", "encoder-pre-batch-first", "encoder-post-batch-first", "decoder-post-batch-first"
)
def test_at_all_norms(case: Case) -> None:
    """Each LayerNorm is replaced, as in the published code of DeiT."""
    model, reference = case.model(), case.model().train()  # without torch's fast path; nothing drops out
    plain = case.run(model)
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    for path in norms:
        table.replace(reference, path, change(case))
    with uc.attach(model, "contra_norm", scale=SCALE, at="norms", tokens="all") as handle:
        assert len(handle.cures) == len(norms)
        assert_same(case.run(model), case.run(reference), plain)


BERT_NUMBERS = (*POST_NORM[:3], "attention.norm", "mlp.output", "mlp.norm", "attention.residual", "mlp.residual")
NUMBERS = {**dict.fromkeys(("BertModel", "RobertaModel", "ElectraModel"), BERT_NUMBERS), "AlbertModel": POST_NORM[:-1]}


@some(*NUMBERS)
def test_numbers_of_the_paper(case: Case) -> None:
    model = case.model()
    for number, place in enumerate(NUMBERS[case.name], start=1):
        with uc.attach(model, "contra_norm", scale=SCALE, at=number) as handle:
            assert handle.at == (place,)


def published(x: Tensor, identity: bool = False, **context: Any) -> Tensor:
    """The formula of the published code, dense: (1 + s)x − s·softmax(x̂x̂ᵀ)x for BERT, x − s·softmax(x̂x̂ᵀ)x for others."""
    unit = x / x.norm(dim=-1, keepdim=True)
    mean = (unit @ unit.transpose(-1, -2)).softmax(-1) @ x
    return (1 + SCALE) * x - SCALE * mean if identity else x - SCALE * mean


@pytest.mark.parametrize(
    ("name", "preset", "at"),
    [("BertModel", "bert", 7), ("AlbertModel", "albert", 4), ("vit_tiny_patch16_224", "vit", "attention.residual")],
)
def test_published_formulas(name: str, preset: str, at: Any) -> None:
    case, unpadded = BY_NAME[name], {"input_ids": table.IDS, "attention_mask": torch.ones_like(table.IDS)}
    model, whole = case.model(), {} if preset == "vit" else unpadded
    plain = case.run(model, **whole)
    reference = by_hand(case, "attention.residual", new=functools.partial(published, identity=preset == "bert"))
    with uc.attach(model, "contra_norm", scale=SCALE, at=at, preset=preset, tokens="all"):
        assert_same(case.run(model, **whole), case.run(reference, **whole), plain)


# --- blocks that run several times ---

ALBERT = BY_NAME["AlbertModel"]
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
    sizes = {**table.TEXT, "embedding_size": 8, "num_hidden_layers": 6, "num_hidden_groups": groups}
    model = table.transformers.AlbertModel(table.transformers.AlbertConfig(**sizes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def albert_by_hand(model: Any, passes: tuple[int, ...], place: str) -> Tensor:
    """The passes in a loop of their own, over the model's layers."""
    x = model.encoder.embedding_hidden_mapping_in(model.embeddings(ALBERT.batch["input_ids"]))
    groups = model.encoder.albert_layer_groups
    for number in range(6):
        touch = lambda here, x, n=number: change(ALBERT)(x) if here == place and n in passes else x  # noqa: E731
        block = groups[number * len(groups) // 6].albert_layers[0]
        x = table.albert(block, x, touch, {"attention_mask": MASK[:, None, None, :].expand(-1, -1, 7, -1)})
    return x


@pytest.mark.parametrize("place", ["attention.residual", "block"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("layers", "passes"), CHOICES, ids=[str(chosen) for chosen, _ in CHOICES])
def test_layers_of_albert_are_passes_counted_anew_in_each_call(
    layers: Any, passes: Any, groups: int, place: str
) -> None:
    model = copy.deepcopy(albert_of_six(groups))
    plain = ALBERT.run(model)
    torch.testing.assert_close(albert_by_hand(model, (), place), plain, rtol=0, atol=1e-10)
    expected = albert_by_hand(model, passes, place)
    with uc.attach(model, "contra_norm", scale=SCALE, at=place, layers=layers) as handle:
        first, second = ALBERT.run(model), ALBERT.run(model)
    assert handle.blocks == passes
    assert torch.equal(first, second)
    assert_same(first, expected, plain)


def test_a_pass_that_fails_does_not_shift_the_count_of_albert() -> None:
    model = copy.deepcopy(albert_of_six(1))
    uc.attach(model, "contra_norm", scale=SCALE, layers=[0, 3])
    expected, block = ALBERT.run(model), model.get_submodule(ALBERT.blocks)[0]
    sound, left = block.activation, [None, None]
    block.activation = table.Around(sound, lambda x: left.pop() or x)  # fails in the third pass
    with pytest.raises(IndexError):
        ALBERT.run(model)
    block.activation = sound
    assert torch.equal(ALBERT.run(model), expected)


def test_the_passes_of_albert_share_one_learned_scale() -> None:
    model = copy.deepcopy(albert_of_six(1))
    before = {name for name, _ in model.named_parameters()}
    (cure,) = uc.attach(model, "contra_norm", scale=SCALE, learnable=True).cures.values()
    (new,) = {name for name, _ in model.named_parameters()} - before
    assert model.get_parameter(new) is cure.scale_param
    model(**ALBERT.batch).last_hidden_state.square().sum().backward()
    assert cure.scale_param.grad.abs().min() > 0


def test_layers_of_torch_that_run_several_times() -> None:
    """One module in three positions; the last norm counts no passes."""
    case = BY_NAME["encoder-pre-batch-first"]
    model = case.model()
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    plain = case.run(model)
    for place in ("attention.residual", "block", "mlp.norm.input"):
        passes, reference = iter(range(100)), copy.deepcopy(model)

        def touch(here: str, x: Tensor, place: str = place, passes: Any = passes) -> Tensor:
            return change(case)(x) if here == place and next(passes) % 3 != 1 else x

        table.write(case, reference.layers[0], touch)
        with uc.attach(model, "contra_norm", scale=SCALE, at=place, layers=[0, 2]):
            for given in (case.batch["src"], case.batch["src"].flip(0)):  # calls are counted anew in each pass
                assert_same(case.run(model, src=given), case.run(reference, src=given), case.run(model, src=-given))
    with uc.attach(model, "contra_norm", scale=SCALE, at="final.norm", layers=[0]):
        assert_same(case.run(model), change(case)(plain) * case.mask[..., None], plain)
    assert_clean(model)


# --- parts, outputs, several cures ---


def test_parts_of_a_transformer() -> None:
    """The padding of the target is the decoder's, that of the source is not."""
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True, norm_first=True).double().eval()
    case = BY_NAME["decoder-pre-batch-first"]
    x, y, source = case.batch["memory"], case.batch["tgt"], torch.tensor([[False] * 2 + [True] * 3, [False] * 5])
    given = {"src_key_padding_mask": source, "memory_key_padding_mask": source, "tgt_mask": case.batch["tgt_mask"]}
    given["tgt_key_padding_mask"] = case.batch["tgt_key_padding_mask"]
    real = case.mask
    plain = model(x, y, **given)[real]
    for place in ("cross.residual", "mlp.norm.input"):
        reference = copy.deepcopy(model)
        reference.decoder = by_hand(case, place, model=model.decoder)
        with uc.attach(model, "contra_norm", part="decoder", at=place, scale=SCALE):
            assert_same(model(x, y, **given)[real], reference(x, y, **given)[real], plain)
    seen = copy.deepcopy(model)
    for layer in seen.encoder.layers:
        layer.register_forward_hook(lambda m, args, out: table.contra(out, mask=~source))  # not one of ours
    with uc.attach(model, "contra_norm", part="encoder", at="block", scale=SCALE):
        assert_same(model(x, y, **given)[real], seen(x, y, **given)[real], plain)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_several_cures_out_in_any_order(order: tuple[int, ...]) -> None:
    case = BY_NAME["decoder-pre-batch-first"]
    model, given = case.model(), {"tgt_mask": None}
    plain = case.run(model, **given)
    cures = [
        lambda m: uc.attach(m, "contra_norm", at="attention.residual", scale=SCALE),
        lambda m: uc.attach(m, "pair_norm", at="block", layers="last 2"),
        lambda m: uc.attach(m, "contra_norm", at=["cross.residual", "mlp.output"], scale=0.3, axis="features"),
    ]
    handles = [attach(model) for attach in cures]
    for number, gone in enumerate(order, start=1):
        handles[gone].remove()
        alike = case.model()
        for left in sorted(order[number:]):
            cures[left](alike)
        found = case.run(model, **given)
        assert torch.equal(found, case.run(alike, **given))
        assert torch.equal(found, plain) == (number == 3)
    assert_clean(model)


@some("BertModel", "DebertaV2Model", "ViTModel", "CLIPTextModel", "GPT2Model", "LlamaModel")
@pytest.mark.parametrize("ran_before", [False, True], ids=["fresh", "ran before"])
def test_hidden_states_and_attentions_are_those_of_the_cured_stream(case: Case, ran_before: bool) -> None:
    model, wanted = case.model(), {"output_hidden_states": True, "output_attentions": True}
    model.config._attn_implementation = "eager"
    plain = (model if ran_before else copy.deepcopy(model))(**case.batch, **wanted)
    for place in ("attention.residual", "block", "mlp.norm"):
        reference = by_hand(case, place)
        reference.config._attn_implementation = "eager"
        expected = reference(**case.batch, output_hidden_states=True).hidden_states
        with uc.attach(model, "contra_norm", scale=SCALE, at=place, tokens="all"):
            found = model(**case.batch, **wanted)
        assert [a.shape for a in found.attentions] == [a.shape for a in plain.attentions]
        assert (found.attentions[2] - plain.attentions[2]).abs().max() > 100 * case.close
        for number in range(4):
            torch.testing.assert_close(found.hidden_states[number], expected[number], rtol=0, atol=case.close)
            changed = (found.hidden_states[number] - plain.hidden_states[number]).abs().max()
            assert number == 0 or changed > 100 * case.close


@some("CLIPModel-vision_model", "CLIPModel-text_model")
def test_the_other_tower_is_as_it_was(case: Case) -> None:
    model = case.model()
    other = next(key for part, key in table.TWO_PARTS.items() if part[-5:] == "model" and part != case.where["part"])
    plain = model(**case.batch)[other]
    with uc.attach(model, "contra_norm", scale=SCALE, **case.where):
        assert torch.equal(model(**case.batch)[other], plain)


# --- models inside of other modules ---


class Own(nn.Module):
    """A user's module around a model of the library, which calls it by position."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.encoder(input_ids, attention_mask).last_hidden_state


class Loose(nn.Module):
    """Layers of torch in a list, that may run several times; the mask is known to them only."""

    def __init__(self, encoder: nn.Module, passes: int) -> None:
        super().__init__()
        self.layers, self.passes = encoder.layers, passes

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        for _ in range(self.passes):
            for layer in self.layers:
                src = layer(src, src_key_padding_mask=src_key_padding_mask)
        return src


def with_head(encoder: Any) -> Any:
    head = table.transformers.BertForSequenceClassification(encoder.config).double().eval()
    head.bert.load_state_dict(encoder.state_dict(), strict=False)
    return head


AROUND: dict[str, tuple[str, Any, str]] = {  # case, module around it, path of the model within
    "head": ("BertModel", with_head, "bert"),
    "user's module": ("BertModel", Own, "encoder"),
    "loose layers": ("encoder-pre-batch-first", lambda encoder: Loose(encoder, 1), ""),
    "loose layers twice": ("encoder-pre-batch-first", lambda encoder: Loose(encoder, 2), ""),
}


@pytest.mark.parametrize("name", AROUND)
@torch.no_grad()
def test_a_model_inside_of_another_module(name: str) -> None:
    """All passes by default."""
    case, build, path = BY_NAME[AROUND[name][0]], *AROUND[name][1:]
    model = build(case.model())
    run = lambda m: getattr(out := m(**case.batch), "logits", out)  # noqa: E731
    plain = run(model)
    assert set(case.places) == set(uc.places(model))
    for place in ("attention.norm", "attention.residual", "mlp.residual", "block"):
        reference = by_hand(case, place, model=model) if not path else copy.deepcopy(model)
        if path:
            setattr(reference, path, by_hand(case, place, model=getattr(model, path)))
        with uc.attach(model, "contra_norm", scale=SCALE, at=place):
            assert_same(run(model), run(reference), plain)
    assert_clean(model)
    assert torch.equal(run(model), plain)


# --- layers of torch: the fast path, loose layers, the layers that were asked for ---

PRE, POST = BY_NAME["encoder-pre-batch-first"], BY_NAME["encoder-post-batch-first"]


@pytest.mark.parametrize("nested", [True, False])
@some(PRE.name, POST.name)
def test_the_fast_path_does_not_bypass_the_cure(case: Case, nested: bool) -> None:
    """In evaluation torch runs a layer in one operator, and packs padded batches into nested tensors."""
    model = case.model()
    model.use_nested_tensor = before = nested and case is POST
    plain = case.run(model)
    handle = uc.attach(model, "contra_norm", layers=[0, 2], scale=SCALE)
    slow = case.run(model.train())
    assert_same(case.run(model.eval()), slow, plain)
    unpadded = case.run(model, src_key_padding_mask=None)
    assert_same(unpadded, case.run(model.train(), src_key_padding_mask=None), case.run(model.eval()))
    handle.remove()
    assert model.use_nested_tensor is before
    assert torch.equal(case.run(model), plain)


def test_nested_tensors_stay_off_until_the_last_cure_is_out() -> None:
    model = POST.model()
    first = uc.attach(model, "contra_norm", layers=[0], scale=SCALE)
    second = uc.attach(model, "feat_scale", layers=[1])
    assert (first.at, second.at) == (("attention.residual",), ("attention.output",))  # places of their own
    first.remove()
    assert not model.use_nested_tensor
    POST.run(model)
    second.remove()
    assert model.use_nested_tensor
    assert_clean(model)


def test_two_reads_of_the_stream_of_a_decoder() -> None:
    """What is changed after self-attention stays in the stream that is changed again after cross-attention."""
    case = BY_NAME["decoder-pre-batch-first"]
    model, places = case.model(), ("attention.residual", "cross.residual", "cross.norm.input", "block")
    plain = case.run(model)
    expected = case.run(by_hand(case, *places))
    assert_same(cured(case, model, at=places), expected, plain)
    for place in reversed(places):  # the order of attachments does not matter
        uc.attach(model, "contra_norm", scale=SCALE, at=place)
    assert_same(case.run(model), expected, plain)
    uc.detach(model)
    assert_clean(model)


def test_a_mask_by_keyword_before_the_tokens_is_not_mistaken_for_them() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 24, batch_first=True, dropout=0.0).eval()
    x, mask = torch.randn(1, 8, 8), torch.zeros(8, 8)
    uc.attach(layer, "contra_norm", scale=0.5, at="attention.input")
    torch.testing.assert_close(layer(src_mask=mask, src=x), layer(x))


def test_hooks_that_were_there_before_see_what_flows_on() -> None:
    """At the input of a norm and at the output of a layer, whoever reads the model reads cured tokens."""
    model, seen = POST.model().train(), {}  # nothing drops out
    layer = model.layers[0]
    layer.norm1.register_forward_pre_hook(lambda module, args: seen.update(given=args[0]))
    layer.norm1.register_forward_hook(lambda module, args, output: seen.update(made=output))
    layer.register_forward_hook(lambda module, args, output: seen.update(block=output))
    plain = POST.run(model)
    before = dict(seen)
    uc.attach(model, "contra_norm", scale=SCALE, at=("attention.residual", "block"))
    assert not torch.allclose(POST.run(model), plain, atol=1e-3)
    assert_same(seen["given"], change(POST)(before["given"]), before["given"])
    with torch.no_grad():
        assert torch.equal(
            nn.functional.layer_norm(seen["given"], (8,), layer.norm1.weight, layer.norm1.bias), seen["made"]
        )
        uncured = layer.norm2(seen["made"] + layer._ff_block(seen["made"]))
        torch.testing.assert_close(seen["block"], change(POST)(uncured), rtol=0, atol=1e-10)
