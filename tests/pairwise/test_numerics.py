import numpy
import pytest
import torch

import uncollapse as uc
from uncollapse.pairwise import numerics


def test_finite_values_whose_sum_overflows_are_accepted() -> None:
    numerics.check_finite(torch.full((4, 2), 3e38), "x")
    with pytest.raises(ValueError, match=r"x.*1 NaN"):
        numerics.check_finite(torch.tensor([3e38] * 7 + [float("inf")]), "x")


def test_masked_rows_may_hold_anything() -> None:
    x = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]])
    assert numerics.prepare_tokens(x, torch.tensor([True, False])).tolist() == [[1, 2], [0, 0]]
    assert numerics.prepare_tokens(x.half(), torch.tensor([True, False])).dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (5,), (1,), (2, 5), (3, 4), (1, 2, 4)])
def test_masks_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"per token"):
        numerics.check_tokens(torch.ones(2, 4, 3), torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 4)])
def test_masks_that_fit(shape: tuple[int, ...]) -> None:
    numerics.check_tokens(torch.ones(2, 4, 3), torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_centred_leaves_no_rounding_of_equal_entries(dtype: torch.dtype) -> None:
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(0), dtype=dtype).repeat(999, 1)
    assert bool((numerics.center(x, None) == 0).all())
    x[0, 0] += 1e-3
    assert float(numerics.center(x, None)[0, 0]) == pytest.approx(1e-3 * 998 / 999, rel=1e-3)
    assert float(numerics.center(x, None)[1, 0]) == pytest.approx(
        -1e-3 / 999, rel=0.2 if dtype == torch.float32 else 1e-9
    )


def test_unit_rows_has_a_finite_gradient_at_zero():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    unit = numerics.unit_rows(x)
    unit.sum().backward()
    torch.testing.assert_close(unit.detach(), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    assert x.grad is not None
    assert x.grad.abs().max() < 10


def test_inverse_norms_beyond_the_range_of_squares():
    x = torch.tensor([[3.0, 4.0], [3e-30, 4e-30], [3e30, 4e30], [0.0, 0.0], [1e-45, 0.0]], requires_grad=True)
    inverse = numerics.inverse_norms(x)
    torch.testing.assert_close(inverse, torch.tensor([0.2, 2e29, 2e-31, 0, 0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(numerics.unit_rows(x).norm(dim=-1), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    (slope,) = torch.autograd.grad(numerics.unit_rows(x)[[0, 3]].sum(), x)
    assert bool(torch.isfinite(slope).all())
    assert slope[3].tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_unit_rows_of_float64_whose_squares_over_or_underflow(scale):
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(numerics.unit_rows(scale * x), numerics.unit_rows(x))
    torch.testing.assert_close(uc.mean_cosine(scale * x), uc.mean_cosine(x))  # not 0, as for zero rows
    torch.testing.assert_close(uc.uniformity(scale * x), uc.uniformity(x))


def test_unit_rows_gradcheck():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(numerics.unit_rows, (x,))
    assert torch.autograd.gradgradcheck(numerics.unit_rows, (x,))


@pytest.mark.parametrize("measure", [uc.effective_rank, uc.uniform_loss, uc.uniformity_interval])
def test_an_array_of_numpy_is_named_with_what_to_do(measure):
    with pytest.raises(TypeError, match=r"x must be a torch tensor, got ndarray; convert it with torch\.as_tensor"):
        measure(numpy.ones((3, 2), dtype="float32"))


@pytest.mark.parametrize("name", ["rows", "pairs"])
def test_rows_of_numpy_are_named_with_what_to_do(name):
    x, array = torch.ones(3, 2), numpy.ones((3, 2), dtype="float32")
    rows, pairs = ([x, array], None) if name == "rows" else ([x], [array])
    says = rf"{name} must be a torch tensor, got ndarray; convert it with torch\.as_tensor"
    for measure in (lambda: uc.diagnose_rows(rows, pairs=pairs), lambda: uc.diagnose_rows(rows[::-1], pairs=pairs)):
        with pytest.raises(TypeError, match=says):
            measure()
    with pytest.raises(TypeError, match=says):
        uc.RowStatistics(2).update(rows[-1], None if pairs is None else pairs[0])
