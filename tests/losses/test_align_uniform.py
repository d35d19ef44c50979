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


def moco_uniform(x: Tensor, queue: Tensor, t: float, within: bool) -> Tensor:
    """As the authors' code for MoCo has it: all distances to the queue and, if asked for, those within the batch."""
    squared = torch.cdist(x, queue).square().flatten()
    if within:
        squared = torch.cat([squared, torch.pdist(x).square()])
    return squared.mul(-t).exp().mean().log()


@pytest.mark.parametrize("t", [0.5, 3.0])
@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("unit", [True, False])
def test_a_queue_is_the_authors(t: float, within: bool, unit: bool) -> None:
    x, queue = 0.4 * rows(7, 4), 0.4 * rows(23, 4, seed=1)
    pair = (normalize(x, dim=-1), normalize(queue, dim=-1)) if unit else (x, queue)
    got = uniform_loss(x, t, queue=queue, within=within, normalize=unit)
    torch.testing.assert_close(got, moco_uniform(*pair, t, within), rtol=1e-12, atol=0)
    both = uniform_loss(x, t, y=x.flip(-1), queue=queue, within=within, normalize=unit)
    other = moco_uniform(pair[0].flip(-1), pair[1], t, within)
    torch.testing.assert_close(both, (got + other) / 2, rtol=1e-12, atol=0)


def test_a_queue_of_many_tiles_and_batches() -> None:
    x, queue = rows(2, 40, 3).requires_grad_(), normalize(rows(3000, 3, seed=1), dim=-1)
    expected = torch.stack([moco_uniform(normalize(one, dim=-1), queue, 2, True) for one in x]).mean()
    got = uniform_loss(x, queue=queue)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(value, x)[0] for value in (got, expected)]
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-9, atol=1e-12)


def test_degenerate_queues() -> None:
    one, keys = torch.tensor([[1.0, 0, 0]]), torch.tensor([[-2.0, 0, 0]])
    assert uniform_loss(one, queue=keys).item() == pytest.approx(-8, abs=1e-5)  # one row has no pair within
    assert uniform_loss(torch.ones(4, 3), queue=torch.ones(6, 3)).item() == pytest.approx(0, abs=1e-6)
    x = torch.zeros(4, 3, requires_grad=True)
    value = uniform_loss(x, queue=torch.ones(6, 3), within=False)
    value.backward()
    assert value.item() == pytest.approx(-2, abs=1e-6)  # zeros lie in the middle of the sphere
    assert x.grad is not None
    assert x.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_queue_in_half_precision(dtype: torch.dtype) -> None:
    x, queue = rows(40, 8).to(dtype), rows(60, 8, seed=1).float()
    got = uniform_loss(x, queue=queue)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(uniform_loss(x.double(), queue=queue.double()).item(), rel=1e-5)


@pytest.mark.parametrize("unit", [True, False])
def test_gradcheck_with_a_queue(unit: bool) -> None:
    x, queue = rows(5, 3).requires_grad_(), rows(6, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, queue: uniform_loss(x, 1.5, queue=queue, normalize=unit), (x, queue))


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
        (lambda: uniform_loss(rows(5, 3), rows(5, 3)), TypeError, "a second view as y="),
        (lambda: align_loss(rows(5, 3), rows(5, 3), torch.ones(5)), TypeError, "alpha must be a number"),
        (lambda: uniform_loss(rows(5, 3), y=rows(6, 3)), ValueError, "same shape"),
        (lambda: uniform_loss(torch.ones(5, 3, dtype=torch.int)), TypeError, "floating-point"),
        (lambda: uniform_loss(rows(5, 3), queue=rows(4, 2)), ValueError, r"queue must be a float tensor \(K, 3\)"),
        (lambda: uniform_loss(rows(5, 3), queue=rows(0, 3)), ValueError, "at least one row"),
        (lambda: uniform_loss(rows(5, 3), queue=rows(1, 4, 3)), ValueError, r"\(1, 4, 3\)"),
        (lambda: uniform_loss(rows(5, 3), queue=rows(4, 3), exclude_self=False), ValueError, "no pairs of a row with"),
    ],
)
def test_bad_input(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]
