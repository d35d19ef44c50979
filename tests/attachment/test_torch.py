"""Cures in encoders and decoders of torch: every place by hand, masks, the fast path, shared and loose layers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import uncollapse as uc
from uncollapse.backbones.sites import from_sets, to_sets

from .by_hand import At, assert_clean, assert_same, written_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
DIM, DEPTH, N = 8, 3, 5
OPTIONS = {"scale": 0.5, "temperature": 0.7}
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
ORDERS = [(norm_first, batch_first) for norm_first in (True, False) for batch_first in (True, False)]
DECODER_PLACES = {
    f"{branch}.{end}" for branch in ("attention", "cross", "mlp") for end in ("output", "residual", "norm")
}


def spread(model: Any) -> Any:
    """Weights that are far from those that torch begins with: a norm that changes nothing would hide mistakes."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.data.add_(1)
    return model.double().eval()


def layer(kind: Any = nn.TransformerEncoderLayer, norm_first: bool = True, batch_first: bool = True) -> Any:
    return kind(DIM, 2, 16, dropout=0.0, norm_first=norm_first, batch_first=batch_first)


def encoder(norm_first: bool = True, batch_first: bool = True, *, nested: bool = True) -> Any:
    one = layer(norm_first=norm_first, batch_first=batch_first)
    return spread(nn.TransformerEncoder(one, DEPTH, norm=nn.LayerNorm(DIM), enable_nested_tensor=nested))


def decoder(norm_first: bool = True, batch_first: bool = True) -> Any:
    one = layer(nn.TransformerDecoderLayer, norm_first, batch_first)
    return spread(nn.TransformerDecoder(one, DEPTH, norm=nn.LayerNorm(DIM)))


def tokens(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, N, DIM)), generator=generator, dtype=torch.float64)


def cure(x: Tensor, **context: Any) -> Tensor:
    return uc.contra_norm(x, **OPTIONS, **context)


def sequence_first(x: Tensor) -> Tensor:
    return cure(x.transpose(0, 1)).transpose(0, 1)


def encoder_layer(
    self: Any, at: At, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
        return at("attention.output", self.dropout1(self.self_attn(x, x, x, **masks, need_weights=False)[0]))

    def feed(x: Tensor) -> Tensor:
        return at("mlp.output", self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x))))))

    return _steps(self, at, src, {"attention": attend, "mlp": feed})


def decoder_layer(self: Any, at: At, tgt: Tensor, memory: Tensor, tgt_mask: Any = None, **masks: Any) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        padding = masks.get("tgt_key_padding_mask")
        h = self.self_attn(x, x, x, attn_mask=tgt_mask, key_padding_mask=padding, need_weights=False)[0]
        return at("attention.output", self.dropout1(h))

    def look(x: Tensor) -> Tensor:
        padding = masks.get("memory_key_padding_mask")
        h = self.multihead_attn(x, memory, memory, key_padding_mask=padding, need_weights=False)[0]
        return at("cross.output", self.dropout2(h))

    def feed(x: Tensor) -> Tensor:
        return at("mlp.output", self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(x))))))

    return _steps(self, at, tgt, {"attention": attend, "cross": look, "mlp": feed})


def _steps(self: Any, at: At, x: Tensor, branches: dict[str, Any]) -> Tensor:
    x = at("attention.input", x)
    for number, (name, branch) in enumerate(branches.items(), start=1):
        norm = getattr(self, f"norm{number}")
        if self.norm_first:
            h = at(f"{name}.norm", norm(at(f"{name}.norm.input", x)))
            x = at(f"{name}.residual", x + branch(h))
        else:
            x = at(f"{name}.norm", norm(at(f"{name}.residual", x + branch(x))))
    return at("block", x)


def reference(model: Any, place: str, change: Any = cure) -> Any:
    forward = decoder_layer if isinstance(model.layers[0], nn.TransformerDecoderLayer) else encoder_layer
    return written_in(model, lambda m: m.layers, forward, At(place, change))


@pytest.mark.parametrize(("norm_first", "batch_first"), ORDERS)
def test_every_place_of_an_encoder(norm_first: bool, batch_first: bool) -> None:
    model, original = encoder(norm_first, batch_first), encoder(norm_first, batch_first)
    x = tokens()
    change = cure if batch_first else sequence_first
    fronts = {"attention.norm.input", "mlp.norm.input"}
    assert fronts.issubset(uc.places(model)) == norm_first
    assert {"attention.residual", "mlp.residual", "final.norm.input", "final.norm"} < set(uc.places(model))
    for place in uc.places(model):
        with uc.attach(model, "contra_norm", at=place, **OPTIONS):
            assert_same(model(x), reference(original, place, change)(x), original(x))
    assert_clean(model)


