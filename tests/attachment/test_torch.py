"""Layers of torch: the fast path, loose layers, layers that run several times, gradient checkpointing."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import uncollapse as uc

from .by_hand import BY_NAME, PADDING, SCALE, TOKENS, assert_clean, assert_same, by_hand, change

PRE = BY_NAME["encoder-pre-batch-first"]
POST = BY_NAME["encoder-post-batch-first"]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("case", [PRE, POST], ids=str)
def test_the_fast_path_does_not_bypass_the_cure(case: Any, nested: bool) -> None:
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
    first.remove()
    assert not model.use_nested_tensor
    POST.run(model)
    second.remove()
    assert model.use_nested_tensor
    assert_clean(model)


class Mine(nn.Module):
    """Layers of torch in a list, that may run several times."""

    def __init__(self, layers: nn.ModuleList, passes: int = 1) -> None:
        super().__init__()
        self.layers, self.passes, self.checkpointed = layers, passes, False

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        for _ in range(self.passes):
            for layer in self.layers:
                if self.checkpointed:
                    src = checkpoint(layer, src, src_key_padding_mask=src_key_padding_mask, use_reentrant=False)
                else:
                    src = layer(src, src_key_padding_mask=src_key_padding_mask)
        return src


@pytest.mark.parametrize("passes", [1, 2])
def test_loose_layers(passes: int) -> None:
    """All passes by default; the mask is known to the layers only."""
    model = Mine(PRE.model().layers, passes)
    plain = PRE.run(model)
    assert set(uc.places(model)) == set(PRE.places)
    for place in ("attention.norm", "attention.residual", "mlp.residual", "block"):
        expected = PRE.run(by_hand(PRE, place, model=model))
        with uc.attach(model, "contra_norm", at=place, scale=SCALE):
            assert_same(PRE.run(model), expected, plain)
    assert_clean(model)


def test_checkpointed_layers() -> None:
    """A layer that is recomputed in the backward pass knows its padding by its own arguments."""
    model = Mine(PRE.model().layers)
    again = copy.deepcopy(model)
    again.checkpointed = True
    gradients = []
    for one in (model, again):
        uc.attach(one, "contra_norm", learnable=True, at=["attention.residual", "block"], scale=SCALE)
        first, second = one.train()(TOKENS, PADDING), one(TOKENS.flip(1), PADDING.flip(0))
        (first[~PADDING].square().sum() + second[~PADDING.flip(0)].pow(3).sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in one.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-9, rtol=1e-8)
        assert gradient.abs().max() > 1e-6 or "self_attn.in_proj_bias" in name, name


def test_counted_calls_do_not_go_with_checkpointing() -> None:
    model = Mine(nn.ModuleList([PRE.model().layers[0]] * 3))
    model.checkpointed = True
    uc.attach(model.train(), "contra_norm", layers=[0], scale=SCALE)
    with pytest.raises(RuntimeError, match=r"layers.0 runs outside .*checkpointing off"):
        model(TOKENS.clone().requires_grad_()).sum().backward()


def test_two_reads_of_the_stream_of_a_decoder() -> None:
    """What is changed after self-attention stays in the stream that is changed again after cross-attention."""
    case = BY_NAME["decoder-pre-batch-first"]
    model, places = case.model(), ("attention.residual", "cross.residual", "cross.norm.input", "block")
    plain = case.run(model)
    handle = uc.attach(model, "contra_norm", at=places, scale=SCALE)
    assert_same(case.run(model), case.run(by_hand(case, *places)), plain)
    handle.remove()
    assert_clean(model)


def test_a_mask_by_keyword_before_the_tokens_is_not_mistaken_for_them() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 24, batch_first=True, dropout=0.0).eval()
    x, mask = torch.randn(1, 8, 8), torch.zeros(8, 8)
    uc.attach(layer, "contra_norm", scale=0.5, at="attention.input")
    torch.testing.assert_close(layer(src_mask=mask, src=x), layer(x))


MISTAKES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("contra_norm", {"at": "attention.nowhere"}, r"Did you mean .* There are: block, attention.input,"),
    ("contra_norm", {"at": "attention.context"}, "no place 'attention.context'"),
    ("contra_norm", {"at": 7}, "number 7"),
    ("contra_norm", {"at": []}, "at least one place"),
    ("contra_norm", {"layers": 3}, "from -3 to 2"),
    ("contra_norm", {"layers": "embed"}, "not a block"),
    ("contra_norm", {"layers": "final"}, "not a block"),
    ("contra_norm", {"strength": 2}, "'strength'. Its options are: dim, scale,"),
    ("contra_norm", {"scale": "much"}, r"layers.0.norm2: scale"),
    ("contra_norm", {"preset": "best"}, r"Did you mean 'bert'\? There are: bert,"),
    ("contra_norm", {"scale": None}, "scale"),
    ("contra_norm", {"tokens": "some"}, "tokens"),
    ("pair_norm", {"mode": "XX"}, "mode"),
    ("attn_scale", {}, "values of attention"),
    ("attn_scale", {"at": "block"}, "its place is 'attention.context'"),
    ("drop_edge", {}, "edge_index"),
    ("drop_edge", {"layers": 1}, "layers"),
)


@pytest.mark.parametrize(("cure", "options", "words"), MISTAKES)
def test_mistakes_leave_nothing_behind(cure: str, options: dict[str, Any], words: str) -> None:
    model = PRE.model()
    with pytest.raises(ValueError, match=words):
        uc.attach(model, cure, **{**({"scale": 0.5} if cure == "contra_norm" else {}), **options})
    assert_clean(model)


def test_unknown_and_unready_cures() -> None:
    model = PRE.model()
    with pytest.raises(KeyError, match="Did you mean 'contra_norm'"):
        uc.attach(model, "contranorm", scale=0.1)
    with pytest.raises(ValueError, match="needs 'scale'"):
        uc.attach(model, "contra_norm")
    with pytest.raises(ValueError, match="got PairNorm"):
        uc.attach(model, uc.PairNorm())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got dict"):
        uc.attach({}, "contra_norm", scale=0.1)  # type: ignore[arg-type]
    assert_clean(model)


def test_the_layers_that_were_asked_for() -> None:
    """The grammar is that of `select_layers`; here its answer reaches the blocks."""
    model = PRE.model()
    plain = PRE.run(model)
    for layers, blocks in (("last 2", (1, 2)), ([0, -1], (0, 2)), (slice(1), (0,)), ("block 1", (1,))):
        with uc.attach(model, "contra_norm", at="mlp.output", layers=layers, scale=SCALE) as handle:
            assert handle.blocks == blocks
            assert len(handle.cures) == len(blocks)
            expected = by_hand(PRE, where={"mlp.output": blocks}, new=change(PRE))
            assert_same(PRE.run(model), PRE.run(expected), plain)
