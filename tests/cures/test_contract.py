"""What every cure of the registry keeps to; a new one is tested the day it is added."""

import inspect

import pytest
import torch

from uncollapse.registry import CURES

ARGUMENTS = {
    "contra_norm": {"scale": 0.3},
    "feat_scale": {"low": 0.2, "high": 0.3},
    "diff_group_norm": {"assign": torch.randn(2, 6)},
    "layer_scale": {"gamma": 0.5},
    "layer_norm_scaling": {"depth": 3},
}
NEEDED = {"dim": 6, "heads": 2, "depth": 3, "scale": 0.3}  # by constructors


def make(name):
    parameters = inspect.signature(CURES[name].layer).parameters
    return CURES[name].layer(**{p.name: NEEDED[p.name] for p in parameters.values() if p.default is p.empty})


@pytest.mark.parametrize("name", CURES)
def test_facts(name):
    entry = CURES[name]
    for thing in (entry.function, entry.layer):
        doc = inspect.getdoc(thing)
        assert "arXiv" in doc
        assert ">>>" in doc
    assert "arXiv" in entry.paper
    assert issubclass(entry.layer, torch.nn.Module)
    assert repr(make(name))
    assert entry.cost
    assert entry.use
    presets = getattr(entry.layer, "PRESETS", {})
    assert all(inspect.signature(entry.layer).bind_partial(**options) for options in presets.values())


TOKENS = {n: c for n, c in CURES.items() if c.acts_on == "tokens"}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("name", [n for n, c in TOKENS.items() if c.mixes])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cures_that_mix_tokens(name, dtype):
    torch.manual_seed(0)
    entry, x = CURES[name], torch.randn(2, 9, 6).to(dtype)
    mask = torch.rand(2, 9) > 0.3
    out = entry.function(x, mask=mask, **ARGUMENTS.get(name, {}))
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert torch.equal(out[~mask], x[~mask])
    assert not torch.equal(out, x)
    empty = entry.function(x, mask=torch.zeros(2, 9, dtype=torch.bool), **ARGUMENTS.get(name, {}))
    assert torch.equal(empty, x)
    assert make(name).to(dtype)(x, mask).shape == x.shape


@pytest.mark.parametrize("name", [n for n, c in TOKENS.items() if not c.mixes])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cures_of_single_tokens(name, dtype):
    torch.manual_seed(0)
    entry, x = CURES[name], torch.randn(2, 9, 6).to(dtype)
    others = {n: torch.randn(2, 9, 6).to(dtype) for n in ("inputs", "first", "previous") if entry.takes(n)}
    layer = make(name).to(dtype)
    out = layer(x, **others)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    assert not torch.equal(out, x)
    assert torch.equal(layer(x[:, 3:4], **{n: other[:, 3:4] for n, other in others.items()}), out[:, 3:4])


@pytest.mark.parametrize("name", [n for n, c in CURES.items() if "scale" in inspect.signature(c.layer).parameters])
@pytest.mark.parametrize("learnable", [False, True])
def test_a_scale_may_be_a_whole_number(name, learnable):
    parameters = inspect.signature(CURES[name].layer).parameters
    needed = {n: NEEDED[n] for n, p in parameters.items() if p.default is p.empty and n != "scale"}
    options = {"learnable": True} if learnable and "learnable" in parameters else {}
    layers = [CURES[name].layer(**needed, scale=scale, **options) for scale in (1, 1.0)]
    for whole, exact in zip(*(layer.state_dict().values() for layer in layers), strict=True):
        assert (whole.shape, whole.dtype) == (exact.shape, exact.dtype)


OTHERS = ("first", "inputs", "previous")  # tensors of other places


@pytest.mark.parametrize("name", [n for n, c in CURES.items() if any(map(c.takes, OTHERS))])
def test_the_result_has_the_dtype_of_the_first_argument(name):
    """Under autocast, what a layer computes is in half precision, and what entered it in single precision."""
    shape = (2, 2, 9, 3) if CURES[name].acts_on == "attention" else (2, 9, 6)
    others = {n: torch.randn(shape) for n in ("v", "first", "inputs", "previous") if CURES[name].takes(n)}
    others = others | ({"inputs": torch.randn(2, 9, 6)} if "inputs" in others else {})
    own = list(inspect.signature(CURES[name].layer.forward).parameters)[1]
    out = make(name)(**{**others, own: torch.randn(shape).bfloat16()})
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("name", [n for n, c in TOKENS.items() if c.takes("batch")])
def test_graphs_need_a_matrix_of_nodes_without_an_order(name):
    arguments = {**ARGUMENTS.get(name, {}), "batch": torch.tensor([0, 0, 1])}
    with pytest.raises(ValueError, match="nodes"):
        CURES[name].function(torch.randn(3, 4, 6), **arguments)
    if CURES[name].takes("causal"):
        with pytest.raises(ValueError, match="no causal"):
            CURES[name].function(torch.randn(3, 6), causal=True, **arguments)


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_no_tokens_leave_the_layer_as_it_is(name):
    layer = make(name).train()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    others = {n: torch.empty(0, 6) for n in ("inputs", "first", "previous") if CURES[name].takes(n)}
    assert layer(torch.empty(0, 6), **others).shape == (0, 6)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
