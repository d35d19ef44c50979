"""Encoders and decoders of torch itself: places, layouts, masks, attention maps, nesting, random twins."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from uncollapse import backbones
from uncollapse.backbones import torch as torch_backbone
from uncollapse.backbones.sites import sets_with_mask

from .reading import context, places, read_all, record

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")
DIM, DEPTH = 8, 3
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


def layer(kind: Any = nn.TransformerEncoderLayer, *, norm_first: bool = False, batch_first: bool = True) -> nn.Module:
    return kind(DIM, 2, 16, dropout=0.3, norm_first=norm_first, batch_first=batch_first)


def encoder(*, norm: bool = True, depth: int = DEPTH, **options: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(layer(**options), depth, norm=nn.LayerNorm(DIM) if norm else None)
    for parameter in model.parameters():  # torch copies one layer; and a norm that changes nothing would hide mistakes
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def decoder(**options: bool) -> nn.TransformerDecoder:
    torch.manual_seed(0)
    model = nn.TransformerDecoder(layer(nn.TransformerDecoderLayer, **options), DEPTH)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


class Loose(nn.Module):
    """Layers in a list, with a mask under a name of its own."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor, absent: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, src_key_padding_mask=absent)
        return x


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_places(norm_first: bool, batch_first: bool) -> None:
    model = encoder(norm_first=norm_first, batch_first=batch_first)
    stack = backbones.find(model)
    x = torch.randn(4, 5, DIM)
    seen = read_all(model, stack, x)
    assert [b.name for b in stack.blocks] == ["block 0", "block 1", "block 2"]
    assert (stack.path, stack.family, stack.architecture) == ("", "torch", "TransformerEncoder")
    assert stack.layout == ("tokens" if batch_first else "sequence_first")
    stream = x
    for number, part in enumerate(model.layers):
        at = {place: seen[number, place] for place in stack.places()}
        torch.testing.assert_close(at["attention.input"], stream)
        torch.testing.assert_close(at["block"], part(stream))
        torch.testing.assert_close(at["attention.residual"], at["attention.input"] + at["attention.output"])
        if norm_first:
            torch.testing.assert_close(at["attention.norm"], part.norm1(stream))
            torch.testing.assert_close(at["mlp.norm"], part.norm2(at["attention.residual"]))
            torch.testing.assert_close(at["mlp.residual"], at["attention.residual"] + at["mlp.output"])
            torch.testing.assert_close(at["mlp.residual"], at["block"])
        else:
            torch.testing.assert_close(at["attention.norm"], part.norm1(at["attention.residual"]))
            torch.testing.assert_close(at["mlp.residual"], at["attention.norm"] + at["mlp.output"])
            torch.testing.assert_close(at["mlp.norm"], part.norm2(at["mlp.residual"]))
            torch.testing.assert_close(at["mlp.norm"], at["block"])
        stream = part(stream)
    final = record(model, {"final": stack.final, "embed": stack.embed}, x)
    torch.testing.assert_close(final["final"][0], model(x))
    torch.testing.assert_close(final["embed"][0], x)


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_places(norm_first: bool) -> None:
    model = decoder(norm_first=norm_first)
    stack = backbones.find(model)
    x, memory = torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)
    seen = read_all(model, stack, x, memory)
    stream = x
    for number, part in enumerate(model.layers):
        at = {place: seen[number, place] for place in stack.places()}
        torch.testing.assert_close(at["block"], part(stream, memory))
        torch.testing.assert_close(at["attention.residual"], stream + at["attention.output"])
        before_cross = at["attention.residual"] if norm_first else at["attention.norm"]
        torch.testing.assert_close(at["cross.residual"], before_cross + at["cross.output"])
        before_mlp = at["cross.residual"] if norm_first else at["cross.norm"]
        torch.testing.assert_close(at["mlp.residual"], before_mlp + at["mlp.output"])
        torch.testing.assert_close(at["block"], at["mlp.residual"] if norm_first else at["mlp.norm"])
        stream = part(stream, memory)


def test_transformer_has_two_parts() -> None:
    model = nn.Transformer(DIM, 2, 2, 3, 16, batch_first=True).eval()
    with pytest.raises(ValueError, match=r"part='encoder'.*part='decoder'"):
        backbones.find(model)
    stack = backbones.find(model, part="decoder")
    assert len(stack.blocks) == 3
    x, y = torch.randn(2, 4, DIM), torch.randn(2, 5, DIM)
    seen = record(model, {"embed": stack.embed, "final": stack.final}, x, y)
    torch.testing.assert_close(seen["embed"][0], y)
    torch.testing.assert_close(seen["final"][0], model(x, y))
    with_masks = context(model, stack, x, y, tgt_key_padding_mask=PADDING, tgt_mask=CAUSAL.isinf())
    assert torch.equal(with_masks.mask, ~PADDING)
    assert with_masks.causal