@pytest.mark.parametrize(("norm_first", "batch_first"), ORDERS)
def test_every_place_of_a_decoder(norm_first: bool, batch_first: bool) -> None:
    model, original = decoder(norm_first, batch_first), decoder(norm_first, batch_first)
    x, memory = tokens(), tokens(2, N, DIM, seed=2)
    change = cure if batch_first else sequence_first
    assert set(uc.places(model)) > DECODER_PLACES
    for place in uc.places(model):
        with uc.attach(model, "contra_norm", at=place, **OPTIONS):
            assert_same(model(x, memory), reference(original, place, change)(x, memory), original(x, memory))
    assert_clean(model)


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_without_a_batch(batch_first: bool) -> None:
    model, original, x = encoder(True, batch_first), encoder(True, batch_first), tokens(N, DIM)
    for place in ("attention.residual", "mlp.output", "block"):
        with uc.attach(model, "contra_norm", at=place, **OPTIONS):
            assert_same(model(x), reference(original, place)(x), original(x))
            masked = reference(original, place, lambda x: cure(x, mask=~PADDING[1]))
            found = model(x, src_key_padding_mask=PADDING[1])
            assert_same(found, masked(x, src_key_padding_mask=PADDING[1]), original(x, src_key_padding_mask=PADDING[1]))


def test_two_looks_of_a_decoder_at_its_stream() -> None:
    """What is changed after self-attention stays in the stream that is changed again after cross-attention."""
    model, original = decoder(), decoder()
    x, memory = tokens(), tokens(seed=2)
    chosen = ("attention.residual", "cross.residual", "cross.norm.input", "block")
    handle = uc.attach(model, "contra_norm", at=chosen, **OPTIONS)
    by_hand = written_in(original, lambda m: m.layers, decoder_layer, At(chosen, cure))
    assert_same(model(x, memory), by_hand(x, memory), original(x, memory))
    handle.remove()
    assert_clean(model)


def test_at_all_norms() -> None:
    x = tokens()
    for norm_first in (True, False):
        model, original = encoder(norm_first), encoder(norm_first)
        by_hand = copy.deepcopy(original)
        for path, module in original.named_modules():
            if isinstance(module, nn.LayerNorm):
                by_hand.set_submodule(path, Cured(module))
        handle = uc.attach(model, "contra_norm", at="norms", **OPTIONS)
        assert len(handle.cures) == 2 * DEPTH + 1
        assert_same(model(x), by_hand.train()(x), original(x))


class Cured(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(cure(x))


def test_parts_of_a_transformer() -> None:
    def build() -> Any:
        return spread(nn.Transformer(DIM, 2, 2, 2, 16, dropout=0.0, batch_first=True, norm_first=True))

    model, original = build(), build()
    x, y = tokens(), tokens(seed=2)
    with pytest.raises(ValueError, match=r"part='encoder'.*part='decoder'"):
        uc.attach(model, "contra_norm", **OPTIONS)
    assert_clean(model)
    for part, place in (
        ("encoder", "attention.residual"),
        ("decoder", "cross.residual"),
        ("decoder", "mlp.norm.input"),
    ):
        by_hand = copy.deepcopy(original)
        setattr(by_hand, part, reference(getattr(original, part), place))
        with uc.attach(model, "contra_norm", part=part, at=place, **OPTIONS):
            assert_same(model(x, y), by_hand(x, y), original(x, y))


def test_the_whole_transformer_with_masks() -> None:
    """The padding of the target is the decoder's, that of the source is not."""
    model = spread(nn.Transformer(DIM, 2, 2, 2, 16, dropout=0.0, batch_first=True))
    original = copy.deepcopy(model)
    by_hand = copy.deepcopy(model)
    by_hand.decoder = reference(model.decoder, "cross.residual", lambda x: cure(x, mask=~PADDING, causal=True))
    source = torch.tensor([[False] * 2 + [True] * 3, [False] * 5])
    masks = {"src_key_padding_mask": source, "memory_key_padding_mask": source, "tgt_key_padding_mask": PADDING}
    x, y = tokens(), tokens(seed=2)
    uc.attach(model, "contra_norm", part="decoder", at="cross.residual", **OPTIONS)
    hidden = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64).isinf()
    run = [m(x, y, tgt_mask=hidden, **masks)[~PADDING] for m in (model, by_hand, original)]
    assert_same(*run)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_padding_does_not_leak(batch_first: bool, kind: str) -> None:
    model, original = encoder(True, batch_first), encoder(True, batch_first)
    padding = PADDING if kind == "bool" else torch.zeros(PADDING.shape).double().masked_fill(PADDING, -torch.inf)
    x = tokens()
    noisy = x + 9 * tokens(seed=3) * PADDING[..., None]
    if not batch_first:
        x, noisy = x.transpose(0, 1), noisy.transpose(0, 1)
    real = ~PADDING if batch_first else ~PADDING.T

    def masked(x: Tensor) -> Tensor:
        layout: Any = "tokens" if batch_first else "sequence_first"
        return from_sets(cure(to_sets(x, layout), mask=~PADDING), x, layout)

    for place in uc.places(model):
        with uc.attach(model, "contra_norm", at=place, **OPTIONS):
            found = model(x, src_key_padding_mask=padding)[real]
            expected = reference(original, place, masked)(x, src_key_padding_mask=padding)[real]
            assert_same(found, expected, original(x, src_key_padding_mask=padding)[real])
            again = model(noisy, src_key_padding_mask=padding)[real]
            torch.testing.assert_close(again, found, atol=1e-10, rtol=1e-8)
            assert (model(x)[real] - found).abs().max() > 1e-3


