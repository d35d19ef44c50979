import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from uncollapse.losses import align_loss, uniform_loss


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def authors_align(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    return (normalize(x, dim=-1) - normalize(y, dim=-1)).norm(dim=-1).pow(alpha).mean()


def authors_uniform(x: Tensor, t: float) -> Tensor:
    return torch.pdist(normalize(x, dim=-1)).pow(2).mul(-t).exp().mean().log()


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.5])
def test_align_is_the_papers_formula(alpha: float) -> None:
    x, y = rows(11, 4), rows(11, 4, seed=1)
    total = 0.0
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        p, q = [v / math.hypot(*a) for v in a], [v / math.hypot(*b) for v in b]
        total += math.dist(p, q) ** alpha
    assert align_loss(x, y, alpha).item() == pytest.approx(total / 11, rel=1e-12)
    torch.testing.assert_close(align_loss(x, y, alpha), authors_align(x, y, alpha), rtol=1e-12, atol=0)


@pytest.mark.parametrize("t", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("exclude_self", [True, False])
def test_uniform_is_the_papers_formula(t: float, exclude_self: bool) -> None:
    x = rows(11, 4)
    unit = normalize(x, dim=-1).tolist()
    pairs = [(i, j) for i in range(11) for j in range(11) if i != j or not exclude_self]
    mean = math.fsum(math.exp(-t * math.dist(unit[i], unit[j]) ** 2) for i, j in pairs) / len(pairs)
    got = uniform_loss(x, t, exclude_self=exclude_self)
    assert got.item() == pytest.approx(math.log(mean), rel=1e-12)
    if exclude_self:
        torch.testing.assert_close(got, authors_uniform(x, t), rtol=1e-12, atol=0)


def test_two_views_are_averaged() -> None:
    x, y = rows(11, 4), rows(11, 4, seed=1)
    expected = (authors_uniform(x, 2) + authors_uniform(y, 2)) / 2
    torch.testing.assert_close(uniform_loss(x, y=y), expected, rtol=1e-12, atol=0)


def test_without_normalisation_distances_are_the_rows_own() -> None:
    x, y = 0.3 * rows(11, 4), 0.3 * rows(11, 4, seed=1)
    torch.testing.assert_close(uniform_loss(x, normalize=False), torch.pdist(x).pow(2).mul(-2).exp().mean().log())
    torch.testing.assert_close(align_loss(x, y, normalize=False), (x - y).square().sum(-1).mean())


def test_batches_are_looped_and_averaged() -> None:
    x, y = rows(2, 3, 7, 4), rows(2, 3, 7, 4, seed=1)
    pairs = zip(x.flatten(0, 1), y.flatten(0, 1), strict=True)
    each = [(authors_align(a, b, 2), authors_uniform(a, 2)) for a, b in pairs]
    torch.testing.assert_close(align_loss(x, y), torch.stack([a for a, _ in each]).mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(uniform_loss(x), torch.stack([u for _, u in each]).mean(), rtol=1e-12, atol=0)


def test_gradient_beyond_one_tile_is_the_authors() -> None:
    x = rows(1500, 3).requires_grad_()
    (expected,) = torch.autograd.grad(authors_uniform(x, 2), x)
    (got,) = torch.autograd.grad(uniform_loss(x), x)
    assert (got - expected).norm() <= 1e-10 * expected.norm()


@pytest.mark.parametrize("unit", [True, False])
def test_gradcheck(unit: bool) -> None:
    x, y = rows(5, 3).requires_grad_(), rows(5, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, y: align_loss(x, y, 1.5, normalize=unit), (x, y))
    assert torch.autograd.gradcheck(lambda x, y: uniform_loss(x, 1.5, y=y, normalize=unit), (x, y))
    assert torch.autograd.gradcheck(lambda x: uniform_loss(x, normalize=unit, exclude_self=False), (x,))


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_aligned_rows_have_loss_and_gradient_zero(alpha: float) -> None:
    x = rows(5, 3).requires_grad_()
    value = align_loss(x, x.detach(), alpha)
    value.backward()
    assert value.item() == 0
    assert x.grad.abs().max() == 0


def test_pinned_and_degenerate_values() -> None:
    assert uniform_loss(torch.eye(8), t=3).item() == pytest.approx(-6, abs=1e-5)  # all at distance √2
    assert uniform_loss(torch.ones(6, 3)).item() == pytest.approx(0, abs=1e-6)
    assert uniform_loss(torch.ones(1, 3)).item() == 0
    assert uniform_loss(torch.tensor([[1.0, 0], [-1, 0]])).item() == pytest.approx(-8, abs=1e-5)  # the floor, −4t
    x = torch.zeros(4, 3, requires_grad=True)
    total = uniform_loss(x) + align_loss(x, torch.ones(4, 3))
    total.backward()
    assert total.item() == pytest.approx(1, abs=1e-6)
    assert x.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x, y = rows(40, 8).to(dtype), rows(40, 8, seed=1).to(dtype)
    assert align_loss(x, y).dtype == uniform_loss(x).dtype == torch.float32
    assert align_loss(x, y).item() == pytest.approx(align_loss(x.double(), y.double()).item(), rel=1e-5)
    assert uniform_loss(x, y=y).item() == pytest.approx(uniform_loss(x.double(), y=y.double()).item(), rel=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(n=st.integers(2, 12), d=st.integers(1, 6), t=st.floats(0.1, 8), seed=st.integers(0, 1000))
def test_any_shape(n: int, d: int, t: float, seed: int) -> None:
    x, y = rows(n, d, seed=seed), rows(n, d, seed=seed + 1)
    torch.testing.assert_close(uniform_loss(x, t), authors_uniform(x, t), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(align_loss(x, y), authors_align(x, y, 2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: align_loss(rows(5, 3), rows(4, 3)), ValueError, "same shape"),
        (lambda: align_loss(rows(5, 3), rows(5, 3), 0.0), ValueError, "alpha must be positive"),
        (lambda: align_loss(rows(5), rows(5)), ValueError, r"\(\.\.\., n, d\)"),
        (lambda: uniform_loss(rows(5, 3), 0.0), ValueError, "t must be positive"),
        (lambda: uniform_loss(rows(5, 3), y=rows(6, 3)), ValueError, "same shape"),
        (lambda: uniform_loss(torch.ones(5, 3, dtype=torch.int)), TypeError, "floating-point"),
    ],
)
def test_bad_input(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
