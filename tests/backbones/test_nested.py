"""Tokens in what modules return: dataclasses, model outputs and other containers; nothing is passed over."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.backbones.nested import describe, find_tensor, get_nested, set_nested
from uncollapse.backbones.sites import is_tokens

PLAN = uc.Plan(baseline=0)


@dataclass
class Plain:
    note: str
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    steps: Tensor
    tokens: Tensor
    count: int = field(init=False, default=3)


@dataclass
class Hidden:
    """The first tensor is not what a reader wants."""

    scores: Tensor
    hidden_states: Tensor


@dataclass
class Nested:
    inner: Plain


def model_output(x: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(pooler_output=x.mean(1), last_hidden_state=x)


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {  # wrap, unwrap
    "dataclass": (lambda x: Plain("a note", x), lambda y: y.tokens),
    "frozen": (lambda x: Frozen(torch.arange(3), x), lambda y: y.tokens),
    "hidden states": (lambda x: Hidden(torch.zeros(2, 4), x), lambda y: y.hidden_states),
    "nested": (lambda x: Nested(Plain("a note", x)), lambda y: y.inner.tokens),
    "in a tuple": (lambda x: (None, Plain("a note", x)), lambda y: y[1].tokens),
    "pooled first": (lambda x: {"pooled": x.mean(1), "last_hidden_state": x}, lambda y: y["last_hidden_state"]),
    "model output": (model_output, lambda y: y.last_hidden_state),
}


class Layer(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.lin, self.wrap = nn.Linear(8, 8), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.lin(x).tanh() + x)


class Layers(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.blocks, self.unwrap = nn.ModuleList(Layer(wrap) for _ in range(3)), unwrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.unwrap(block(x))
        return x


def model_and_input(form: str) -> tuple[Layers, Tensor]:
    torch.manual_seed(0)
    return Layers(*FORMS[form]), torch.randn(4, 16, 8)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_are_read_from_their_fields(form: str) -> None:
    model, x = model_and_input(form)
    diagnosis = uc.diagnose(model, [x], modules="blocks.*", plan=PLAN)
    assert [layer.name for layer in diagnosis.layers] == ["embed", "blocks.0", "blocks.1", "blocks.2"]
    for layer in diagnosis.layers:
        unit = nn.functional.normalize(x.double(), dim=-1)
        assert layer["mean_cosine"] == pytest.approx(float(((unit @ unit.mT).sum() / 4 - 16) / (16 * 15)), rel=1e-5)
        with torch.no_grad():
            x = model.unwrap(model.blocks[min(2, diagnosis.layers.index(layer))](x))


@pytest.mark.parametrize("form", FORMS)
def test_tokens_and_cures_reach_the_fields(form: str) -> None:
    model, x = model_and_input(form)
    with uc.tokens(model, ("first", "last"), modules="blocks.*") as t:
        out = model(x)
        assert torch.equal(t["last"], out)
        assert t["first"].shape == x.shape
    expected = x
    for block in model.blocks:
        expected = uc.contra_norm(model.unwrap(block(expected)), 0.5)
    with uc.attach(model, "contra_norm", scale=0.5, modules="blocks.*", causal=False):
        torch.testing.assert_close(model(x), expected)
        assert type(model.blocks[0](x)) is type(FORMS[form][0](x))
    assert torch.equal(model(x), out)


RETURNED: dict[str, tuple[Any, str]] = {
    "object": (lambda x: SimpleNamespace(tokens=x), r"SimpleNamespace with tokens \(a tensor \(4, 16, 8\)"),
    "numbers": (lambda x: Plain("a note", x.argmax(-1)), r"Plain with note \(str\), tokens \(.*int64"),
    "nothing": (lambda x: None, "NoneType"),
}


@pytest.mark.parametrize("form", RETURNED)
def test_a_named_block_without_tokens_is_an_error(form: str) -> None:
    """Even where other blocks have tokens: the verdict would be about these alone."""
    wrap, words = RETURNED[form]
    model = nn.Sequential(nn.Linear(8, 8), Layer(wrap))
    x = torch.randn(4, 16, 8)
    with pytest.raises(ValueError, match=rf"returned.*{words}"):
        uc.diagnose(model, [x], modules=["0", "1"], plan=PLAN)
    with uc.tokens(model, "last", modules=["0", "1"]), pytest.raises(ValueError, match=words):
        model(x)
    if form != "nothing":
        with uc.attach(model, "contra_norm", scale=0.5, modules="1"), pytest.raises(RuntimeError, match=words):
            model(x)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_named_block_that_does_not_run_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    with pytest.raises(ValueError, match="ran: 0"):
        uc.diagnose(
            model,
            [torch.randn(4, 16, 8)],
            modules=["0", "1"],
            call=lambda model, x: model.get_submodule("0")(x),
            plan=PLAN,
        )


def test_ids_may_enter_the_first_block() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8))
    ids = torch.randint(9, (4, 16), generator=torch.Generator().manual_seed(0))
    assert [layer.name for layer in uc.diagnose(model, [ids], modules="*", plan=PLAN).layers] == ["0", "1"]


def test_a_copy_is_changed() -> None:
    x, new = torch.randn(2, 3, 4), torch.zeros(2, 3, 4)
    for value in (Frozen(torch.arange(3), x), Nested(Plain("", x)), [Plain("", x)], {"a": (x,)}):
        keys = find_tensor(value, is_tokens)
        assert keys is not None
        changed = set_nested(value, keys, new)
        assert get_nested(changed, keys) is new
        assert get_nested(value, keys) is x
        assert type(changed) is type(value)


def test_lists_of_all_hidden_states_do_not_come_first() -> None:
    every, logits = (torch.zeros(2, 3, 4),) * 2, torch.ones(2, 3, 9)
    assert find_tensor({"logits": logits, "hidden_states": every}, is_tokens) == ("logits",)


def test_classes_and_other_objects_are_not_searched() -> None:
    assert find_tensor(Plain, is_tokens) is None
    assert find_tensor(copy.copy(SimpleNamespace(x=torch.zeros(2, 2))), is_tokens) is None


def test_descriptions() -> None:
    assert describe(torch.zeros(2, 3)) == "a tensor (2, 3) of float32"
    assert describe(()) == "an empty tuple"
    assert describe((None, torch.zeros(1))) == "a tuple of 2: a NoneType, a tensor (1,) of float32"
