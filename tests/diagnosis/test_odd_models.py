"""Hand-written models with unusual modules: right numbers, or an error that says what to do; never a silent guess."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import uncollapse as uc

PLAN = uc.Plan(baseline=0, rank_samples=8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return x + self.linear(self.norm(x))


class MapFirst(Block):
    """It returns an attention map before its tokens."""

    def forward(self, x: Tensor) -> Any:
        return x.new_zeros(len(x), 2, x.shape[1], x.shape[1]), super().forward(x)


class Order(nn.Module):
    """Its blocks run in this order; those that are not in it never run."""

    def __init__(self, *order: int, kind: type[Block] = Block) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList(kind() for _ in range(3)), order

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            out = self.blocks[number](x)
            x = out[1] if isinstance(out, tuple) else out
        return x


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed: Any = pack_padded_sequence(x, lengths, batch_first=True)
        for layer in self.layers:
            packed = layer(packed)[0]
        return pad_packed_sequence(packed, batch_first=True)[0]


PADDED = {"x": torch.randn(4, 7, 16), "lengths": torch.tensor([7, 5, 3, 2])}


def test_rows_of_packed_sequences_are_not_taken_for_one_sequence() -> None:
    model = Packed().eval()
    with pytest.raises(ValueError, match="padded batches"):
        uc.diagnose(model, [PADDED], plan=PLAN)
    with pytest.raises(ValueError, match="padded batches"), uc.tokens(model, layers=["last"]):
        model(**PADDED)
    with uc.attach(model, "contra_norm", scale=0.1, causal=True), pytest.raises(ValueError, match="padded batches"):
        model(**PADDED)


def test_a_nested_tensor_is_refused_with_the_remedy() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    ragged = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with pytest.raises(ValueError, match="padded batches"):
        uc.diagnose(nn.TransformerEncoder(layer, 2).eval(), [ragged], plan=PLAN)


def test_a_torchscript_module_is_refused_with_the_remedy() -> None:
    x = torch.randn(4, 7, 16)
    with pytest.raises(ValueError, match="scripted"):
        uc.diagnose(torch.jit.trace(Order(0, 1, 2).eval(), x), [x], plan=PLAN)  # type: ignore[no-untyped-call]


def test_what_enters_a_block_in_the_middle_is_not_the_embedding() -> None:
    layers = uc.diagnose(Order(2, 1, 0).eval(), [torch.randn(4, 7, 16)], plan=PLAN).layers
    assert [layer.name for layer in layers] == ["blocks.2", "blocks.1", "blocks.0"]


def test_a_block_that_never_runs_is_named() -> None:
    d = uc.diagnose(Order(0, 2).eval(), [torch.randn(4, 7, 16)], plan=PLAN)
    assert [layer.name for layer in d.layers] == ["embed", "blocks.0", "blocks.2"]
    assert any("did not run" in caution and "blocks.1" in caution for caution in d.verdict.cautions)


def test_an_attention_map_before_the_tokens_is_passed_over() -> None:
    model, x = Order(0, 1, 2, kind=MapFirst).eval(), torch.randn(4, 7, 16)
    assert {(layer.tokens, layer.dim) for layer in uc.diagnose(model, [x], plan=PLAN).layers} == {(28, 16)}
    plain = model(x)
    with uc.attach(model, "contra_norm", scale=0.3, at="block", causal=False):
        assert not torch.allclose(model(x), plain)
    assert torch.equal(model(x), plain)
