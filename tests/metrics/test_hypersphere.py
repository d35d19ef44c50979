import math

import mpmath
import pytest
import torch
from scipy.special import hyp0f1
from torch import Tensor

from uncollapse.metrics import alignment, pairwise_potential, uniformity, uniformity_optimum
from uncollapse.pairwise.grid import TILE

TABLE = {  # dimension: optimum at t = 1, 2, 3
    2: (-1.1760, -1.5750, -1.7918),
    3: (-1.4048, -2.0798, -2.4849),
    4: (-1.5359, -2.4149, -2.9821),
    8: (-1.7559, -3.0825, -4.0979),
    16: (-1.8759, -3.5130, -4.9365),
    32: (-1.9376, -3.7518, -5.4464),
    64: (-1.9688, -3.8752, -5.7199),
    128: (-1.9844, -3.9375, -5.8595),
    768: (-1.9974, -3.9896, -5.9766),
}
POLYGON = {  # corners: mean potential at t = 2 without and with self pairs
    2: (0.00034, 0.50017),
    3: (0.00248, 0.33499),
    4: (0.01232, 0.25924),
    8: (0.09413, 0.20736),
    16: (0.15414, 0.20700),
    100: (0.19899, 0.20700),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_uniformity(x: Tensor, t: float, exclude_self: bool, normalize: bool) -> float:
    if normalize:
        x = torch.stack([row / row.norm() if row.norm() > 0 else row for row in x])
    pairs = [(i, j) for i in range(len(x)) for j in range(len(x)) if i != j or not exclude_self]
    return math.log(math.fsum(math.exp(-t * float(((x[i] - x[j]) ** 2).sum())) for i, j in pairs) / len(pairs))


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("t", [0.3, 2.0, 7.0])
@pytest.mark.parametrize("n", [2, 9])
def test_uniformity(exclude_self: bool, normalize: bool, t: float, n: int) -> None:
    x = normal(n, 3) * 0.7
    expected = naive_uniformity(x, t, exclude_self, normalize)
    assert float(uniformity(x, t, exclude_self=exclude_self, normalize=normalize)) == pytest.approx(expected, abs=1e-12)
    assert float(pairwise_potential(x, t, exclude_self=exclude_self, normalize=normalize)) == pytest.approx(
        math.exp(expected), rel=1e-12
    )


@pytest.mark.parametrize("t", [1e-8, 1e-4, 9e-3])
def test_uniformity_of_a_flat_potential_keeps_its_digits_in_float32(t: float) -> None:
    x = normal(300, 8).float()
    squares = (torch.nn.functional.normalize(x.double(), dim=-1).sum(0).square().sum() - 300) / (300 * 299)
    first = -t * 2 * (1 - float(squares))  # the logarithm of a mean near 1; the next term is about t²/4
    assert float(uniformity(x, t)) == pytest.approx(first, rel=1e-6 + t)
    rows = x.requires_grad_()
    (slope,) = torch.autograd.grad(uniformity(rows, t), rows)
    (exact,) = torch.autograd.grad(uniformity(double := x.detach().double().requires_grad_(), t), double)
    torch.testing.assert_close(slope.double() / t, exact / t, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_uniformity_takes_zero_rows_as_points(exclude_self: bool, normalize: bool) -> None:
    x = normal(6, 3)
    x[[1, 4]] = 0
    expected = naive_uniformity(x, 2.0, exclude_self, normalize)
    assert float(uniformity(x, exclude_self=exclude_self, normalize=normalize)) == pytest.approx(expected, abs=1e-12)
    collapsed = uniformity(torch.zeros(5, 3), exclude_self=exclude_self, normalize=normalize)
    assert float(collapsed) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_uniformity_gradient(exclude_self: bool, normalize: bool, masked: bool) -> None:
    x = (normal(2, 5, 3) * 0.5).requires_grad_()
    mask = torch.tensor([[True, False, True, True, True], [True] * 5]) if masked else None
    assert torch.autograd.gradcheck(
        lambda x: uniformity(x, mask=mask, exclude_self=exclude_self, normalize=normalize), x
    )


def test_uniformity_far_from_zero_keeps_its_digits() -> None:
    x = (normal(20, 8) * 0.2 + 300).float()
    expected = naive_uniformity(x.double(), 2.0, True, False)
    assert float(uniformity(x, normalize=False)) == pytest.approx(expected, abs=1e-6)


def test_equal_rows_have_uniformity_zero() -> None:
    x = normal(1, 8).repeat(30, 1)
    assert float(uniformity(x)) == pytest.approx(0, abs=1e-14)
    assert float(uniformity(x.float())) == pytest.approx(0, abs=1e-6)
    assert float(uniformity(x, normalize=False)) == pytest.approx(0, abs=1e-14)
    assert float(pairwise_potential(x)) == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("exclude_self", [False, True])
def test_fewer_than_two_rows_have_uniformity_zero(exclude_self: bool) -> None:
    x = normal(3, 4, 5).requires_grad_()
    mask = torch.tensor([[False] * 4, [False, True, False, False], [True, True, False, False]])
    value = uniformity(x, mask=mask, exclude_self=exclude_self)
    assert value[:2].tolist() == pytest.approx([0, 0], abs=1e-14)
    assert float(value[2].detach()) < 0
    value.sum().backward()
    assert x.grad is not None
    assert float(x.grad[:2].abs().max()) <= 1e-14
    assert bool((x.grad[2, :2] != 0).all())
    assert float(uniformity(x.detach()[0, :1], exclude_self=exclude_self)) == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("corners", list(POLYGON))
def test_polygon(corners: int) -> None:
    angle = torch.arange(corners, dtype=torch.float64) * 2 * math.pi / corners
    x = torch.stack([angle.cos(), angle.sin()], -1)
    without, with_self = float(pairwise_potential(x)), float(pairwise_potential(x, exclude_self=False))
    assert (without, with_self) == pytest.approx(POLYGON[corners], abs=5.1e-6)
    assert without == pytest.approx((corners * with_self - 1) / (corners - 1), rel=1e-10)
    assert math.log(with_self) >= uniformity_optimum(2) - 1e-14
    assert math.log(without) < uniformity_optimum(2)  # an estimate without self pairs may fall below the optimum
    assert math.log(without) >= -8 - 1e-12  # floor −4t


@pytest.mark.parametrize("n", [2, 3, 5, 10, 50])
def test_simplex(n: int) -> None:
    x = torch.eye(n, dtype=torch.float64) - 1 / n
    assert float(uniformity(x)) == pytest.approx(-4 * n / (n - 1), abs=1e-12)


def test_the_two_estimators() -> None:
    x, n = normal(40, 6), 40
    without, with_self = float(uniformity(x)), float(uniformity(x, exclude_self=False))
    assert without == pytest.approx(math.log((n * math.exp(with_self) - 1) / (n - 1)), abs=1e-12)
    assert with_self > uniformity_optimum(6)


def test_a_uniform_sample_is_near_the_optimum() -> None:
    assert float(uniformity(normal(4000, 3))) == pytest.approx(uniformity_optimum(3), abs=5e-3)


def test_no_matrix_of_all_pairs_is_kept(watched) -> None:  # type: ignore[no-untyped-def]
    x = normal(3000, 4).float().requires_grad_()
    with watched as sizes:
        uniformity(x).backward()
    assert 0 < sizes.largest <= TILE["cpu"][1] < 3000**2
    assert 0 < sizes.kept < 40 * x.numel()


def test_second_derivatives_are_refused() -> None:
    x = normal(4, 3).requires_grad_()
    with pytest.raises(RuntimeError, match="only once"):
        torch.autograd.grad(uniformity(x), x, create_graph=True)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("normalize", [False, True])
def test_alignment(alpha: float, normalize: bool) -> None:
    x, y = normal(6, 4), normal(6, 4, seed=1)
    total = 0.0
    for a, b in zip(x, y, strict=True):
        total += float(((a / a.norm() - b / b.norm()) if normalize else a - b).norm()) ** alpha
    assert float(alignment(x, y, alpha, normalize=normalize)) == pytest.approx(total / 6, rel=1e-12)
    mask = torch.arange(6) < 4
    torch.testing.assert_close(
        alignment(x, y, alpha, mask=mask, normalize=normalize), alignment(x[:4], y[:4], alpha, normalize=normalize)
    )
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: alignment(x, y, alpha, normalize=normalize), (x, y.requires_grad_()))


def test_alignment_batched_and_permuted() -> None:
    x, y = normal(3, 6, 4), normal(3, 6, 4, seed=1)
    mask = torch.rand(3, 6, generator=torch.Generator().manual_seed(2)) < 0.6
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    looped = torch.stack([alignment(a[m], b[m]) for a, b, m in zip(x, y, mask, strict=True)])
    torch.testing.assert_close(alignment(x, y, mask=mask), looped, rtol=1e-12, atol=0)
    permuted = alignment(x[:, order], y[:, order], mask=mask[:, order])
    torch.testing.assert_close(permuted, looped, rtol=1e-12, atol=0)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_alignment_of_equal_rows(alpha: float) -> None:
    x = normal(4, 3)
    x[1] = 0
    x.requires_grad_()
    value = alignment(x, x.detach().clone(), alpha)
    value.backward()
    assert float(value.detach()) == 0
    assert x.grad is not None
    assert bool((x.grad == 0).all())


def test_alignment_without_a_real_pair_is_zero() -> None:
    x = torch.full((2, 3, 4), float("nan"))
    assert alignment(x, x, mask=torch.zeros(2, 3, dtype=torch.bool)).tolist() == [0, 0]


def test_bad_arguments() -> None:
    x = normal(4, 3)
    with pytest.raises(ValueError, match="same shape"):
        alignment(x, x[:3])
    with pytest.raises(ValueError, match="alpha"):
        alignment(x, x, 0)
    with pytest.raises(ValueError, match=r"y.*finite"):
        alignment(x, torch.where(x == x[0, 0], math.nan, x))
    for t in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="positive"):
            uniformity(x, t)
    with pytest.raises(ValueError, match="at least"):
        uniformity_optimum(0)
    with pytest.raises(ValueError, match="t positive"):
        uniformity_optimum(3, -1.0)


@pytest.mark.parametrize("d", list(TABLE))
def test_optimum_of_the_table(d: int) -> None:
    assert [uniformity_optimum(d, t) for t in (1.0, 2.0, 3.0)] == pytest.approx(TABLE[d], abs=5.1e-5)


@pytest.mark.parametrize("d", [1, 2, 3, 10, 768, 100_000])
@pytest.mark.parametrize("t", [1e-3, 0.1, 1.0, 2.0, 30.0, 1e3])
def test_optimum_is_the_hypergeometric_function(d: int, t: float) -> None:
    with mpmath.workdps(60):
        expected = float(-2 * mpmath.mpf(t) + mpmath.log(mpmath.hyp0f1(mpmath.mpf(d) / 2, mpmath.mpf(t) ** 2)))
    assert uniformity_optimum(d, t) == pytest.approx(expected, rel=1e-13, abs=4e-12 if t > 100 else 1e-14)
    if t <= 30 and d <= 1000:  # beyond, scipy has fewer digits
        assert uniformity_optimum(d, t) == pytest.approx(-2 * t + math.log(hyp0f1(d / 2, t * t)), abs=1e-11)
