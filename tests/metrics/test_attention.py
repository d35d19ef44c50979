import math

import pytest
import torch
from torch import Tensor

from uncollapse.metrics import attention_entropy, attention_similarity, attention_std

EVERY = [attention_similarity, attention_std, attention_entropy]


def maps(*batch: int, heads: int = 3, n: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*batch, heads, n, n, generator=generator, dtype=torch.float64)).softmax(-1)


def naive(metric: object, attn: Tensor) -> float:
    """The metric of (heads, n, n), head by head and row by row."""
    heads, n, _ = attn.shape
    values = []
    for head in attn:
        if metric is attention_similarity:
            pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
            values += [float(head[i] @ head[j] / (head[i].norm() * head[j].norm())) for i, j in pairs]
        elif metric is attention_std:
            values += [float(row.std(correction=0)) for row in head]
        else:
            values += [-math.fsum(float(p) * math.log(p) for p in row if p > 0) / math.log(n) for row in head]
    assert len(values) >= heads
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("metric", EVERY)
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_against_the_definition(metric, prefix: int) -> None:  # type: ignore[no-untyped-def]
    attn = maps()
    assert float(metric(attn, prefix=prefix)) == pytest.approx(naive(metric, attn[:, prefix:, prefix:]), rel=1e-12)


@pytest.mark.parametrize("metric", EVERY)
def test_mask_drops_rows_and_columns(metric) -> None:  # type: ignore[no-untyped-def]
    attn, mask = maps(2), torch.tensor([[True, True, False, True, True, False], [True] * 6])
    attn[0, :, 2] = float("nan")
    attn[0, :, :, 5] = float("inf")
    value = metric(attn, mask, prefix=1)
    kept = [1, 3, 4]
    assert float(value[0]) == pytest.approx(naive(metric, attn[0][:, kept][:, :, kept]), rel=1e-12)
    assert float(value[1]) == pytest.approx(naive(metric, attn[1][:, 1:, 1:]), rel=1e-12)


@pytest.mark.parametrize("metric", EVERY)
def test_batched_is_looped(metric) -> None:  # type: ignore[no-untyped-def]
    attn = maps(2, 4)
    looped = torch.stack([torch.stack([metric(a) for a in row]) for row in attn])
    torch.testing.assert_close(metric(attn), looped, rtol=1e-12, atol=0)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(metric(attn[..., order, :][..., order]), looped, rtol=1e-12, atol=0)


@pytest.mark.parametrize("metric", EVERY)
def test_gradient(metric) -> None:  # type: ignore[no-untyped-def]
    attn = (maps(n=4) * 0.9).requires_grad_()
    mask = torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(lambda a: metric(a, mask), attn)


@pytest.mark.parametrize("metric", EVERY)
@pytest.mark.parametrize("kind", ["even", "identity", "zero", "faint", "one_token", "all_masked"])
def test_degenerate_maps_are_finite(metric, kind: str) -> None:  # type: ignore[no-untyped-def]
    attn = {
        "even": torch.full((2, 7, 7), 1 / 7),
        "identity": torch.eye(7).repeat(2, 1, 1),
        "zero": torch.zeros(2, 7, 7),
        "faint": torch.eye(7).repeat(2, 1, 1) * 1e-25,  # whose squares are 0 in float32
        "one_token": torch.ones(2, 1, 1),
        "all_masked": torch.full((2, 7, 7), float("nan")),
    }[kind]
    mask = torch.zeros(7, dtype=torch.bool) if kind == "all_masked" else None
    attn.requires_grad_()
    value = metric(attn, mask)
    value.backward()
    assert attn.grad is not None
    assert bool(torch.isfinite(attn.grad).all())
    expected = {
        "even": {attention_similarity: 1.0, attention_entropy: 1.0},
        "identity": {attention_std: math.sqrt(1 / 7 - 1 / 49)},
    }
    assert float(value.detach()) == pytest.approx(expected.get(kind, {}).get(metric, 0.0), abs=1e-6)


@pytest.mark.parametrize("metric", EVERY)
def test_everything_a_prefix_is_zero(metric) -> None:  # type: ignore[no-untyped-def]
    assert metric(maps(2), prefix=6).tolist() == [0, 0]
    assert metric(maps(2), prefix=5).tolist() == [0, 0]


def test_columns_are_dropped_without_renormalising() -> None:
    attn = torch.tensor([[[0.5, 0.25, 0.25], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]])
    assert float(attention_std(attn, prefix=1)) == pytest.approx(0.25, abs=1e-7)
    assert float(attention_std(attn[:, :2, :2], prefix=0)) == pytest.approx((0.125 + 0.0) / 2, abs=1e-7)


@pytest.mark.parametrize("metric", EVERY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_rounded_to_half_is_accepted(metric, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    attn = maps(4, n=197).to(dtype)
    assert bool(torch.isfinite(metric(attn)).all())
    torch.testing.assert_close(metric(attn).double(), metric(attn.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("metric", EVERY)
def test_bad_input(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="logits"):
        metric(torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match="sum of"):
        metric(maps() * 2)
    with pytest.raises(ValueError, match=r"\(6, 6\)"):
        metric(maps()[0])
    with pytest.raises(ValueError, match="heads"):
        metric(maps()[..., :4])
    with pytest.raises(ValueError, match="prefix"):
        metric(maps(), prefix=7)
    with pytest.raises(TypeError, match="bool"):
        metric(maps(), torch.ones(6))
    with pytest.raises(ValueError, match=r"mask.*\(2, 6\)"):
        metric(maps(2), torch.ones(3, 6, dtype=torch.bool))
