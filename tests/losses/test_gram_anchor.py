import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from uncollapse.losses import gram_anchor_loss
from uncollapse.pairwise import pair_means


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(x: Tensor, anchor: Tensor, unit: bool = True) -> float:
    a, b = ((normalize(t, dim=-1) if unit else t).tolist() for t in (x, anchor))
    n, total = len(a), []
    for i in range(n):
        for j in range(n):
            now, then = (math.fsum(p * q for p, q in zip(t[i], t[j], strict=True)) for t in (a, b))
            total.append((now - then) ** 2)
    return math.fsum(total) / n**2


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("width", [5, 3])
def test_is_the_papers_formula(unit: bool, width: int) -> None:
    x, anchor = rows(9, 5), rows(9, width, seed=1)
    got = gram_anchor_loss(x, anchor, normalize=unit)
    assert got.item() == pytest.approx(naive(x, anchor, unit), rel=1e-12)


def test_batches_and_masks() -> None:
    x, anchor = rows(3, 8, 4), rows(3, 8, 4, seed=1)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False] * 8])
    x[~mask] = anchor[~mask] = torch.nan
    x.requires_grad_()
    value = gram_anchor_loss(x, anchor, mask=mask)
    parts = [naive(x.detach()[i][mask[i]], anchor[i][mask[i]]) for i in range(2)]
    assert value.item() == pytest.approx(sum(parts) / 3, rel=1e-12)
    value.backward()
    assert x.grad.isfinite().all()
    assert x.grad[~mask].abs().max() == 0


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, anchor = rows(2, 40, 3).requires_grad_(), rows(2, 40, 3, seed=1)
    whole = gram_anchor_loss(x, anchor)
    monkeypatch.setattr(pair_means, "TILE", 500)
    tiled = gram_anchor_loss(x, anchor)
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(tiled, x), torch.autograd.grad(whole, x), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("unit", [True, False])
def test_gradcheck(unit: bool) -> None:
    x, anchor = rows(2, 5, 3).requires_grad_(), rows(2, 5, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, anchor: gram_anchor_loss(x, anchor, normalize=unit), (x, anchor))


def test_a_rotation_of_the_anchor_costs_nothing() -> None:
    x, turn = rows(7, 4), torch.linalg.qr(rows(4, 4, seed=1))[0]
    assert gram_anchor_loss(x @ turn, x).item() == pytest.approx(0, abs=1e-28)
    assert gram_anchor_loss((x @ turn).float(), x.float()).item() < 1e-12


def test_degenerate_rows() -> None:
    for x, anchor, expected in (
        (torch.ones(3, 2), torch.ones(3, 2), 0.0),
        (torch.zeros(3, 2), torch.eye(3), 1 / 3),
        (torch.ones(1, 2), 5 * torch.ones(1, 2), 0.0),
    ):
        x.requires_grad_()
        value = gram_anchor_loss(x, anchor)
        value.backward()
        assert value.item() == pytest.approx(expected, abs=1e-7)
        assert x.grad.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x, anchor = rows(30, 4).to(dtype), rows(30, 4, seed=1)
    assert gram_anchor_loss(x, anchor.to(dtype)).dtype == torch.float32
    got = gram_anchor_loss(x, anchor.to(dtype))
    assert got.item() == pytest.approx(naive(x.double(), anchor.to(dtype).double()), rel=1e-5)
    assert gram_anchor_loss(x, anchor).dtype == torch.float64  # an anchor of another precision


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="anchor"):
        gram_anchor_loss(rows(3, 2), rows(4, 2))
