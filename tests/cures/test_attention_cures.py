"""Value residual, NeuTRENO, centered attention, GFSA and the output gate against maps that are written out."""

import math

import pytest
import torch

import uncollapse as uc

HALF = (torch.float16, torch.bfloat16)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention(causal: bool = False, masked: bool = False):
    """A map (2, 3, 7, 7), values (2, 3, 7, 4), which keys each query sees, and the mask (2, 7)."""
    mask = torch.ones(2, 7, dtype=torch.bool)
    if masked:
        mask[0, [2, 5]] = False
    seen = mask[:, None, None, :].expand(2, 3, 7, 7)
    seen = seen & torch.ones(7, 7, dtype=torch.bool).tril() if causal else seen
    return rows(2, 3, 7, 7).masked_fill(~seen, -torch.inf).softmax(-1), rows(2, 3, 7, 4, seed=1), seen, mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_centered_attention(causal, masked):
    maps, v, seen, mask = attention(causal, masked)
    uniform = seen / seen.sum(-1, keepdim=True)
    bad = v.masked_fill(~mask[:, None, :, None], torch.nan)
    for scale in (1.0, 0.3):
        out = uc.centered_attention(maps @ v, bad, scale, mask=mask, causal=causal)
        torch.testing.assert_close(out, (maps - scale * uniform) @ v)
    torch.testing.assert_close(uc.CenteredAttention(0.0)(maps @ v, v), maps @ v)


def test_centered_attention_loses_the_outlier():
    """The row sums of A are 1, an eigenvalue of 1; those of the centered map are 0."""
    maps, _, _, _ = attention()
    ones = torch.ones(2, 3, 7, 1, dtype=torch.float64)
    assert uc.centered_attention(maps @ ones, ones).abs().max() < 1e-12


@pytest.mark.parametrize("order", [2, 4])
def test_gfsa(order):
    maps, v, _, _ = attention(causal=True)
    scale = torch.tensor([0.5, 0.0, -0.3], dtype=torch.float64)
    second = maps @ maps
    high = maps + (order - 1) * (second - maps)
    filtered = 0.2 * torch.eye(7, dtype=torch.float64) + maps + scale[:, None, None] * high
    context = maps @ v
    torch.testing.assert_close(uc.gfsa(context, v, maps @ context, scale, order=order, low=0.2), filtered @ v)
    layer = uc.GFSA(3, order=order).double()
    torch.testing.assert_close(layer(context, v, maps @ context), context)  # w_K starts at 0
    layer(context, v, maps @ context).square().sum().backward()
    torch.testing.assert_close(layer.scale.grad, (2 * context * (high @ v)).sum((0, 2, 3)))
    if order == 2:
        torch.testing.assert_close(high, second)  # exact for K = 2


def test_neutreno():
    maps, v, _, _ = attention()
    first = rows(2, 3, 7, 4, seed=2)
    out = uc.neutreno(maps @ v, v, first, 0.6)
    for b, h, i, k in [(0, 0, 0, 0), (1, 2, 6, 3)]:
        expected = sum(float(maps[b, h, i, j]) * float(v[b, h, j, k]) for j in range(7))
        expected += 0.6 * (float(first[b, h, i, k]) - float(v[b, h, i, k]))
        assert float(out[b, h, i, k]) == pytest.approx(expected)
    assert torch.equal(uc.NeuTRENO(0.0)(maps @ v, v, first), maps @ v)


