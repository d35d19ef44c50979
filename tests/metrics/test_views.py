import math

import pytest
import torch
from torch import Tensor

from uncollapse.metrics import alpha_req, lidar


def views(n: int = 12, q: int = 3, d: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(n, 1, d, generator=generator, dtype=torch.float64)
    return samples + 0.3 * torch.randn(n, q, d, generator=generator, dtype=torch.float64)


def naive_lidar(x: Tensor, delta: float) -> float:
    n, q, d = x.shape
    means = x.mean(1)
    grand = means.mean(0)
    between, within = torch.zeros(d, d, dtype=x.dtype), torch.zeros(d, d, dtype=x.dtype)
    for i in range(n):
        between += torch.outer(means[i] - grand, means[i] - grand) / n
        for v in range(q):
            within += torch.outer(x[i, v] - means[i], x[i, v] - means[i]) / (n * q)
    values, vectors = torch.linalg.eigh(within + delta * torch.eye(d, dtype=x.dtype))
    root = vectors @ torch.diag(values**-0.5) @ vectors.T
    p = torch.linalg.eigvalsh(root @ between @ root).clamp(min=0)
    p = p / p.sum()
    return math.exp(-sum(float(a) * math.log(a) for a in p if a > 1e-13))


@pytest.mark.parametrize(("n", "q", "d"), [(12, 3, 5), (4, 2, 9), (30, 5, 2)])
@pytest.mark.parametrize("delta", [1e-4, 0.1])
def test_lidar(n: int, q: int, d: int, delta: float) -> None:
    x = views(n, q, d)
    assert float(lidar(x, delta=delta)) == pytest.approx(naive_lidar(x, delta), rel=1e-9)
    assert 1 <= float(lidar(x, delta=delta)) <= min(n - 1, d)


def test_lidar_does_not_depend_on_order_rotation_or_shift() -> None:
    x = views()
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=x.dtype))[0]
    moved = x[torch.randperm(12, generator=torch.Generator().manual_seed(2))][:, [2, 0, 1]] @ rotation + 3
    torch.testing.assert_close(lidar(moved), lidar(x), rtol=1e-9, atol=0)


def test_lidar_gradient() -> None:
    assert torch.autograd.gradcheck(lidar, views(6, 2, 3).requires_grad_(), atol=1e-6)


def test_lidar_of_collapsed_samples() -> None:
    same = torch.randn(1, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).repeat(6, 3, 1)
    assert float(lidar(same)) == 0
    line = torch.arange(6.0)[:, None, None] * torch.ones(1, 2, 4)
    line = line.requires_grad_()
    value = lidar(line)
    value.backward()
    assert float(value.detach()) == pytest.approx(1, abs=1e-6)
    assert line.grad is not None
    assert bool(torch.isfinite(line.grad).all())


def test_lidar_bad_input() -> None:
    x = views()
    for bad in (x[0], x[:1], x[:, :1], x[None]):
        with pytest.raises(ValueError, match="2 views"):
            lidar(bad)
    with pytest.raises(ValueError, match="delta"):
        lidar(x, delta=0)
    wide = views(3, 2, 40) * 1e9
    with pytest.raises(ValueError, match="delta"):
        lidar(wide, delta=1e-12)


def power_law(alpha: float, n: int = 50, d: int = 20) -> Tensor:
    """Centred rows whose covariance has the eigenvalues k^−α."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(n, d, generator=generator, dtype=torch.float64)
    u = torch.linalg.qr(start - start.mean(0))[0]
    v = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    return u * torch.arange(1, d + 1, dtype=torch.float64) ** (-alpha / 2) @ v.T


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_alpha_of_a_power_law(alpha: float, scale: float) -> None:
    x = power_law(alpha) * scale + 2
    assert float(alpha_req(x)) == pytest.approx(alpha, abs=1e-8)
    assert float(alpha_req(x, low=3, high=10)) == pytest.approx(alpha, abs=1e-8)


@pytest.mark.parametrize(("low", "high"), [(1, None), (2, 7), (4, 5)])
def test_alpha_is_the_least_squares_slope(low: int, high: int | None) -> None:
    x = torch.randn(30, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    eigenvalues = torch.linalg.eigvalsh(x.T.cov()).flip(0)[low - 1 : high or 9]
    index = torch.arange(low, (high or 9) + 1, dtype=torch.float64).log()
    design = torch.stack([index, torch.ones_like(index)], 1)
    slope = torch.linalg.lstsq(design, eigenvalues.log()[:, None]).solution[0, 0]
    torch.testing.assert_close(alpha_req(x, low=low, high=high), -slope, rtol=1e-9, atol=0)


def test_alpha_default_range_ends_at_a_hundred() -> None:
    x = torch.randn(160, 130, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(alpha_req(x), alpha_req(x, high=100), rtol=0, atol=0)
    assert float(alpha_req(x)) != pytest.approx(float(alpha_req(x, high=130)), rel=1e-3)
    assert float(alpha_req(x[:20])) == pytest.approx(float(alpha_req(x[:20], high=19)), rel=0)


def test_alpha_leaves_vanishing_eigenvalues_out() -> None:
    x = power_law(1.0, d=6)
    wide = torch.cat([x, torch.zeros(50, 4, dtype=x.dtype)], 1)
    assert float(alpha_req(wide)) == pytest.approx(1, abs=1e-8)


def test_alpha_gradient() -> None:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(alpha_req, x)


def test_alpha_bad_input() -> None:
    x = power_law(1.0)
    with pytest.raises(ValueError, match=r"\(n, d\)"):
        alpha_req(x[None])
    for low, high in ((0, 5), (5, 5), (1, 21)):
        with pytest.raises(ValueError, match="20"):
            alpha_req(x, low=low, high=high)
    for collapsed in (torch.ones(9, 4), torch.arange(9.0)[:, None] * torch.ones(4)):
        with pytest.raises(ValueError, match="collapsed"):
            alpha_req(collapsed)
