"""Cures in any module, by the names of its layers: layouts, forms of outputs, masks, containers, decoders."""

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc

from .by_hand import assert_clean, assert_same

OPTIONS = {"scale": 0.5, "temperature": 0.7}
BOTH_WAYS = {**OPTIONS, "causal": False}  # the layers below do not mix tokens, so nothing shows it
MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
EDGES, GRAPHS = torch.tensor([[0, 1, 4], [1, 2, 5]]), torch.tensor([0, 0, 0, 0, 1, 1, 1])


def cure(x: Tensor, **context: Any) -> Tensor:
    return uc.contra_norm(x, **OPTIONS, **context)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 5, 8)), generator=generator, dtype=torch.float64)


def spread(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


class Pair(NamedTuple):
    tokens: Tensor
    note: str


FORMS: dict[str, Any] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (torch.zeros(3, dtype=torch.long), x, None),
    "list": lambda x: [x, "more"],
    "dict": lambda x: {"ids": torch.zeros(2), "hidden": x},
    "ordered": lambda x: OrderedDict(hidden=x, more=1),
    "named": lambda x: Pair(x, "note"),
    "nested": lambda x: {"out": (x, 1)},
}


class Layer(nn.Module):
    """Tokens in, and out in a form of its own."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.lin, self.form = nn.Linear(8, 8), form

    def forward(self, x: Tensor) -> Any:
        return FORMS[self.form](self.lin(x).tanh() + x)


def unpacked(out: Any) -> Tensor:
    match out:
        case Tensor():
            return out
        case Pair(x, "note") | {"hidden": x} | {"out": (x, 1)} | [x, "more"] | (_, x, None):
            return x
    raise AssertionError(type(out))


class Stack(nn.Module):
    """Layers one after the other; what it is given beside tokens, they are not."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)
        self.before: Any = lambda number, x: x
        self.after: Any = lambda number, x: x

    def run(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.after(number, unpacked(block(self.before(number, x))))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def taking(name: str) -> type[Stack]:
    """Return a stack whose forward pass takes another argument of this name, which its layers do not get."""
    scope: dict[str, Any] = {}
    exec(f"def forward(self, x, {name}=None):\n    return self.run(x)", scope)  # its signature is read
    return type(name, (Stack,), {"forward": scope["forward"]})


class Net(Stack):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:  # type: ignore[override]
        return self.run(x)


def stack(kind: Any = Stack, form: str = "tensor", count: int = 3) -> Any:
    return spread(kind([Layer(form) for _ in range(count)]))


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))


def check(model: Any, change: Any, *args: Any, at: str = "block", layers: Any = None, **options: Any) -> Any:
    """Attach to `blocks.*` and compare with the cure written in by hand; the handle."""
    original, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    chosen = range(len(model.blocks)) if layers is None else layers
    setattr(by_hand, "before" if at == "input" else "after", lambda n, x: change(x) if n in chosen else x)
    handle = uc.attach(model, "contra_norm", modules=["blocks.*"], at=at, layers=layers, **BOTH_WAYS, **options)
    assert_same(model(*args), by_hand(*args), original(*args))
    return handle