@pytest.mark.parametrize("given", [{"mask": CAUSAL}, {"mask": CAUSAL, "is_causal": True}, {"mask": CAUSAL.isinf()}])
def test_later_tokens_are_not_seen(given: dict[str, Any]) -> None:
    model, original, x = encoder(), encoder(), tokens()
    later = x.clone()
    later[:, 3:] = tokens(2, 2, DIM, seed=4)
    for place in uc.places(model):
        with uc.attach(model, "contra_norm", at=place, **OPTIONS):
            found = model(x, **given)
            expected = reference(original, place, lambda x: cure(x, causal=True))(x, **given)
            assert_same(found, expected, original(x, **given))
            torch.testing.assert_close(model(later, **given)[:, :3], found[:, :3], atol=1e-10, rtol=1e-8)
            assert (model(later, **given)[:, 3:] - found[:, 3:]).abs().max() > 1e-3


def test_cures_that_read_later_tokens_are_refused() -> None:
    model, x = encoder(), tokens()
    uc.attach(model, "pair_norm")
    model(x)
    with pytest.raises(RuntimeError, match=r"PairNorm at layers.0 takes no causal"):
        model(x, mask=CAUSAL)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_the_fast_path_does_not_pass_by(norm_first: bool, nested: bool) -> None:
    """In evaluation torch runs a layer in one operator, and packs padded batches into nested tensors."""
    model, x = encoder(norm_first, nested=nested), tokens()
    before = model.use_nested_tensor
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=PADDING)
    handle = uc.attach(model, "contra_norm", layers=[0, 2], **OPTIONS)
    slow = model.train()(x, src_key_padding_mask=PADDING)
    with torch.no_grad():
        fast = model.eval()(x, src_key_padding_mask=PADDING)
        unpadded = model(x)
    assert_same(fast[~PADDING], slow[~PADDING], plain[~PADDING])
    assert_same(unpadded, model.train()(x), model.eval()(x, src_key_padding_mask=PADDING))
    handle.remove()
    assert model.use_nested_tensor is before
    assert before is (nested and not norm_first)
    with torch.no_grad():
        assert torch.equal(model.eval()(x, src_key_padding_mask=PADDING), plain)


def test_nested_tensors_stay_off_until_the_last_cure_is_out() -> None:
    model, x = encoder(norm_first=False), tokens()
    first = uc.attach(model, "contra_norm", layers=[0], **OPTIONS)
    second = uc.attach(model, "feat_scale", layers=[1])
    first.remove()
    assert not model.use_nested_tensor
    with torch.no_grad():
        model(x, src_key_padding_mask=PADDING)
    second.remove()
    assert model.use_nested_tensor
    assert_clean(model)


class Mine(nn.Module):
    """Layers of torch in a list, or one of them that runs several times."""

    def __init__(self, layers: list[nn.Module], passes: int = 1) -> None:
        super().__init__()
        self.blocks, self.passes, self.checkpointed = nn.ModuleList(layers), passes, False

    def forward(self, x: Tensor, absent: Tensor | None = None) -> Tensor:
        for _ in range(self.passes):
            for block in self.blocks:
                if self.checkpointed:
                    x = checkpoint(block, x, src_key_padding_mask=absent, use_reentrant=False)
                else:
                    x = block(x, src_key_padding_mask=absent)
        return x


