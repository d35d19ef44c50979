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
    others = {n: torch.randn(2, 9, 6).to(dtype) for n in ("inputs", "first") if entry.takes(n)}
    layer = make(name).to(dtype)
    out = layer(x, **others)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    assert not torch.equal(out, x)
    assert torch.equal(layer(x[:, 3:4], **{n: other[:, 3:4] for n, other in others.items()}), out[:, 3:4])