@pytest.mark.parametrize("style", ["keyword", "positional", "float", "large"])
def test_padding_is_inverted(style: str) -> None:
    model = encoder()
    stack = backbones.find(model)
    x = torch.randn(2, 5, DIM)
    lowest = float("-inf") if style == "float" else -1e9
    biases = torch.linspace(-3, 3, 10).reshape(2, 5)  # added to the logits of real tokens
    mask = biases.masked_fill(PADDING, lowest) if style in ("float", "large") else PADDING
    args, kwargs = ((x, None, mask), {}) if style == "positional" else ((x,), {"src_key_padding_mask": mask})
    found = context(model, stack, *args, **kwargs)
    assert torch.equal(found.mask, ~PADDING)
    assert found.mask.dtype == torch.bool
    assert not found.causal


@pytest.mark.parametrize("batch_first", [True, False])
def test_padded_batches_run_step_by_step_under_hooks(batch_first: bool) -> None:
    """Without `running` the encoder packs them into a nested tensor, and the places within see nothing."""
    model = encoder(batch_first=batch_first, norm=False)
    stack = backbones.find(model)
    x = torch.randn(2, 5, DIM)
    x = x if batch_first else x.transpose(0, 1)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=PADDING)
    seen = read_all(model, stack, x, src_key_padding_mask=PADDING)
    found = context(model, stack, x, src_key_padding_mask=PADDING)
    sets, mask = sets_with_mask(seen[DEPTH - 1, "block"], stack.layout, found)
    reference = expected if batch_first else expected.transpose(0, 1)
    assert torch.equal(mask, ~PADDING)
    torch.testing.assert_close(sets[mask], reference[mask])


def test_fast_path_is_restored() -> None:
    model = encoder()
    stack = backbones.find(model)
    with stack.under_hooks(model):
        assert not torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError, match="within"), stack.under_hooks(model):
        raise RuntimeError("within")
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with stack.under_hooks(model):
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("mask", [CAUSAL, CAUSAL.isinf(), CAUSAL.expand(4, 5, 5)], ids=["float", "bool", "heads"])
def test_causal_masks_are_seen(mask: Tensor) -> None:
    model = encoder()
    stack = backbones.find(model)
    x = torch.randn(2, 5, DIM)
    assert context(model, stack, x, mask=mask).causal
    assert context(model, stack, x, mask, is_causal=mask.dim() == 2).causal
    window = (torch.arange(5)[:, None] - torch.arange(5)).abs() > 1
    assert not context(model, stack, x, mask=window).causal
    assert not context(model, stack, x).causal


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_maps(batch_first: bool, causal: bool) -> None:
    model = encoder(batch_first=batch_first)
    stack = backbones.find(model)
    x = torch.randn(2, 5, DIM) if batch_first else torch.randn(5, 2, DIM)
    options = {"mask": CAUSAL, "is_causal": True} if causal else {"src_key_padding_mask": PADDING}
    with torch.no_grad(), stack.under_hooks(model):
        expected = model(x, **options)
        sites = {n: block.attention for n, block in enumerate(stack.blocks)}
        with stack.expose_attention(model):
            maps = record(model, sites, x, **options)
            torch.testing.assert_close(model(x, **options), expected, atol=1e-5, rtol=0)
        assert record(model, sites, x, **options)[0] == []  # hidden again
    hidden = CAUSAL.isinf()[None, None] if causal else PADDING[:, None, None]
    for number, part in enumerate(model.layers):
        attention = maps[number][0]
        assert attention.shape == (2, 2, 5, 5)
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 2, 5))
        assert attention.masked_select(hidden.expand_as(attention)).abs().max() == 0
        assert not part.self_attn._forward_pre_hooks


def test_attention_hooks_come_out_after_an_error() -> None:
    model = decoder()
    stack = backbones.find(model)
    with pytest.raises(RuntimeError, match="within"), stack.expose_attention(model):
        raise RuntimeError("within")
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_layers_in_a_list_tell_their_masks() -> None:
    model = Loose([layer(norm_first=True) for _ in range(DEPTH)]).eval()
    stack = backbones.find(model)
    assert (stack.path, stack.architecture, len(stack.blocks)) == ("", "Loose", DEPTH)
    x = torch.randn(2, 5, DIM)
    assert torch.equal(context(model, stack, x, PADDING).mask, ~PADDING)
    seen = read_all(model, stack, x, PADDING)
    torch.testing.assert_close(seen[DEPTH - 1, "block"], model(x, PADDING))
    torch.testing.assert_close(seen[1, "attention.input"], seen[0, "block"])


