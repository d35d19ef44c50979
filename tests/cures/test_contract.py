"""What every cure of the registry keeps to; a new one is tested the day it is added."""

import inspect

import pytest
import torch

from uncollapse.registry import CURES

ARGUMENTS = {"contra_norm": {"scale": 0.3}, "feat_scale": {"low": 0.2, "high": 0.3}}
MODULES = {"contra_norm": (6, 0.3), "attn_scale": (2,), "feat_scale": (6,)}


@pytest.mark.parametrize("name", CURES)
def test_facts(name):
    entry = CURES[name]
    for thing in (entry.function, entry.layer):
        doc = inspect.getdoc(thing)
        assert "arXiv" in doc
        assert ">>>" in doc
    assert "arXiv" in entry.paper
    assert issubclass(entry.layer, torch.nn.Module)
    assert repr(entry.layer(*MODULES.get(name, ())))


@pytest.mark.parametrize("name", [n for n, c in CURES.items() if c.acts_on == "tokens"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cures_on_tokens(name, dtype):
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
    layer = entry.layer(*MODULES.get(name, ())).to(dtype)
    assert layer(x, mask).shape == x.shape
