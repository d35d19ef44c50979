import math
from statistics import NormalDist

import pytest
import torch
from tests.losses.slices import SLICES, directions, rows, seeded
from torch import Tensor

from uncollapse.losses import visreg_loss


def naive(x: Tensor, scale: float = 1.0, shape: float = 1.0, centering: float = 1.0) -> float:
    """Eq. 1, 5 and 6 by loops; 1e-6 is added to standard deviations, as in the authors' code."""
    points, (n, d) = x.tolist(), x.shape
    mean = [math.fsum(row[j] for row in points) / n for j in range(d)]
    deviation = [math.sqrt(math.fsum((row[j] - mean[j]) ** 2 for row in points) / n) + 1e-6 for j in range(d)]
    ways, apart = directions(d).T.tolist(), []
    for way in ways:
        projected = sorted(math.fsum(way[j] * (row[j] - mean[j]) / deviation[j] for j in range(d)) for row in points)
        apart += [(p - NormalDist().inv_cdf(i / (n + 1))) ** 2 for i, p in enumerate(projected, 1)]
    first = math.fsum((1 - s) ** 2 for s in deviation) / d
    third = math.fsum(m * m for m in mean) / d
    return scale * first + shape * math.fsum(apart) / len(apart) + centering * third


def ours(x: Tensor, **options: object) -> Tensor:
    return visreg_loss(x, slices=SLICES, generator=seeded(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, 2, 3)])
def test_is_the_papers_terms(weights: tuple[float, float, float]) -> None:
    x, named = 1.3 * rows(9, 5) + 0.2, dict(zip(("scale", "shape", "centering"), weights, strict=True))
    assert ours(x, **named).item() == pytest.approx(naive(x, *weights), rel=1e-6)  # directions are drawn in float32


def test_batches_and_masks() -> None:
    x = rows(4, 8, 3)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False, True] + [False] * 6, [False] * 8])
    x[~mask] = torch.nan
    x.requires_grad_()
    value = ours(x, mask=mask)
    assert value.item() == pytest.approx((naive(x.detach()[0]) + naive(x.detach()[1, :5])) / 2, rel=1e-6)
    value.backward()
    assert x.grad.isfinite().all()
    assert x.grad[~mask].abs().max() == x.grad[2].abs().max() == 0
    every = rows(2, 3, 7, 4)
    assert ours(every).item() == pytest.approx(sum(naive(one) for one in every.flatten(0, 1)) / 6, rel=1e-6)


def test_gradcheck_of_scale_and_centre() -> None:
    x, mask = rows(2, 5, 3), torch.tensor([[True] * 5, [True, False, True, True, False]])
    assert torch.autograd.gradcheck(lambda x: ours(x, mask=mask, shape=0.0), (x.requires_grad_(),))


def test_the_shape_does_not_act_on_the_scale() -> None:
    x = rows(12, 4).requires_grad_()
    value = ours(x, scale=0.0, centering=0.0)
    (got,) = torch.autograd.grad(value, x)
    mean, deviation = x.mean(0), x.std(0, correction=0).detach() + 1e-6
    place = torch.arange(1, 13, dtype=torch.float64) / 13
    shape = (((x - mean) / deviation @ directions(4)).sort(0).values - torch.special.ndtri(place)[:, None]).square()
    torch.testing.assert_close(got, torch.autograd.grad(shape.mean(), x)[0], rtol=1e-5, atol=1e-8)


def test_collapsed_rows_keep_a_gradient() -> None:
    x = (1e-4 * rows(20, 4)).requires_grad_()
    ours(x).backward()
    assert x.grad.norm() > 0.1


def test_degenerate_rows() -> None:
    for x in (torch.full((5, 3), 0.3), torch.zeros(5, 3)):
        x.requires_grad_()
        value = ours(x)
        value.backward()
        assert value.item() == pytest.approx(naive(x.detach().double()), rel=1e-4)
        assert x.grad.isfinite().all()
    one = torch.ones(1, 3, requires_grad=True)
    ours(one).backward()
    assert ours(one).item() == 0
    assert one.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = rows(30, 4).to(dtype)
    assert ours(x).dtype == torch.float32
    assert ours(x).item() == pytest.approx(naive(x.double()), rel=1e-4)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="slices"):
        visreg_loss(rows(3, 2), slices=0)
