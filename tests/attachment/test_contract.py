"""What every cure of the registry keeps to when it is attached; a new one is tested the day it is added."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import uncollapse as uc
from uncollapse.registry import CURES

ARGUMENTS: dict[str, Any] = {"scale": 0.5}  # for constructors without a default


def encoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), (torch.randn(2, 7, 12),)


def vit() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=3, embed_dim=24, num_heads=3, img_size=32, num_classes=5)
    return model, (torch.randn(2, 3, 32, 32),)


def gcn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from torch_geometric.nn import GCN

    edges = torch.randint(0, 9, (2, 40), generator=torch.Generator().manual_seed(0))
    return GCN(6, 12, 3, 4), (torch.randn(9, 6), edges)


MODELS = {"tokens": [encoder, vit, gcn], "attention": [vit], "edges": [gcn]}


@pytest.mark.parametrize(("name", "build"), [(n, b) for n, c in CURES.items() for b in MODELS[c.acts_on]])
def test_attach_train_and_remove(name: str, build: Any) -> None:
    torch.manual_seed(0)
    model, inputs = build()
    keys = {key: value.clone() for key, value in model.state_dict().items()}
    before = model.eval()(*inputs)
    needed = inspect.signature(CURES[name].layer).parameters.values()
    handle = uc.attach(model, name, tokens="all", **{p.name: ARGUMENTS[p.name] for p in needed if p.name in ARGUMENTS})
    assert {key: value for key, value in model.state_dict().items() if key in keys}.keys() == keys.keys()
    added = [p for cure in handle.cures.values() for p in cure.parameters()]
    assert {id(p) for p in added} <= {id(p) for p in model.parameters()}
    model.train()(*inputs).square().mean().backward()
    assert all(p.grad is not None and bool((p.grad != 0).any()) for p in added)
    with torch.no_grad():
        for parameter in added:
            parameter.add_(torch.rand_like(parameter))
    changed = model(*inputs)
    assert not torch.allclose(changed, before, atol=1e-4)
    assert bool(changed.isfinite().all())
    handle.remove()
    assert torch.equal(model.eval()(*inputs), before)
    assert list(model.state_dict()) == list(keys)
