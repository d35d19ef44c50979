"""Cures in any module, by the names of its layers: layouts, forms of outputs, masks, containers, checkpointing."""

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import uncollapse as uc

from .by_hand import assert_clean, assert_same

OPTIONS = {"scale": 0.5, "temperature": 0.7}
MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


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


class Layer(nn.Module):
    """Tokens in, and out in a form of its own."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.lin, self.form = nn.Linear(8, 8), form

    def forward(self, x: Tensor) -> Any:
        x = self.lin(x).tanh() + x
        match self.form:
            case "tuple":
                return torch.zeros(3, dtype=torch.long), x, None
            case "list":
                return [x, "more"]
            case "dict":
                return {"ids": torch.zeros(2), "hidden": x}
            case "ordered":
                return OrderedDict(hidden=x, more=1)
            case "named":
                return Pair(x, "kept")
            case "nested":
                return {"out": (x, 1)}
        return x


def unpacked(out: Any) -> Tensor:
    match out:
        case Tensor():
            return out
        case Pair():
            assert out.note == "kept"
            return out.tokens
        case {"hidden": x} | {"out": (x, 1)} | [x, "more"] | (_, x, None):
            return x
    raise AssertionError(type(out))


class Stack(nn.Module):
    """Layers one after the other; `changed` is the cure written in by hand, where it goes."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers)
        self.before: Any = lambda number, x: x
        self.after: Any = lambda number, x: x

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.after(number, unpacked(block(self.before(number, x))))
        return x


def check(model: Any, change: Any, *args: Any, at: str = "block", layers: Any = None, **options: Any) -> Any:
    """Attach to `blocks.*` and compare with the cure written in by hand; the handle."""
    original, by_hand = copy.deepcopy(model), copy.deepcopy(model)
    chosen = range(len(model.blocks)) if layers is None else layers
    setattr(by_hand, "before" if at == "input" else "after", lambda n, x: change(x) if n in chosen else x)
    handle = uc.attach(model, "contra_norm", modules=["blocks.*"], at=at, layers=layers, **OPTIONS, **options)
    assert_same(model(*args), by_hand(*args), original(*args))
    return handle


@pytest.mark.parametrize("at", ["block", "input"])
@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict", "ordered", "named", "nested"])
def test_forms_of_outputs(form: str, at: str) -> None:
    model = spread(Stack([Layer(form) for _ in range(3)]))
    assert uc.places(model, modules=["blocks.*"]) == ("block", "input")
    handle = check(model, cure, tokens(), at=at)
    kinds = [type(block(tokens())) for block in model.blocks]
    handle.remove()
    assert kinds == [type(block(tokens())) for block in model.blocks]
    assert_clean(model)


def test_some_layers_only() -> None:
    check(spread(Stack([Layer() for _ in range(4)])), cure, tokens(), layers=[0, 3])


def test_vectors_are_one_set() -> None:
    check(spread(Stack([Layer() for _ in range(3)])), cure, tokens(6, 8))


def test_sequences_first() -> None:
    def change(x: Tensor) -> Tensor:
        return cure(x.transpose(0, 1)).transpose(0, 1)

    check(spread(Stack([Layer() for _ in range(3)])), change, tokens(5, 2, 8), layout="sequence_first")


class Convolved(Stack):
    def __init__(self) -> None:
        super().__init__([nn.Conv2d(3 if n == 0 else 6, 6, 3, padding=1) for n in range(3)])


@pytest.mark.parametrize("layout", [None, "channels_first"])
def test_channels_first(layout: Any) -> None:
    def change(x: Tensor) -> Tensor:
        return cure(x.flatten(2).mT).mT.reshape(x.shape)

    handle = check(spread(Convolved()), change, tokens(2, 3, 4, 4), layout=layout)
    assert [one.dim for one in handle.cures.values()] == [6, 6, 6]


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))


def test_a_cure_is_no_stage_of_a_sequential() -> None:
    model = spread(Stack([sequence() for _ in range(3)]))
    check(model, cure, tokens())
    assert [len(block) for block in model.blocks] == [3, 3, 3]
    assert sorted(name for name, _ in model.named_children()) == ["blocks", "uncollapse"]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_model_itself_is_a_sequential(depth: int) -> None:
    model = spread(nn.Sequential(*(sequence() if depth == 2 else nn.Linear(8, 8) for _ in range(3))))
    original, x = copy.deepcopy(model), tokens()
    handle = uc.attach(model, "contra_norm", modules=["*"], scale=0.5, temperature=0.7, learnable=True, dim=8)
    expected = x
    for stage in original:
        expected = cure(stage(expected))
    assert_same(model(x), expected, original(x))
    assert len(model) == 3
    assert len([name for name in model.state_dict() if name.endswith("scale_param")]) == 3
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))
    handle.remove()
    assert_clean(model)


class Masked(Stack):
    """A mask of the model that its layers are not told; it is a mean over real tokens in the end."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Other(Stack):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Padded(Stack):
    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "mask"), [(Masked, MASK), (Masked, MASK.long()), (Other, MASK), (Other, MASK.double()), (Padded, ~MASK)]
)
def test_masks_reach_the_cure(build: Any, mask: Tensor) -> None:
    for at in ("block", "input"):
        model = spread(build([Layer() for _ in range(3)]))
        check(model, lambda x: cure(x, mask=MASK), tokens(), mask, at=at)
        noise = tokens() + 9 * tokens(seed=2) * ~MASK[..., None]
        torch.testing.assert_close(model(noise, mask)[MASK], model(tokens(), mask)[MASK], atol=1e-10, rtol=1e-8)
        by_name = (
            {"mask": mask} if build is Other else {("attention_mask", "src_key_padding_mask")[build is Padded]: mask}
        )
        assert torch.equal(model(tokens(), **by_name), model(tokens(), mask))
        assert (model(tokens()) - model(tokens(), mask)).abs().max() > 1e-3


class Pooling(nn.Module):
    """Tokens, then fewer of them, then vectors, under one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool, self.last = nn.Linear(8, 8), nn.AvgPool1d(2), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        x = self.pool(x.mT).mT
        return self.last(x.mean(1))


