import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from uncollapse.losses import koleo_loss


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(x: Tensor, unit: bool = True, eps: float = 1e-8) -> float:
    points = (normalize(x, dim=-1) if unit else x).tolist()
    nearest = [min(math.dist(a, b) for j, b in enumerate(points) if i != j) for i, a in enumerate(points)]
    return -math.fsum(math.log(each + eps) for each in nearest) / len(points)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_is_the_papers_formula(unit: bool, eps: float) -> None:
    x = rows(11, 3)
    assert koleo_loss(x, normalize=unit, eps=eps).item() == pytest.approx(naive(x, unit, eps), rel=1e-12)


def test_batches_and_masks() -> None:
    x = rows(4, 8, 3)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False, True] + [False] * 6, [False] * 8])
    x[~mask] = torch.nan
    x.requires_grad_()
    value = koleo_loss(x, mask=mask)
    expected = (naive(x.detach()[0]) + naive(x.detach()[1, :5])) / 2  # one row has no neighbour
    assert value.item() == pytest.approx(expected, rel=1e-12)
    value.backward()
    assert x.grad.isfinite().all()
    assert x.grad[~mask].abs().max() == x.grad[2].abs().max() == 0
    every = rows(2, 3, 7, 4)
    expected = sum(naive(one) for one in every.flatten(0, 1)) / 6
    assert koleo_loss(every).item() == pytest.approx(expected, rel=1e-12)


def test_gradient_is_that_of_the_chosen_pairs_beyond_one_tile() -> None:
    x = rows(1500, 3).requires_grad_()
    unit = normalize(x, dim=-1)
    with torch.no_grad():
        chosen = torch.cdist(unit, unit).fill_diagonal_(torch.inf).argmin(1)
    dense = -((unit - unit[chosen]).norm(dim=-1) + 1e-8).log().mean()
    value = koleo_loss(x)
    torch.testing.assert_close(value, dense, rtol=1e-12, atol=0)
    (expected,), (got,) = torch.autograd.grad(dense, x), torch.autograd.grad(value, x)
    assert (got - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize("unit", [True, False])
def test_gradcheck(unit: bool) -> None:
    assert torch.autograd.gradcheck(lambda x: koleo_loss(x, normalize=unit), (rows(2, 6, 3).requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_equal_rows_in_half_precision_are_finite(dtype: torch.dtype) -> None:
    """Where 1e-8 is 0, the released code gives inf."""
    x = rows(6, 4).to(dtype)
    x[3] = x[2]
    x.requires_grad_()
    value = koleo_loss(x)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(naive(x.detach().double()), rel=1e-5)
    value.backward()
    assert x.grad.isfinite().all()


def test_degenerate_rows() -> None:
    same = torch.ones(5, 3, requires_grad=True)
    value = koleo_loss(same)
    value.backward()
    assert value.item() == pytest.approx(-math.log(1e-8), rel=1e-6)
    assert same.grad.abs().max() == 0
    one = torch.ones(1, 3, requires_grad=True)
    koleo_loss(one).backward()
    assert koleo_loss(one).item() == 0
    assert one.grad.abs().max() == 0
    mixed = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.8, 0.9]])  # a zero row is 1 from all, others 0.86 apart
    apart = math.dist((1, 0), (0.8 / math.hypot(0.8, 0.9), 0.9 / math.hypot(0.8, 0.9)))
    assert koleo_loss(mixed).item() == pytest.approx(-2 * math.log(apart) / 3, rel=1e-5)


def test_a_zero_row_can_be_the_nearest() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.3, 1.0]])  # cosine 0.29: at distance 1.19, the zero row at 1
    assert koleo_loss(x).item() == pytest.approx(0, abs=1e-6)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="eps"):
        koleo_loss(rows(3, 2), eps=0.0)
    with pytest.raises(ValueError, match="one row"):
        koleo_loss(rows(0, 2))
