"""Cures and compiled code: `torch.compile` in every order, `torch.export`, and what is refused."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch.export import Dim, export

import uncollapse as uc

from .tiny_models import build, first, text

FULL = ("bert", "albert", "timm_vit", "encoder")  # a batch of graphs depends on its data: there the graph breaks
SHALLOW = {"albert": 2}  # one block is enough but where blocks share their weights


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def tiny_of(name):
    tiny = build(name, blocks=SHALLOW.get(name, 1))
    return tiny, tiny.output().detach()


def outer(model, **options):
    return torch.compile(model, backend="eager", **options)


def inner(model, **options):
    model.compile(backend="aot_eager", **options)
    return model


def near(a, b):
    return torch.allclose(a, b, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "way"), [("bert", outer), ("albert", inner), ("timm_vit", inner), ("encoder", outer), ("gcn", outer)]
)
def test_attach_and_remove_after_compile(name, way):
    """Compiled code does not look at hooks again by itself. The cure is a part of the one graph, gradients included."""
    tiny, plain = tiny_of(name)
    compiled = way(tiny.model, fullgraph=name in FULL)
    assert near(first(compiled(**tiny.batch)), plain)
    known = tiny.model if name == "encoder" else compiled  # a wrapper that was made before sees the change as well
    handle = uc.attach(known, "contra_norm", scale=0.6, learnable=True, **tiny.where)
    with torch.compiler.set_stance("force_eager"):
        expected = first(tiny.model(**tiny.batch))
    output = first(compiled(**tiny.batch))
    assert (expected - plain).abs().max() > 0.02
    assert near(output, expected)
    for ours, theirs in zip(gradients(output, tiny.model), gradients(expected, tiny.model), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
    handle.remove()
    assert near(first(compiled(**tiny.batch)), plain)


def gradients(output, model):
    """Of some sum of the output; zeros where it does not depend on a parameter. The cure's scale counts."""
    weighting = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    names, weights = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad((output * weighting).sum(), weights, allow_unused=True)
    filled = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]
    assert all(g.abs().max() > 0 for name, g in zip(names, filled, strict=True) if name.endswith("scale_param"))
    return filled


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    tiny, plain = tiny_of("mlp")
    uc.attach(tiny.model, "contra_norm", scale=0.6, **tiny.where)
    expected = tiny.output()
    assert (expected - plain).abs().max() > 0.1
    with torch.no_grad():
        assert torch.allclose(torch.compile(tiny.model)(**tiny.batch), expected, atol=1e-5)


@pytest.mark.parametrize(("name", "layers", "sizes"), [("timm_vit", None, (2, 2, 3, 4, 5)), ("albert", [1], (2, 2, 2))])
def test_no_more_compilations_than_without_a_cure(name, layers, sizes):
    graphs = []
    for scale in (None, 0.6):
        torch.compiler.reset()
        counters.clear()
        tiny, _ = tiny_of(name)
        if scale is not None:
            uc.attach(tiny.model, "contra_norm", scale=scale, layers=layers, **tiny.where)
        compiled = outer(tiny.model)
        for size in sizes:
            batch = {key: torch.cat([value, value, value])[:size] for key, value in tiny.batch.items()}
            expected = first(tiny.model(**batch))
            assert near(first(compiled(**batch)), expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1] <= graphs[0]


# --- torch.export, which works, and TorchScript, which is refused ---


OTHERS = {
    "bert": lambda: text(3, 8, 6),
    "gpt2": lambda: text(3, 8, 6),
    "timm_vit": lambda: {"x": torch.randn(5, 3, 8, 8)},
    "mlp": lambda: {"x": torch.randn(4, 9, 16)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_exported_model_keeps_its_cure_on_other_batches(name):
    tiny, _ = tiny_of(name)
    other = OTHERS[name]()
    plain = first(tiny.model(**other))
    uc.attach(tiny.model, "contra_norm", scale=0.6, **tiny.where)
    free = {
        key: {i: Dim.DYNAMIC for i, size in enumerate(value.shape) if other[key].shape[i] != size}
        for key, value in tiny.batch.items()
    }
    program = export(tiny.model, (), tiny.batch, dynamic_shapes=free)
    expected = first(tiny.model(**other))
    assert (expected - plain).abs().max() > 0.02
    assert near(first(program.module()(**other)), expected)
    uc.detach(tiny.model)
    assert near(first(program.module()(**other)), expected)


def test_batches_of_graphs_are_exported_strictly():
    tiny, _ = tiny_of("gcn")
    uc.attach(tiny.model, "contra_norm", scale=0.6, **tiny.where)
    with pytest.raises(RuntimeError, match="strict"):
        export(tiny.model, (), tiny.batch)
    other = {**tiny.batch, "batch": torch.tensor([0] * 3 + [1] * 5 + [2] * 4)}
    program = export(tiny.model, (), tiny.batch, strict=True)
    assert near(program.module()(**other), tiny.model(**other))
    assert (tiny.model(**other) - tiny.output()).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused():
    tiny, plain = tiny_of("mlp")
    handle = uc.attach(tiny.model, "contra_norm", scale=0.6, **tiny.where)
    expected = tiny.output()
    with pytest.raises(RuntimeError, match=r"TorchScript.*detach"):
        torch.jit.trace(tiny.model, tiny.batch["x"])
    with pytest.raises(RuntimeError, match=r"TorchScript.*detach"):
        torch.jit.script(tiny.model)
    assert torch.equal(tiny.output(), expected)
    handle.remove()
    traced = torch.jit.trace(tiny.model, tiny.batch["x"])
    assert near(traced(tiny.batch["x"]), plain)
    with pytest.raises(ValueError, match="TorchScript"):
        uc.attach(traced, "contra_norm", scale=0.6, modules=["layers.*"])


OTHER_PLACES = {
    "initial_residual": {"scale": 0.3, "learnable": True},
    "value_residual": {"learnable": True},
    "neutreno": {"scale": 5.0},
    "gfsa": {"scale": 0.5},
    "output_gate": {},
}


@pytest.mark.parametrize("cure", OTHER_PLACES)
@pytest.mark.parametrize("name", ["timm_vit", "gpt2"])
def test_tensors_of_other_places(name, cure):
    """What the first block had, the input of a module and a second attention are parts of the one graph."""
    tiny = build(name, blocks=2)
    handle = uc.attach(tiny.model, cure, **OTHER_PLACES[cure], **tiny.where)
    expected = tiny.output()
    own = gradients(expected, tiny.model)
    compiled = inner(tiny.model, fullgraph=True)
    output = first(compiled(**tiny.batch))
    assert near(output, expected)
    for ours, theirs in zip(gradients(output, tiny.model), own, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
    handle.remove()
    assert not near(first(compiled(**tiny.batch)), expected)