@pytest.mark.parametrize("inner", ["encoder", "sequential", "list"])
def test_nested_in_a_model_of_ones_own(inner: str) -> None:
    layers = [layer() for _ in range(2)]
    inside = {"encoder": encoder(depth=2), "sequential": nn.Sequential(*layers), "list": Loose(layers)}[inner]
    model = Wrapper(inside).eval()
    stack = backbones.find(model)
    assert stack.path == "inner.1"
    x = torch.randn(2, 5, DIM)
    seen = read_all(model, stack, x)
    stream = model.inner[0](x)
    for number, block in enumerate(stack.blocks):
        stream = model.get_submodule(block.places["block"].path)(stream)
        torch.testing.assert_close(seen[number, "block"], stream)


def test_layer_that_stands_in_several_places() -> None:
    shared = layer()
    model = Loose([shared, layer(), shared]).eval()
    stack = backbones.find(model)
    assert [(b.places["block"].path, b.call) for b in stack.blocks] == [
        ("blocks.0", 0),
        ("blocks.1", 0),
        ("blocks.0", 1),
    ]
    x = torch.randn(2, 5, DIM)
    seen = record(model, places(stack), x)
    torch.testing.assert_close(seen[2, "block"][stack.blocks[2].call], model(x))


def test_pattern_of_an_encoder_is_no_stack() -> None:
    model = nn.Module()
    model.pattern = layer()
    model.encoder = nn.TransformerEncoder(model.pattern, 2)
    assert backbones.find(model).path == "encoder"
    alone = nn.Module()
    alone.layer1, alone.layer2 = layer(), layer()
    alone.first = alone.layer1
    assert [b.places["block"].path for b in backbones.find(alone).blocks] == ["layer1", "layer2"]


def test_layers_with_steps_of_their_own_have_only_sure_places() -> None:
    class Changed(nn.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(Changed(DIM, 2, batch_first=True), Changed(DIM, 2, batch_first=True))
    assert backbones.find(model).places() == ("block", "attention.input")


def test_two_lists_in_one_module_are_told_apart() -> None:
    model = nn.Module()
    model.text, model.image = (nn.ModuleList([layer() for _ in range(n)]) for n in (2, 3))
    with pytest.raises(ValueError, match=r"part='text'.*part='image'"):
        backbones.find(model)
    assert len(backbones.find(model, part="image").blocks) == 3


def test_unbatched_sequences() -> None:
    model = encoder(batch_first=False)
    stack = backbones.find(model)
    x = torch.randn(5, DIM)
    found = context(model, stack, x, src_key_padding_mask=PADDING[1])
    sets, mask = sets_with_mask(read_all(model, stack, x)[0, "block"], stack.layout, found)
    assert sets.shape == (1, 5, DIM)
    assert torch.equal(mask, ~PADDING[1:])


@pytest.mark.parametrize("build", [encoder, decoder, lambda: nn.Transformer(DIM, 2, 2, 2, 16, batch_first=True)])
def test_random_twin(build: Any) -> None:
    model = build()
    stack = torch_backbone.stacks(model)[0]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    twin = stack.reinitialize(model)
    again = stack.reinitialize(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for key, value in twin.state_dict().items():
        assert value.shape == before[key].shape
        assert torch.equal(value, again.state_dict()[key])
        assert value.dim() < 2 or not torch.allclose(value, before[key])
    layers = torch_backbone.stacks(twin)[0].blocks
    weights = [twin.get_submodule(b.places["block"].path).linear1.weight for b in layers]
    assert not torch.allclose(weights[0], weights[1])  # every layer is drawn by itself
    assert twin.training == model.training


def test_transformer_begins_as_torch_would_have_it() -> None:
    twin = torch_backbone.stacks(nn.Transformer(64, 2, 1, 1, 128))[0].reinitialize(nn.Transformer(64, 2, 1, 1, 128))
    bound = (6 / (64 + 128)) ** 0.5  # xavier, where nn.Linear by itself has 1/√64
    largest = float(twin.encoder.layers[0].linear1.weight.detach().abs().max())
    assert 0.99 * bound < largest <= bound


def test_model_with_parameters_that_nobody_draws_has_no_twin() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(5, DIM))
            self.layers = nn.ModuleList([layer(), layer()])

    model = Positions()
    with pytest.raises(ValueError, match="initialize positions"):
        backbones.find(model).reinitialize(model)
    assert torch.equal(model.positions, torch.zeros(5, DIM))