def test_value_residual():
    v, first = rows(2, 7, 4), rows(2, 7, 4, seed=1)
    assert float(uc.value_residual(v, first)[1, 3, 2]) == pytest.approx((float(v[1, 3, 2]) + float(first[1, 3, 2])) / 2)
    torch.testing.assert_close(uc.value_residual(v, first, 0.3, identity=1.2), 0.3 * first + 1.2 * v)
    assert torch.equal(uc.ValueResidual(**uc.ValueResidual.PRESETS["svformer"])(v, first), first)
    first.requires_grad_()
    uc.ValueResidual(detach=True)(v.requires_grad_(), first).sum().backward()
    assert first.grad is None
    learned = uc.ValueResidual(learnable=True).double()
    torch.testing.assert_close(learned(v, first), uc.value_residual(v, first))
    learned(v, first).sum().backward()
    assert learned.scale_param.grad.item() == pytest.approx(first.sum().item())
    assert learned.identity_param.grad.item() == pytest.approx(v.sum().item())


@pytest.mark.parametrize("headwise", [False, True])
def test_output_gate(headwise):
    context, inputs = rows(2, 3, 7, 4), rows(2, 7, 5, seed=1)
    weight = rows(3 if headwise else 12, 5, seed=2)
    out = uc.output_gate(context, inputs, weight)
    for b, h, i, k in [(0, 0, 0, 0), (1, 2, 6, 3), (0, 1, 4, 2)]:
        row = weight[h] if headwise else weight[4 * h + k]
        gate = 1 / (1 + math.exp(-sum(float(x) * float(w) for x, w in zip(inputs[b, i], row, strict=True))))
        assert float(out[b, h, i, k]) == pytest.approx(float(context[b, h, i, k]) * gate)
    torch.manual_seed(0)
    layer = uc.OutputGate(3, 12, 5, headwise=headwise).double()
    assert layer.weight.shape == weight.shape
    torch.testing.assert_close(layer(context, context, inputs), context / 2, rtol=0.1, atol=0.01)


def test_errors_and_half():
    x = rows(1, 2, 5, 4)
    for call, word in [
        (lambda: uc.neutreno(x, x, x[..., :2]), "same shape"),
        (lambda: uc.value_residual(x, x[:, :1]), "same shape"),
        (lambda: uc.gfsa(x, x, x[:, :1], 0.1), "same shape"),
        (lambda: uc.gfsa(x, x, x, 0.1, order=1), "order"),
        (lambda: uc.GFSA(2, order=0), "order"),
        (lambda: uc.output_gate(x, x[0], rows(3, 4)), "weight must"),
        (lambda: uc.centered_attention(x, x[..., :3, :], causal=True), "as many keys"),
    ]:
        with pytest.raises(ValueError, match=word):
            call()
    for dtype in HALF:
        y = x.to(dtype)
        outs = [
            uc.neutreno(y, y, y),
            uc.value_residual(y, y),
            uc.gfsa(y, y, y, torch.ones(2)),
            uc.centered_attention(y, y),
        ]
        outs.append(uc.OutputGate(2, 8, 4).to(dtype)(y, y, y[:, 0]))
        assert all(out.dtype == dtype and out.shape == y.shape and bool(out.isfinite().all()) for out in outs)


def test_one_token_and_equal_tokens():
    one, equal = rows(1, 2, 1, 4), rows(1, 2, 1, 4).expand(1, 2, 5, 4)
    for v in (one, equal):  # attention of equal values is those values
        assert uc.centered_attention(v, v).abs().max() < 1e-12
        torch.testing.assert_close(uc.neutreno(v, v, v), v)
        torch.testing.assert_close(uc.gfsa(v, v, v, 0.5), 1.5 * v)


def test_a_scale_of_other_heads_is_refused():
    """It would broadcast one head to several, or several values to each token."""
    context, scales = torch.randn(1, 5, 4), [torch.ones(3), torch.ones(5, 1)]
    for scale in scales:
        with pytest.raises(ValueError, match="head"):
            uc.attn_scale(context, context, scale)
        with pytest.raises(ValueError, match="head"):
            uc.gfsa(context, context, context, scale)


def test_a_gate_needs_heads():
    with pytest.raises(ValueError, match="context"):
        uc.output_gate(torch.ones(5, 4), torch.ones(5, 8), torch.ones(1, 8))