def test_layers_that_a_mask_does_not_fit() -> None:
    model = spread(Pooling())
    original, x = copy.deepcopy(model), tokens()
    with uc.attach(model, "contra_norm", modules=["last"], **OPTIONS):
        assert_same(model(x, MASK), cure(original(x)), original(x))  # vectors have no padding
    uc.attach(model, "contra_norm", modules=["pool"], layout="channels_first", **OPTIONS)
    with pytest.raises(ValueError, match=r"mask of shape \(2, 5\) does not fit tokens of shape \(2, 2, 8\)"):
        model(x, MASK)


def test_the_number_of_features_is_asked_for_where_it_is_needed() -> None:
    model = spread(Stack([Layer() for _ in range(2)]))
    with pytest.raises(ValueError, match=r"contra_norm must know the number of features, which blocks\.0 .* pass dim="):
        uc.attach(model, "contra_norm", modules=["blocks.*"], learnable=True, **OPTIONS)
    with pytest.raises(ValueError, match=r"feat_scale must know the number of features, which blocks\.0"):
        uc.attach(model, "feat_scale", modules=["blocks.*"])
    assert_clean(model)
    uc.attach(model, "feat_scale", modules=["blocks.*.lin"])  # a linear layer tells it
    handle = uc.attach(model, "contra_norm", modules=["blocks.*"], learnable=True, dim=8, **OPTIONS)
    model(tokens()).square().sum().backward()
    assert all(one.scale_param.grad.abs().max() > 1e-6 for one in handle.cures.values())


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class CheckpointedMasked(Checkpointed):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def gradients(model: Any, run: Any) -> dict[str, Tensor]:
    model.zero_grad()
    run(model, tokens().requires_grad_()).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("at", ["block", "input"])
def test_checkpointing_without_a_mask(at: str) -> None:
    model, again = (spread(kind([Layer() for _ in range(3)])).train() for kind in (Stack, Checkpointed))
    plain = gradients(model, lambda m, x: m(x))
    for one in (model, again):
        uc.attach(one, "contra_norm", modules=["blocks.*"], at=at, **OPTIONS)
    expected, found = (gradients(one, lambda m, x: m(x)) for one in (model, again))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=1e-8)
    assert max((plain[name] - expected[name]).abs().max() for name in plain) > 1e-3


def test_checkpointing_of_a_sequential() -> None:
    model = spread(nn.Sequential(*(sequence() for _ in range(4)))).train()
    uc.attach(model, "contra_norm", modules=["*"], **OPTIONS)
    expected = gradients(model, lambda m, x: m(x))
    found = gradients(model, lambda m, x: checkpoint_sequential(m, 2, x, use_reentrant=False))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-10, rtol=1e-8)


def test_checkpointing_with_a_mask_of_the_model_is_refused() -> None:
    model = spread(CheckpointedMasked([Layer() for _ in range(3)])).train()
    uc.attach(model, "contra_norm", modules=["blocks.*"], **OPTIONS)
    out = model(tokens().requires_grad_(), MASK)
    with pytest.raises(
        RuntimeError, match=r"blocks.2 runs outside of a forward pass of the model.*Switch checkpointing"
    ):
        out.sum().backward()


def test_layers_that_share_their_weights() -> None:
    one = Layer()
    check(spread(Stack([one, one, one])), cure, tokens(), layers=[0, 2])


def test_a_layer_without_tokens() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> int:
            return len(x)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = Counts()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.count(x)

    model = Odd()
    uc.attach(model, "contra_norm", modules=["count"], **OPTIONS)
    with pytest.raises(RuntimeError, match="no tokens at the output of count"):
        model(tokens())


def test_names_that_fit_nothing() -> None:
    model = spread(Stack([Layer() for _ in range(2)]))
    with pytest.raises(ValueError, match=r"No module of Stack is named 'block.\*'"):
        uc.attach(model, "contra_norm", modules=["block.*"], **OPTIONS)
    with pytest.raises(ValueError, match=r"Stack has no place 'attention.residual'. There are: block, input"):
        uc.attach(model, "contra_norm", modules=["blocks.*"], at="attention.residual", **OPTIONS)
    with pytest.raises(ValueError, match=r"norms within the blocks of Stack are not known. There are: block, input"):
        uc.attach(model, "contra_norm", modules=["blocks.*"], at="norms", **OPTIONS)
    with pytest.raises(ValueError, match=r"not a known model.*Series of blocks: 2 × Layer in blocks"):
        uc.attach(model, "contra_norm", **OPTIONS)
    assert_clean(model)


def test_graphs_by_name() -> None:
    class Net(Stack):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    edges, batch = torch.tensor([[0, 1, 4], [1, 2, 5]]), torch.tensor([0, 0, 0, 0, 1, 1, 1])
    model = spread(Net([Layer() for _ in range(2)]))
    check(model, lambda x: cure(x, edge_index=edges, batch=batch), tokens(7, 8), edges, batch)


def test_another_number_of_features_than_was_said() -> None:
    model = spread(Stack([Layer() for _ in range(2)]))
    uc.attach(model, "contra_norm", modules=["blocks.*"], dim=7, **OPTIONS)
    with pytest.raises(ValueError, match="7 features"):
        model(tokens())
