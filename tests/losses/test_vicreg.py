import math

import pytest
import torch
from torch import Tensor

from uncollapse.losses import covariance_loss, variance_loss


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(x: Tensor) -> list[list[float]]:
    points, (n, d) = x.tolist(), x.shape
    mean = [math.fsum(row[j] for row in points) / n for j in range(d)]
    return [
        [math.fsum((row[i] - mean[i]) * (row[j] - mean[j]) for row in points) / (n - 1) for j in range(d)]
        for i in range(d)
    ]


def naive_variance(x: Tensor, gamma: float = 1.0, eps: float = 1e-4) -> float:
    found, d = covariance(x), x.shape[1]
    return math.fsum(max(0.0, gamma - math.sqrt(found[j][j] + eps)) for j in range(d)) / d


def naive_covariance(x: Tensor) -> float:
    found, d = covariance(x), x.shape[1]
    return math.fsum(found[i][j] ** 2 for i in range(d) for j in range(d) if i != j) / d


BOTH = pytest.mark.parametrize(
    ("ours", "naive"), [(variance_loss, naive_variance), (covariance_loss, naive_covariance)], ids=["v", "c"]
)


@BOTH
def test_is_the_papers_formula(ours, naive) -> None:  # type: ignore[no-untyped-def]
    x = 0.8 * rows(9, 5) + 3
    assert ours(x).item() == pytest.approx(naive(x), rel=1e-11)


def test_other_targets() -> None:
    x = rows(9, 5)
    assert variance_loss(x, 2.5, eps=0.1).item() == pytest.approx(naive_variance(x, 2.5, 0.1), rel=1e-12)


@BOTH
def test_batches_and_masks(ours, naive) -> None:  # type: ignore[no-untyped-def]
    x = 0.8 * rows(4, 8, 3)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False, True] + [False] * 6, [False] * 8])
    x[~mask] = torch.nan
    x.requires_grad_()
    value = ours(x, mask=mask)
    assert value.item() == pytest.approx((naive(x.detach()[0]) + naive(x.detach()[1, :5])) / 2, rel=1e-11)
    value.backward()
    assert x.grad.isfinite().all()
    assert x.grad[~mask].abs().max() == x.grad[2].abs().max() == 0
    every = 0.8 * rows(2, 3, 7, 4)
    assert ours(every).item() == pytest.approx(sum(naive(one) for one in every.flatten(0, 1)) / 6, rel=1e-11)


@BOTH
def test_gradcheck(ours, naive) -> None:  # type: ignore[no-untyped-def]
    x, mask = 0.8 * rows(2, 5, 3), torch.tensor([[True] * 5, [True, False, True, True, False]])
    assert torch.autograd.gradcheck(lambda x: ours(x, mask=mask), (x.requires_grad_(),))


def test_degenerate_rows() -> None:
    for x in (torch.full((5, 3), 0.1), torch.zeros(5, 3)):
        x.requires_grad_()
        total = variance_loss(x) + covariance_loss(x)
        total.backward()
        assert variance_loss(x).item() == pytest.approx(1 - 1e-2, rel=1e-6)
        assert covariance_loss(x).item() == 0
        assert x.grad.abs().max() == 0
    one = torch.ones(1, 3)
    assert variance_loss(one).item() == covariance_loss(one).item() == 0
    assert variance_loss(3 * torch.eye(4) * math.sqrt(4)).item() == 0  # wide enough


def test_far_rows_keep_their_digits() -> None:
    x = rows(50, 4)
    assert covariance_loss((x * 0.5).float() + 4096).item() == pytest.approx(
        naive_covariance((x * 0.5).float().double() + 4096), rel=2e-3
    )


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(ours, naive, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    x = (0.8 * rows(30, 4)).to(dtype)
    assert ours(x).dtype == torch.float32
    assert ours(x).item() == pytest.approx(naive(x.double()), rel=1e-5)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="gamma"):
        variance_loss(rows(3, 2), 0.0)
    with pytest.raises(ValueError, match="eps"):
        variance_loss(rows(3, 2), eps=-1.0)
    with pytest.raises(ValueError, match="mask"):
        covariance_loss(rows(3, 2), mask=torch.ones(4, dtype=torch.bool))
