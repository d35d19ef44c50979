import cmath
import math

import pytest
import torch
from tests.losses.slices import SLICES, directions, rows, seeded
from torch import Tensor

from uncollapse.losses import sigreg_loss


def naive(x: Tensor, low: float = -3.0, high: float = 3.0, points: int = 33) -> float:
    """Epps–Pulley over [low, high] of each projection, with complex numbers and the trapezoidal rule."""
    projected, step = (x @ directions(x.shape[1])).T.tolist(), (high - low) / (points - 1)
    total = 0.0
    for slice_ in projected:
        heights = []
        for k in range(points):
            t = low + k * step
            empirical = sum(cmath.exp(1j * t * p) for p in slice_) / len(slice_)
            heights.append(abs(empirical - math.exp(-t * t / 2)) ** 2 * math.exp(-t * t / 2))
        total += len(slice_) * step * (math.fsum(heights) - (heights[0] + heights[-1]) / 2)
    return total / len(projected)


def ours(x: Tensor, **options: object) -> Tensor:
    return sigreg_loss(x, slices=SLICES, generator=seeded(), **options)  # type: ignore[arg-type]


def test_is_the_papers_statistic() -> None:
    x = 1.3 * rows(9, 5) + 0.2
    assert ours(x).item() == pytest.approx(naive(x), rel=1e-6)  # directions are drawn in float32
    paper = naive(x, -5.0, 5.0, 17)
    assert ours(x, t_max=5.0, points=9).item() == pytest.approx(paper, rel=1e-6)


def test_batches_and_masks() -> None:
    x = rows(4, 8, 3)
    mask = torch.tensor([[True] * 8, [True] * 5 + [False] * 3, [False, True] + [False] * 6, [False] * 8])
    x[~mask] = torch.nan
    x.requires_grad_()
    value = ours(x, mask=mask)
    parts = [naive(x.detach()[i][mask[i]]) for i in range(3)]
    assert value.item() == pytest.approx(sum(parts) / 3, rel=1e-6)
    value.backward()
    assert x.grad.isfinite().all()
    assert x.grad[~mask].abs().max() == 0
    every = rows(2, 3, 7, 4)
    assert ours(every).item() == pytest.approx(sum(naive(one) for one in every.flatten(0, 1)) / 6, rel=1e-6)


def test_gradcheck() -> None:
    x, mask = rows(2, 5, 3), torch.tensor([[True] * 5, [True, False, True, True, False]])
    assert torch.autograd.gradcheck(lambda x: ours(x, mask=mask), (x.requires_grad_(),))


def test_gaussian_rows_are_best() -> None:
    x = rows(2000, 4)
    values = [ours(x * scale + shift).item() for scale, shift in ((1, 0), (0.7, 0), (1.4, 0), (1, 0.3))]
    assert values[0] < 0.2 * min(values[1:])
    assert ours(x.sign()).item() > 5 * values[0]  # the same two moments, another shape


def test_degenerate_rows() -> None:
    for x in (torch.zeros(10, 4), torch.zeros(1, 4)):
        x.requires_grad_()
        value = sigreg_loss(x)
        value.backward()
        assert value.item() == pytest.approx(0.402 * len(x), rel=1e-3)
        assert x.grad.abs().max() == 0
    assert ours(torch.ones(5, 3)).item() == pytest.approx(naive(torch.ones(5, 3).double()), rel=1e-4)
    nothing = sigreg_loss(torch.ones(2, 3), mask=torch.zeros(2, dtype=torch.bool))
    assert nothing.item() == 0


def test_directions_are_new_in_every_call_and_repeatable() -> None:
    x = 2 * rows(20, 5)
    torch.manual_seed(0)
    first, second = sigreg_loss(x, slices=3), sigreg_loss(x, slices=3)
    torch.manual_seed(0)
    assert first != second
    assert first == sigreg_loss(x, slices=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = rows(30, 4).to(dtype)
    assert ours(x).dtype == torch.float32
    assert ours(x).item() == pytest.approx(naive(x.double()), rel=1e-4)


def test_bad_input() -> None:
    for options in ({"slices": 0}, {"points": 1}, {"t_max": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            sigreg_loss(rows(3, 2), **options)  # type: ignore[arg-type]