def test_loose_layers() -> None:
    model = spread(Mine([layer() for _ in range(3)]))
    original, x = copy.deepcopy(model), tokens()
    for place in uc.places(model):
        by_hand = written_in(original, lambda m: m.blocks, encoder_layer, At(place, lambda x: cure(x, mask=~PADDING)))
        with uc.attach(model, "contra_norm", at=place, **OPTIONS):
            assert_same(model(x, PADDING)[~PADDING], by_hand(x, PADDING)[~PADDING], original(x, PADDING)[~PADDING])


def test_a_layer_that_runs_several_times() -> None:
    one = layer()
    model = spread(Mine([one, one, one]))
    original = copy.deepcopy(model)
    chosen = [0, 2]
    for place in ("attention.residual", "block", "mlp.norm.input"):
        passes = iter(range(100))

        def some(self: Any, at: At, *args: Any, passes: Any = passes, **kwargs: Any) -> Tensor:
            return encoder_layer(self, at if next(passes) % 3 in chosen else At("", cure), *args, **kwargs)

        by_hand = written_in(original, lambda m: m.blocks[:1], some, At(place, cure))
        with uc.attach(model, "contra_norm", at=place, layers=chosen, **OPTIONS):
            for x in (tokens(), tokens(seed=5)):  # calls are counted anew in each pass of the model
                assert_same(model(x), by_hand(x), original(x))
    assert_clean(model)


def test_checkpointed_layers() -> None:
    """A layer that is computed again in the backward pass knows its padding by its own arguments."""
    model = spread(Mine([layer() for _ in range(3)]))
    again = copy.deepcopy(model)
    again.checkpointed = True
    gradients = []
    for one in (model, again):
        uc.attach(one, "contra_norm", learnable=True, at=["attention.residual", "block"], **OPTIONS)
        first, second = one.train()(tokens(), PADDING), one(tokens(seed=7), PADDING.flip(0))
        (first[~PADDING].square().sum() + second[~PADDING.flip(0)].pow(3).sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in one.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-9, rtol=1e-8)
        assert gradient.abs().max() > 1e-6 or "self_attn.in_proj_bias" in name, name


def test_counted_calls_do_not_go_with_checkpointing() -> None:
    one = layer()
    model = spread(Mine([one, one, one]))
    model.checkpointed = True
    uc.attach(model.train(), "contra_norm", layers=[0], **OPTIONS)
    with pytest.raises(RuntimeError, match=r"blocks.0 runs outside of a forward pass of the model.*checkpointing off"):
        model(tokens().requires_grad_()).sum().backward()


def test_all_passes_of_a_layer_by_default() -> None:
    model = spread(Mine([layer()], passes=3))
    original, x = copy.deepcopy(model), tokens()
    by_hand = written_in(original, lambda m: m.blocks, encoder_layer, At("block", cure))
    uc.attach(model, "contra_norm", at="block", **OPTIONS)
    assert_same(model(x), by_hand(x), original(x))


def test_the_last_norm_counts_no_passes() -> None:
    model = encoder()
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    original, x = copy.deepcopy(model), tokens()
    uc.attach(model, "contra_norm", at="final.norm", layers=[0], **OPTIONS)
    assert_same(model(x), cure(original(x)), original(x))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_several_cures_out_in_any_order(order: tuple[int, ...]) -> None:
    model, original = decoder(), decoder()
    x, memory = tokens(), tokens(seed=2)
    plain = original(x, memory)
    cures = [
        lambda m: uc.attach(m, "contra_norm", at="attention.residual", **OPTIONS),
        lambda m: uc.attach(m, "pair_norm", at="block", layers="last 2"),
        lambda m: uc.attach(m, "contra_norm", at=["cross.residual", "mlp.output"], scale=0.3, axis="features"),
    ]
    handles = [attach(model) for attach in cures]
    for number, gone in enumerate(order, start=1):
        handles[gone].remove()
        alike = copy.deepcopy(original)
        for left in sorted(order[number:]):
            cures[left](alike)
        found = model(x, memory)
        assert torch.equal(found, alike(x, memory))
        assert torch.equal(found, plain) == (number == 3)
    assert_clean(model)
    assert uc.attachments(model) == ()


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [
        (1, (1,)),
        (-1, (2,)),
        ([0, -1], (0, 2)),
        (slice(1, None), (1, 2)),
        ("first 2", (0, 1)),
        ("last 2", (1, 2)),
        ("1:3", (1, 2)),
        (":-1", (0, 1)),
        (range(2), (0, 1)),
        (None, (0, 1, 2)),
        ("all", (0, 1, 2)),
        ("first", (0,)),
        ("last", (2,)),
    ],
)
def test_forms_of_layers(layers: Any, blocks: tuple[int, ...]) -> None:
    model, original, x = encoder(), encoder(), tokens()
    handle = uc.attach(model, "contra_norm", at="mlp.output", layers=layers, **OPTIONS)
    by_hand = written_in(original, lambda m: [m.layers[n] for n in blocks], encoder_layer, At("mlp.output", cure))
    assert handle.blocks == blocks
    assert_same(model(x), by_hand(x), original(x))


