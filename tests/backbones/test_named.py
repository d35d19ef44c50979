"""Layers of any module by their names: patterns, order, errors, layouts, masks, random twins."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from uncollapse import backbones
from uncollapse.backbones import named
from uncollapse.backbones.sites import Context, Site, sets_with_mask


class Mixer(nn.Module):
    """Eleven blocks, so that names as text would come in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(11)])
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.body.blocks:
            x = block(x)
        return self.head(x)


def outputs(model: nn.Module, paths: list[str], *args: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    hooks = [model.get_submodule(path).register_forward_hook(lambda m, a, out: seen.append(out)) for path in paths]
    model(*args)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["body.blocks.*"], [f"body.blocks.{n}" for n in range(11)]),
        (["body.blocks.?"], [f"body.blocks.{n}" for n in range(10)]),
        (["body.blocks.[135]"], ["body.blocks.1", "body.blocks.3", "body.blocks.5"]),
        (["*.blocks.10", "body.blocks.2"], ["body.blocks.2", "body.blocks.10"]),
        (["body.blocks.3.0"], ["body.blocks.3.0"]),
        (["head", "embed"], ["embed", "head"]),
        (["*"], ["embed", "body", "head"]),
    ],
)
def test_patterns(layers: list[str], expected: list[str]) -> None:
    stack = backbones.find(Mixer(), modules=layers)
    assert [block.name for block in stack.blocks] == expected
    assert [block.places["block"] for block in stack.blocks] == [Site(name) for name in expected]
    assert (stack.path, stack.family, stack.architecture, stack.layout) == ("", "named", "Mixer", "auto")
    assert stack.embed == Site(expected[0], "input")


def test_order_and_values_of_a_run() -> None:
    model, ids = Mixer(), torch.randint(20, (2, 6))
    stack = backbones.find(model, modules=["body.blocks.*"])
    x = model.embed(ids)
    for found, block in zip(outputs(model, [b.name for b in stack.blocks], ids), model.body.blocks, strict=True):
        x = block(x)
        torch.testing.assert_close(found, x)


def test_ids_are_no_tokens() -> None:
    stack = backbones.find(Mixer(), modules=["embed"])
    assert stack.embed.read(((torch.randint(20, (2, 6)),), {}), None) is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["body.block.3"], r"named 'body\.block\.3'. Did you mean 'body\.blocks\.3' or "),
        (["body.blocks.1", "bdoy.*"], r"named 'bdoy\.\*'"),
        (["blocks.*"], r"Series of blocks: 11 × Sequential in body\.blocks\. .*modules=\['body\.blocks\.\*'\]"),
        ([""], "named ''"),
        ([], "at least one module of Mixer, got none"),
    ],
)
def test_names_that_fit_nothing(layers: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backbones.find(Mixer(), modules=layers)


def test_layer_with_several_names_runs_once_for_each() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    stack = backbones.find(model, modules=["0", "2"])
    assert [(b.name, b.places["block"].path, b.call) for b in stack.blocks] == [("0", "0", 0), ("2", "0", 1)]


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((2, 5, 8), None, (2, 5, 8)),
        ((6, 8), None, (1, 6, 8)),
        ((2, 8, 3, 4), None, (2, 12, 8)),
        ((2, 3, 4, 8), "tokens", (2, 12, 8)),
        ((5, 2, 8), "sequence_first", (2, 5, 8)),
        ((2, 8, 5), "channels_first", (2, 5, 8)),
    ],
)
def test_layouts(shape: tuple[int, ...], layout: Any, expected: tuple[int, ...]) -> None:
    stack = backbones.find(Mixer(), modules=["body"], layout=layout)
    sets, mask = sets_with_mask(torch.randn(shape), stack.layout, Context())
    assert sets.shape == expected
    assert mask is None


def test_channels_become_features() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    sets, _ = sets_with_mask(image, "auto", Context())
    torch.testing.assert_close(sets[0, 5], image[0, :, 1, 1])


REAL = torch.tensor([[True] * 5, [True, True, False, False, False]])


def takes(*names: str) -> nn.Module:
    """A model with these arguments."""
    source = f"def forward(self, {', '.join(names)}):\n    return {names[0]}"
    scope: dict[str, Any] = {}
    exec(source, scope)
    model = type("Taker", (nn.Module,), {"forward": scope["forward"]})()
    model.layer = nn.Linear(8, 8)
    return model


@pytest.mark.parametrize(
    "x", [torch.randn(2, 5, 8), torch.randint(9, (2, 5)), torch.randn(5, 2, 8)], ids=["x", "ids", "n first"]
)
@pytest.mark.parametrize(
    ("name", "mask"),
    [("attention_mask", REAL.long()), ("mask", REAL), ("mask", REAL.float()), ("src_key_padding_mask", ~REAL)],
)
def test_masks_by_their_names(x: Tensor, name: str, mask: Tensor) -> None:
    stack = named.stack(takes("x", f"{name}=None"), ["layer"])
    for args, kwargs in (((x, mask), {}), ((x,), {name: mask}), ((), {name: mask, "x": x})):
        found = stack.context(args, kwargs).mask
        assert found.dtype == torch.bool
        assert torch.equal(found, REAL)
    assert stack.context((x,), {}).mask is None


@pytest.mark.parametrize(
    "mask",
    [
        nn.Transformer.generate_square_subsequent_mask(5),
        torch.ones(5, 5, dtype=torch.bool).tril(),
        torch.ones(2, 1, 5, 5),
        torch.randn(2, 5),
        "causal",
    ],
    ids=["added", "square", "four axes", "numbers", "text"],
)
def test_what_is_no_padding_is_not_taken_for_it(mask: Any) -> None:
    stack = named.stack(takes("x", "mask"), ["layer"])
    assert stack.context((torch.randn(2, 5, 8), mask), {}).mask is None


def test_graphs() -> None:
    stack = named.stack(takes("x", "edge_index", "batch=None"), ["layer"])
    edges, batch = torch.tensor([[0, 1, 2], [1, 0, 3]]), torch.tensor([0, 0, 1, 1])
    found = stack.context((torch.randn(4, 8), edges), {"batch": batch})
    assert torch.equal(found.edge_index, edges)
    assert torch.equal(found.batch, batch)
    assert stack.layout == "nodes"
    assert named.stack(takes("x", "edge_index"), ["layer"], "tokens").layout == "tokens"


def test_suggestions() -> None:
    nested = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    assert "3 × Linear in the model. Name them with modules=['*']" in named.suggestion(nested)
    assert "It consists of: layer (Linear)." in named.suggestion(takes("x"))
    assert "It has no parts" in named.suggestion(nn.Tanh())


def test_random_twin() -> None:
    model = Mixer()
    stack = backbones.find(model, modules=["body.blocks.*"])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    twin = stack.reinitialize(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(torch.equal(value, before[key]) for key, value in twin.state_dict().items())
    model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="scale"):
        stack.reinitialize(model)


def test_no_random_twin_of_quantized_or_missing_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stack = backbones.find(model, modules=["*"])
    with pytest.raises(ValueError, match="meta"):
        stack.reinitialize(nn.Sequential(nn.Linear(2, 2, device="meta")))
    model.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="floating-point"):
        stack.reinitialize(model)
