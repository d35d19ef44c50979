"""What every cure of the registry keeps to when it is attached; a new one is tested the day it is added."""

import inspect
from typing import Any

import pytest
import torch

import uncollapse as uc
from uncollapse.registry import CURES

from .tiny_models import build, first

ARGUMENTS: dict[str, Any] = {"scale": 0.5}  # for constructors without a default
MODELS = {"tokens": ["encoder", "timm_vit", "gcn"], "attention": ["timm_vit", "bert"], "edges": ["gcn"]}


@pytest.mark.parametrize(("name", "model"), [(n, m) for n, c in CURES.items() for m in MODELS[c.acts_on]])
def test_attach_train_and_remove(name: str, model: str) -> None:
    tiny = build(model)
    keys, before = list(tiny.model.state_dict()), tiny.output()
    needed = inspect.signature(CURES[name].layer).parameters.values()
    given = {p.name: ARGUMENTS[p.name] for p in needed if p.name in ARGUMENTS}
    handle = uc.attach(tiny.model, name, **given, **tiny.where)
    assert set(keys) <= set(tiny.model.state_dict())
    added = handle.parameters()
    assert {id(p) for p in added} <= {id(p) for p in tiny.model.parameters()}
    torch.manual_seed(0)
    first(tiny.model.train()(**tiny.batch)).square().mean().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in added)
    with torch.no_grad():
        for parameter in added:
            parameter.add_(torch.rand_like(parameter))
    tiny.model.train(CURES[name].acts_on == "edges")  # those act in training only; nothing else drops out
    changed = tiny.output()
    assert (changed - before).abs().max() > 1e-5
    assert bool(changed.isfinite().all())
    handle.remove()
    tiny.model.eval()
    assert torch.equal(tiny.output(), before)
    assert list(tiny.model.state_dict()) == keys