@pytest.mark.parametrize("at", ["block", "input"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_outputs(form: str, at: str) -> None:
    model = stack(form=form)
    assert uc.places(model, modules=["blocks.*"]) == ("block", "input")
    handle = check(model, cure, tokens(), at=at)
    kinds = [type(block(tokens())) for block in model.blocks]
    handle.remove()
    assert kinds == [type(block(tokens())) for block in model.blocks]
    assert_clean(model)


def pixels(x: Tensor) -> Tensor:
    return cure(x.flatten(2).mT).mT.reshape(x.shape)


def convolved() -> Any:
    return spread(Stack([nn.Conv2d(3 if n == 0 else 6, 6, 3, padding=1) for n in range(3)]))


SETS: dict[str, tuple[Any, ...]] = {  # model, change, arguments, options
    "some layers": (stack, cure, [tokens()], {"layers": [0, 2]}),
    "vectors": (stack, cure, [tokens(6, 8)], {}),
    "sequence first": (
        *(stack, lambda x: cure(x.transpose(0, 1)).transpose(0, 1), [tokens(5, 2, 8)]),
        {"layout": "sequence_first"},
    ),
    "channels": (convolved, pixels, [tokens(2, 3, 4, 4)], {}),
    "channels first": (convolved, pixels, [tokens(2, 3, 4, 4)], {"layout": "channels_first"}),
    "graphs": (
        *(lambda: stack(Net), lambda x: cure(x, edge_index=EDGES, batch=GRAPHS)),
        *([tokens(7, 8), EDGES, GRAPHS], {}),
    ),
    "shared weights": (lambda: spread(Stack([Layer()] * 3)), cure, [tokens()], {"layers": [0, 2]}),
    "sequentials": (lambda: spread(Stack([sequence() for _ in range(3)])), cure, [tokens()], {}),
}


@pytest.mark.parametrize("name", SETS)
def test_what_is_a_set(name: str) -> None:
    build, change, given, options = SETS[name]
    model = build()
    handle = check(model, change, *given, **options)
    if "channels" in name:
        assert [one.dim for one in handle.cures.values()] == [6, 6, 6]
    if name == "sequentials":  # the cure is not a stage of them
        assert [len(block) for block in model.blocks] == [3, 3, 3]
        assert sorted(name for name, _ in model.named_children()) == ["blocks", "uncollapse"]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_model_itself_is_a_sequential(depth: int) -> None:
    model = spread(nn.Sequential(*(sequence() if depth == 2 else nn.Linear(8, 8) for _ in range(3))))
    original, x = copy.deepcopy(model), tokens()
    handle = uc.attach(model, "contra_norm", modules=["*"], **BOTH_WAYS, learnable=True, dim=8)
    expected = x
    for stage in original:
        expected = cure(stage(expected))
    assert_same(model(x), expected, original(x))
    assert len(model) == 3
    assert len([name for name in model.state_dict() if name.endswith("scale_param")]) == 3
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    handle.remove()
    assert_clean(model)


class Loops(nn.Module):
    """Runs whatever it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


def test_a_module_that_loops_over_its_children_does_not_run_the_cure_as_one() -> None:
    model, x = spread(Loops()), tokens()
    wrapped = nn.Sequential(model)
    with uc.attach(wrapped, "contra_norm", **BOTH_WAYS, modules=["0"]):
        torch.testing.assert_close(wrapped(x), cure(model.second(model.first(x))))


@pytest.mark.parametrize("at", ["block", "input"])
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *(("attention_mask", MASK), ("attention_mask", MASK.long())),
        *(("mask", MASK), ("mask", MASK.double()), ("src_key_padding_mask", ~MASK)),
    ],
)
def test_masks_reach_the_cure(name: str, mask: Tensor, at: str) -> None:
    model = stack(taking(name))
    check(model, lambda x: cure(x, mask=MASK), tokens(), mask, at=at)
    noise = tokens() + 9 * tokens(seed=2) * ~MASK[..., None]
    torch.testing.assert_close(model(noise, mask)[MASK], model(tokens(), mask)[MASK], atol=1e-10, rtol=1e-8)
    assert torch.equal(model(tokens(), **{name: mask}), model(tokens(), mask))
    assert (model(tokens()) - model(tokens(), mask)).abs().max() > 1e-3


class Pooling(nn.Module):
    """Tokens, then fewer of them, then vectors, under one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool, self.last = nn.Linear(8, 8), nn.AvgPool1d(2), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.last(self.pool(self.first(x).mT).mT.mean(1))


def test_layers_that_a_mask_does_not_fit() -> None:
    model = spread(Pooling())
    original, x = copy.deepcopy(model), tokens()
    with uc.attach(model, "contra_norm", modules=["last"], **BOTH_WAYS):
        assert_same(model(x, MASK), cure(original(x)), original(x))  # vectors have no padding
    uc.attach(model, "contra_norm", modules=["pool"], layout="channels_first", **BOTH_WAYS)
    with pytest.raises(ValueError, match=r"mask.*\(2, 5\)"):
        model(x, MASK)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = stack(taking("mask"))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, mask)


def test_a_second_attachment_by_another_path_leaves_the_first_its_mask() -> None:
    model, x = Outer(), tokens()
    uc.attach(model, "contra_norm", modules="inner.blocks.*", **BOTH_WAYS)
    expected = model(x, MASK)
    assert not torch.allclose(expected, model(x, torch.ones(2, 5).bool()))
    with uc.attach(model.inner, "feat_scale", modules="blocks.*", dim=8, causal=False):
        assert torch.equal(model(x, MASK), expected)
    assert torch.equal(model(x, MASK), expected)


def test_the_number_of_features_where_it_is_needed() -> None:
    """A linear layer has it; of others it must be given, and be right."""
    model = stack()
    uc.attach(model, "feat_scale", modules=["blocks.*.lin"], causal=False)
    handle = uc.attach(model, "contra_norm", modules=["blocks.*"], learnable=True, dim=8, **BOTH_WAYS)
    model(tokens()).square().sum().backward()
    assert all(one.scale_param.grad.abs().max() > 1e-6 for one in handle.cures.values())
    uc.attach(model, "contra_norm", modules=["blocks.*"], at="input", dim=7, **BOTH_WAYS)
    with pytest.raises(ValueError, match="features"):
        model(tokens())


class Counts(nn.Module):
    def forward(self, x: Tensor) -> int:
        return len(x)


def test_a_layer_without_tokens() -> None:
    model = Stack([Counts()])
    uc.attach(model, "contra_norm", modules=["blocks.0"], **BOTH_WAYS)
    with pytest.raises(RuntimeError, match=r"no tokens.*blocks\.0"):
        model(tokens())


class Hidden(nn.Module):
    """A layer of torch with a triangle that only it knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 24, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, src_mask=~lower(x.shape[1]))


def lower(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


@pytest.mark.parametrize("count", [6, 2])  # two tokens of two sequences: a triangle has the shape of a padding mask
@pytest.mark.parametrize("options", [{"causal": True}, {}], ids=["said", "by a mask"])
def test_decoders(options: dict[str, Any], count: int) -> None:
    model, x = spread(taking("mask")([Hidden(), Hidden()])), tokens(2, count, 8)
    given = {} if options else {"mask": lower(count)}
    plain = model(x)
    uc.attach(model, "contra_norm", modules="blocks.*", **OPTIONS, **options)
    out = model(x, **given)
    assert not torch.allclose(out, plain, atol=1e-2)
    changed = torch.cat([x[:, :-1], x[:, -1:] + 1], 1)
    torch.testing.assert_close(model(changed, **given)[:, :-1], out[:, :-1])


class Normed(nn.Module):
    """A block whose norms show its width, if its last layer agrees."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, out)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


def test_norms_show_the_number_of_features() -> None:
    asked = {"modules": ["0", "1"], "scale": 0.1, "learnable": True, "causal": False}
    handle = uc.attach(nn.Sequential(Normed(8), Normed(8)), "contra_norm", **asked)
    assert {one.dim for one in handle.cures.values()} == {8}
    with pytest.raises(ValueError, match="dim="):
        uc.attach(nn.Sequential(Normed(1), Normed(1)), "contra_norm", **asked)


class Stage(nn.Module):
    """Returns its features, and what the next stage takes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x)
        return x, x[:, :, ::2, ::2]


def test_it_is_said_when_two_tensors_may_be_the_tokens() -> None:
    model = nn.ModuleDict({"stage": Stage()})
    uc.attach(model, "contra_norm", scale=0.1, modules=["stage"], causal=False)
    with pytest.warns(UserWarning, match="first"):
        model["stage"](torch.randn(2, 4, 8, 8))
