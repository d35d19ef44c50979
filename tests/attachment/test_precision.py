"""Cures in models of other dtypes, under autocast, and on the device that has no memory."""

import pytest
import torch
from torch import nn

import uncollapse as uc

from .tiny_models import build, first

NAMES = ("bert", "gpt2", "timm_vit", "encoder", "encoder_pre_norm", "gcn", "mlp")
# bfloat16 has 8 bits: 2^-8 of outputs of size 1 to 4, after three blocks
BOUNDS = {torch.bfloat16: 0.08, torch.float16: 0.01, torch.float64: 2e-6}


def converted(batch, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def cured(name, **options):
    """A tiny model, its output without the cure, and the attachment."""
    tiny = build(name)
    plain = tiny.output().detach()
    return tiny, plain, uc.attach(tiny.model, "contra_norm", scale=0.6, learnable=True, **options, **tiny.where)


def gradients_flow(model, output):
    output.float().square().sum().backward()
    scales = [p.grad for name, p in model.named_parameters() if name.endswith("scale_param")]
    assert scales
    assert all(g is not None and torch.isfinite(g).all() for g in scales)
    assert any(g.abs().max() > 0 for g in scales)


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    tiny, plain, handle = cured(name)
    exact = tiny.output().detach()
    with torch.autocast("cpu", torch.bfloat16):
        output = tiny.output()
    assert (output.float() - exact).abs().max() < min(0.04, 0.3 * (exact - plain).abs().max())
    gradients_flow(tiny.model, output)
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert output.dtype == tiny.output().dtype


@pytest.mark.parametrize("name", ["bert", "timm_vit", "encoder_pre_norm"])
def test_autocast_leaves_the_dtype_of_the_stream(name):
    tiny = build(name)
    seen = []

    def look(module, args, output):
        seen.append(first(output).dtype)

    blocks = [m for n, m in tiny.model.named_modules() if n.rpartition(".")[2].isdigit() and n.count(".") <= 2]
    for block in blocks:
        block.register_forward_hook(look)
    with torch.autocast("cpu", torch.bfloat16):
        tiny.output()
        with uc.attach(tiny.model, "contra_norm", scale=0.6, **tiny.where):
            tiny.output()
    assert len(seen) == 2 * len(blocks) > 0
    assert seen[: len(blocks)] == seen[len(blocks) :]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", NAMES)
def test_models_of_another_dtype(name, dtype):
    """Converted after the cure came in, and before: the same."""
    tiny, plain, _ = cured(name)
    exact, batch = tiny.output().detach(), converted(tiny.batch, dtype)
    after = tiny.model.to(dtype)
    output = first(after(**batch))
    assert output.dtype == dtype
    assert {p.dtype for p in after.parameters()} == {dtype}
    assert (output.float() - exact).abs().max() < min(BOUNDS[dtype], 0.3 * (exact - plain).abs().max())
    gradients_flow(after, output)
    before = build(name)
    before.model.to(dtype)
    uc.attach(before.model, "contra_norm", scale=0.6, learnable=True, **before.where)
    near = 1e-6 if dtype == torch.float64 else 0.0  # a start of 0.6 was rounded to float32 before
    assert torch.allclose(first(before.model(**batch)), output, atol=near, rtol=0)


def test_a_model_without_memory_gets_its_cure_with_the_weights():
    with torch.device("meta"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    handle = uc.attach(model, "contra_norm", scale=0.5, learnable=True)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    trained = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    uc.attach(trained, "contra_norm", scale=0.5, learnable=True)
    model.load_state_dict(trained.state_dict())
    x = torch.randn(2, 5, 16)
    assert torch.equal(model.eval()(x), trained(x))
    handle.remove()
    assert (model(x) - trained(x)).abs().max() > 0.1