@pytest.mark.parametrize("layers", [3, -4, [0, 7], [], "second", "first 9", "middle 2", "a:b", "5:9", 1.5, [1.5], "0"])
def test_wrong_layers_say_what_is_expected(layers: Any) -> None:
    model = encoder()
    with pytest.raises(ValueError, match=r"number from -3 to 2, a list.*got|chooses none of the 3 blocks"):
        uc.attach(model, "contra_norm", layers=layers, **OPTIONS)
    assert_clean(model)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "contra_norm",
            {"at": "attention.nowhere"},
            r"no place 'attention.nowhere'. Did you mean .* There are: block, attention.input,",
        ),
        ("contra_norm", {"at": "attention.context"}, r"no place 'attention.context'.* There are: block"),
        ("contra_norm", {"at": 7}, r"no place with the number 7. There are: block"),
        ("contra_norm", {"at": []}, r"at must name at least one place. There are: block"),
        ("contra_norm", {"at": 1.5}, r"at must be.*1.5"),
        ("contra_norm", {"strength": 2}, r"does not take 'strength'. Its options are: dim, scale,"),
        ("contra_norm", {"scale": "much"}, r"contra_norm at layers.0.norm2: scale must be a finite number, got 'much'"),
        ("contra_norm", {"preset": "best"}, r"no preset 'best'\. Did you mean 'bert'\? There are: bert,"),
        ("pair_norm", {"mode": "XX"}, r"mode must be 'PN'"),
        ("contra_norm", {"tokens": "some"}, r'tokens must be "all" or "patches"'),
        ("attn_scale", {}, r"needs the values of attention"),
        ("drop_edge", {}, r"takes no edge_index"),
    ],
)
def test_mistakes_leave_nothing_behind(name: str, options: dict[str, Any], words: str) -> None:
    model = encoder()
    given = {**({"scale": 0.5} if name == "contra_norm" else {}), **options}
    with pytest.raises(ValueError, match=words):
        uc.attach(model, name, **given)
    assert_clean(model)
    assert uc.attachments(model) == ()


def test_unknown_and_unready_cures() -> None:
    model = encoder()
    with pytest.raises(KeyError, match=r"No cure is named 'contranorm'.*Did you mean 'contra_norm'.*pair_norm"):
        uc.attach(model, "contranorm", scale=0.1)
    with pytest.raises(ValueError, match=r"needs 'scale'. Its options are: dim, scale"):
        uc.attach(model, "contra_norm")
    with pytest.raises(ValueError, match=r"name of a registered cure, got PairNorm"):
        uc.attach(model, uc.PairNorm())  # type: ignore[arg-type]
    assert_clean(model)


@pytest.mark.parametrize("name", ["pair_norm", "feat_scale", "contra_norm"])
def test_other_cures(name: str) -> None:
    model, original, x = encoder(False, False), encoder(False, False), tokens()
    options = {"contra_norm": {"scale": 0.3, "axis": "features"}, "pair_norm": {"mode": "SI"}}.get(name, {})
    handle = uc.attach(model, name, at="attention.residual", **options)
    for one in handle.cures.values():
        for parameter in one.parameters():
            nn.init.constant_(parameter, 0.25)
        if name == "feat_scale":
            nn.init.constant_(one.high, 0.75)
    by_hand = {
        "contra_norm": lambda x, mask: uc.contra_norm(x, 0.3, axis="features", mask=mask),
        "pair_norm": lambda x, mask: uc.pair_norm(x, mode="SI", mask=mask),
        "feat_scale": lambda x, mask: uc.feat_scale(x, 0.25, 0.75, mask=mask),
    }[name]
    for padding in (None, PADDING):
        mask = None if padding is None else ~padding

        def change(x: Tensor, mask: Any = mask) -> Tensor:
            return by_hand(x.transpose(0, 1), mask).transpose(0, 1)

        expected = reference(original, "attention.residual", change)(x.transpose(0, 1), src_key_padding_mask=padding)
        found, plain = (m(x.transpose(0, 1), src_key_padding_mask=padding) for m in (model, original))
        assert_same(found, expected, plain)
