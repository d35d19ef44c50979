import pytest
import torch
from torch import Tensor

from uncollapse.metrics import effective_rank, participation_ratio, rankme, singular_values, stable_rank
from uncollapse.metrics.spectrum import rank_from_singular_values

RANKS = [effective_rank, stable_rank, participation_ratio, rankme]


def with_spectrum(n: int, sigma: Tensor, d: int, seed: int = 0) -> Tensor:
    """A float64 matrix (n, d) with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    k = len(sigma)
    u = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64))[0]
    return (u * sigma) @ v.T


def naive(metric: object, sigma: Tensor) -> float:
    """The metric from the singular values, written from its definition."""
    if metric is stable_rank:
        return float((sigma**2).sum() / sigma.max() ** 2)
    if metric is participation_ratio:
        return float((sigma**2).sum() ** 2 / (sigma**4).sum())
    p = sigma + (1e-7 if metric is rankme else 0)
    p = p / p.sum()
    return float(torch.exp(-sum(q * torch.log(q) for q in p if q > 0)))


@pytest.mark.parametrize("metric", RANKS)
@pytest.mark.parametrize(("n", "d"), [(200, 64), (64, 200), (128, 768), (50, 50), (1, 9), (9, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_condition_of_a_million(metric, n: int, d: int, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    x = with_spectrum(n, torch.logspace(0, -6, min(n, d), dtype=torch.float64), d).to(dtype)
    expected = naive(metric, torch.linalg.svdvals(x.double()))
    assert float(metric(x)) == pytest.approx(expected, rel=1e-6)  # 1e-4 is what was promised


@pytest.mark.parametrize("metric", RANKS)
def test_centred(metric) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 5
    assert float(metric(x, center=True)) == pytest.approx(naive(metric, torch.linalg.svdvals(x - x.mean(0))), rel=1e-12)
    assert float(metric(x, center=True)) != pytest.approx(float(metric(x)), rel=0.1)


@pytest.mark.parametrize("center", [False, True])
def test_singular_values(center: bool) -> None:
    sigma = torch.logspace(0, -9, 6, dtype=torch.float64)
    x = with_spectrum(10, sigma, 6)
    if not center:
        torch.testing.assert_close(singular_values(x), sigma, rtol=1e-6, atol=0)
    expected = torch.linalg.svdvals(x - x.mean(0) if center else x)
    torch.testing.assert_close(singular_values(x, center=center), expected, rtol=1e-6, atol=0)
    mask = torch.tensor([True] * 4 + [False] * 6)
    masked = singular_values(x, mask, center=center)
    torch.testing.assert_close(masked[:4], singular_values(x[:4], center=center), rtol=1e-9, atol=1e-15)
    assert float(masked[4:].abs().max()) <= 1e-15
    assert singular_values(x.half()[None]).shape == (1, 6)
    assert singular_values(x.half()).dtype == torch.float32


def test_isotropic_spectrum_has_full_rank() -> None:
    x = torch.linalg.qr(torch.randn(1000, 768, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    for metric in RANKS:
        assert float(metric(x)) == pytest.approx(768, rel=1e-9)
        assert float(metric(x.float())) <= 768
    assert float(rankme(x)) <= 768
    assert float(effective_rank(x)) <= 768


@pytest.mark.parametrize("metric", RANKS)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_rank_deficient(metric, rank: int) -> None:  # type: ignore[no-untyped-def]
    sigma = torch.linspace(1, 2, rank, dtype=torch.float64)
    x = with_spectrum(60, sigma, 40).requires_grad_()
    expected = naive(metric, torch.cat([sigma, torch.zeros(40 - rank, dtype=torch.float64)]))
    value = metric(x)
    assert float(value.detach()) == pytest.approx(expected, rel=1e-9)
    value.backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    assert float(x.grad.abs().max()) < 100


@pytest.mark.parametrize("metric", RANKS)
@pytest.mark.parametrize("center", [False, True])
def test_equal_tokens_have_rank_one_or_zero(metric, center: bool) -> None:  # type: ignore[no-untyped-def]
    for dtype in (torch.float32, torch.float64):
        same = torch.randn(1, 32, generator=torch.Generator().manual_seed(1), dtype=dtype).repeat(100, 1)
        assert float(metric(same, center=center)) == pytest.approx(0 if center else 1, abs=1e-4)


@pytest.mark.parametrize("metric", RANKS)
def test_zero_matrix_has_rank_zero(metric) -> None:  # type: ignore[no-untyped-def]
    x = torch.zeros(3, 4, 5, requires_grad=True)
    metric(x).sum().backward()
    assert metric(x.detach()).tolist() == [0, 0, 0]
    assert x.grad is not None
    assert bool((x.grad == 0).all())
    assert float(metric(torch.zeros(0, 5))) == 0


@pytest.mark.parametrize("metric", RANKS)
@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
@pytest.mark.parametrize("center", [False, True])
def test_gradient(metric, shape: tuple[int, int], center: bool) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    mask = torch.arange(shape[0]) != 1
    assert torch.autograd.gradcheck(lambda x: metric(x, mask, center=center), x)


def test_gradient_of_singular_values() -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(singular_values, x)


@pytest.mark.parametrize("metric", [effective_rank, stable_rank, participation_ratio])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-30), (torch.float32, 1e30), (torch.float64, 1e-250)])
def test_scale_does_not_matter(metric, dtype: torch.dtype, size: float) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3), dtype=dtype)
    torch.testing.assert_close(metric(x * size), metric(x), rtol=1e-5, atol=0)


def test_rankme_counts_the_singular_values_of_real_rows() -> None:
    x = with_spectrum(12, torch.tensor([1.0, 1e-5], dtype=torch.float64), 8)
    eps = 1e-3  # large, so that each added ε is seen
    mask = torch.arange(12) < 3
    torch.testing.assert_close(rankme(x, mask, eps=eps), rankme(x[:3], eps=eps), rtol=1e-9, atol=0)
    sigma = torch.linalg.svdvals(x[:3]) + eps
    p = sigma / sigma.sum()
    assert float(rankme(x, mask, eps=eps)) == pytest.approx(float(torch.exp(-(p * p.log()).sum())), rel=1e-9)
    assert len(sigma) == 3
    with pytest.raises(ValueError, match=r"eps.*negative"):
        rankme(x, eps=-1)


def test_rankme_adds_eps_at_every_scale_of_the_input() -> None:
    x = with_spectrum(9, torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64), 3)
    for size in (1e-7, 1.0, 1e7):
        sigma = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64) * size + 1e-7
        p = sigma / sigma.sum()
        assert float(rankme(x * size)) == pytest.approx(float(torch.exp(-(p * p.log()).sum())), rel=1e-9)


def test_rank_from_singular_values() -> None:
    sigma = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    rank = rank_from_singular_values(sigma)
    assert rank.tolist() == pytest.approx([2, 0, 1])
    rank.sum().backward()
    assert sigma.grad is not None
    assert bool(torch.isfinite(sigma.grad).all())
    assert rank_from_singular_values(torch.zeros(2, 0)).tolist() == [0, 0]
