import pytest
import torch
from torch import Tensor

from uncollapse.metrics import (
    feature_correlation,
    feature_variance,
    mean_cosine,
    outlier_share,
    token_variance,
)
from uncollapse.pairwise import pair_means


@pytest.fixture
def x() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, 5, generator=generator, dtype=torch.float64) + 1


def naive_cosine(x: Tensor, absolute: bool) -> float:
    n, total = len(x), 0.0
    for i in range(n):
        for j in range(n):
            norms = float(x[i].norm() * x[j].norm())
            if i != j and norms > 0:
                cosine = float(x[i] @ x[j]) / norms
                total += abs(cosine) if absolute else cosine
    return total / (n * (n - 1))


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_mean_cosine_is_the_mean_over_pairs(x: Tensor, absolute: bool, center: bool) -> None:
    x[2] = 0
    expected = naive_cosine(x - x.mean(0) if center else x, absolute)
    assert float(mean_cosine(x, absolute=absolute, center=center)) == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_mean_cosine_gradient(x: Tensor, absolute: bool, center: bool) -> None:
    mask = torch.tensor([True] * 5 + [False, True])
    assert torch.autograd.gradcheck(
        lambda x: mean_cosine(x, mask, absolute=absolute, center=center), x.requires_grad_(), atol=1e-7
    )


def test_mean_cosine_of_opposite_and_equal_tokens() -> None:
    opposite = torch.tensor([[1.0, 2.0], [-2.0, -4.0]])
    assert float(mean_cosine(opposite)) == pytest.approx(-1, abs=1e-6)
    assert float(mean_cosine(opposite, absolute=True)) == pytest.approx(1, abs=1e-6)
    assert float(mean_cosine(torch.full((50, 3), 0.1))) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("absolute", [False, True])
def test_equal_tokens_have_no_centred_cosine(dtype: torch.dtype, absolute: bool) -> None:
    same = torch.randn(1, 64, generator=torch.Generator().manual_seed(1), dtype=dtype).repeat(1000, 1)
    assert float(mean_cosine(same, center=True, absolute=absolute)) == 0


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_mean_cosine_does_not_depend_on_size(x: Tensor, size: float) -> None:
    x = x.float()
    torch.testing.assert_close(mean_cosine(x * size), mean_cosine(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_single_token_has_cosine_zero(absolute: bool) -> None:
    assert float(mean_cosine(torch.ones(1, 3), absolute=absolute)) == 0


@pytest.mark.parametrize("tile", [1, 7, 20, 48])
def test_absolute_does_not_depend_on_its_tiles(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    x = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    whole = mean_cosine(x, absolute=True)
    (slope,) = torch.autograd.grad(whole.sum(), x)
    monkeypatch.setattr(pair_means, "TILE", tile)
    tiled = mean_cosine(x, absolute=True)
    torch.testing.assert_close(tiled, whole, rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.autograd.grad(tiled.sum(), x)[0], slope, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("absolute", [False, True])
def test_no_matrix_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch, watched, absolute: bool) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(pair_means, "TILE", 1 << 13)
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(3), requires_grad=True)
    with watched as sizes:
        mean_cosine(x, absolute=absolute).backward()
    assert 0 < sizes.largest <= 1 << 13
    assert 0 < sizes.kept < 40 * x.numel()


def test_token_variance_is_the_projected_norm(x: Tensor) -> None:
    n = len(x)
    e = torch.full((n, 1), n**-0.5, dtype=x.dtype)
    expected = ((torch.eye(n, dtype=x.dtype) - e @ e.T) @ x).norm() ** 2
    torch.testing.assert_close(token_variance(x), expected, rtol=1e-13, atol=0)
    assert torch.autograd.gradcheck(token_variance, x.requires_grad_())


def test_token_variance_of_nearly_equal_tokens_far_from_zero() -> None:
    x = 1000 + torch.tensor([[0.0], [0.25]]).repeat(500, 1)
    assert float(token_variance(x)) == pytest.approx(1000 * 0.125**2, rel=1e-6)
    assert float(token_variance(torch.full((1000, 3), 0.1))) == 0


def test_feature_variance_is_that_of_the_published_code(x: Tensor) -> None:
    expected = sum(sum((v - row.mean()) ** 2 for v in row) / (len(row) - 1) for row in x)
    assert float(feature_variance(x)) == pytest.approx(float(expected), rel=1e-13)
    assert float(feature_variance(x[:, :1])) == 0
    assert torch.autograd.gradcheck(feature_variance, x.requires_grad_())


def test_feature_correlation_is_numpys(x: Tensor) -> None:
    correlation = x.T.corrcoef().abs()
    d = len(correlation)
    expected = (correlation.sum() - d) / (d * (d - 1))
    torch.testing.assert_close(feature_correlation(x), expected, rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(feature_correlation, x.requires_grad_(), atol=1e-7)


def test_too_many_features_to_compare_are_refused() -> None:
    with pytest.raises(ValueError, match="sample"):
        feature_correlation(torch.zeros(2, 10**6))


def test_constant_features_correlate_with_nothing() -> None:
    x = torch.full((30, 3), 0.1, dtype=torch.float64)
    assert float(feature_correlation(x)) == 0
    x[:, 0] = torch.linspace(0, 1, 30)
    assert float(feature_correlation(x)) == pytest.approx(0, abs=1e-15)
    x[:, 1] = -2 * x[:, 0] + 5
    assert float(feature_correlation(x)) == pytest.approx(1 / 3, abs=1e-12)
    assert float(feature_correlation(x[:, :1])) == 0
    assert float(feature_correlation(x[:1])) == 0


@pytest.mark.parametrize("k", [1, 3, 5, 9])
def test_outlier_share_is_the_share_of_the_largest(x: Tensor, k: int) -> None:
    x[:, 3] *= 10
    variance = sorted((float(v) for v in x.var(0)), reverse=True)
    assert float(outlier_share(x, k=k)) == pytest.approx(sum(variance[:k]) / sum(variance), rel=1e-12)


def test_outlier_share_gradient_and_edges(x: Tensor) -> None:
    assert torch.autograd.gradcheck(lambda x: outlier_share(x, k=2), x.requires_grad_())
    assert float(outlier_share(torch.full((9, 4), 0.1))) == 0
    assert float(outlier_share(torch.tensor([[1e25, 0.0], [-1e25, 1e25]]), k=1)) == pytest.approx(0.8, rel=1e-6)
    with pytest.raises(ValueError, match="at least"):
        outlier_share(x, k=0)
