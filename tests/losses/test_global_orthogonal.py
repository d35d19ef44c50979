import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from uncollapse.losses import global_orthogonal_loss


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(x: Tensor) -> float:
    unit, n = normalize(x, dim=-1).tolist(), len(x)
    found = [
        math.fsum(p * q for p, q in zip(unit[i], unit[j], strict=True)) for i in range(n) for j in range(n) if i != j
    ]
    first, second = math.fsum(found) / len(found), math.fsum(c * c for c in found) / len(found)
    return first**2 + max(0.0, second - 1 / x.shape[1])


@pytest.mark.parametrize("shape", [(9, 3), (4, 12), (6, 6)])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_is_the_papers_formula(shape: tuple[int, int], shift: float) -> None:
    x = rows(*shape) + shift
    assert global_orthogonal_loss(x).item() == pytest.approx(naive(x), rel=1e-11)


def test_both_sides_of_the_bound() -> None:
    assert naive(rows(9, 3) + 0.5) > 1.1 * naive(rows(9, 3) + 0.2) > 0
    spread = torch.cat([torch.eye(3), -torch.eye(3)])  # the mean of cos² is 1/5, below 1/3
    assert global_orthogonal_loss(spread).item() == pytest.approx((1 / 5) ** 2, rel=1e-6)


def test_batches_and_masks() -> None:
    x = rows(4, 8, 3)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False, True] + [False] * 6, [False] * 8])
    x[~mask] = torch.nan
    x.requires_grad_()
    value = global_orthogonal_loss(x, mask=mask)
    assert value.item() == pytest.approx((naive(x.detach()[0]) + naive(x.detach()[1, :5])) / 2, rel=1e-11)
    value.backward()
    assert x.grad.isfinite().all()
    assert x.grad[~mask].abs().max() == x.grad[2].abs().max() == 0
    every = rows(2, 3, 7, 4)
    expected = sum(naive(one) for one in every.flatten(0, 1)) / 6
    assert global_orthogonal_loss(every).item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("d", [3, 9])
def test_gradcheck(d: int) -> None:
    x, mask = rows(2, 5, d) + 0.3, torch.tensor([[True] * 5, [True, False, True, True, False]])
    assert torch.autograd.gradcheck(lambda x: global_orthogonal_loss(x, mask=mask), (x.requires_grad_(),))


def test_degenerate_rows() -> None:
    same = torch.ones(5, 4, requires_grad=True)
    value = global_orthogonal_loss(same)
    value.backward()
    assert value.item() == pytest.approx(2 - 1 / 4, rel=1e-6)
    assert same.grad.abs().max() < 1e-6
    assert global_orthogonal_loss(torch.ones(1, 3)).item() == 0
    assert global_orthogonal_loss(torch.zeros(4, 3)).item() == 0
    assert global_orthogonal_loss(torch.eye(5)).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = (rows(30, 4) + 0.5).to(dtype)
    assert global_orthogonal_loss(x).dtype == torch.float32
    assert global_orthogonal_loss(x).item() == pytest.approx(naive(x.double()), rel=1e-5)
