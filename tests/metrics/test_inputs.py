import pytest
import torch

from uncollapse.metrics import inputs


def test_finite_values_whose_sum_overflows_are_accepted() -> None:
    inputs.check_finite(torch.full((4, 2), 3e38), "x")
    with pytest.raises(ValueError, match="x must be finite, got 1 NaN or Inf among 8 entries"):
        inputs.check_finite(torch.tensor([3e38] * 7 + [float("inf")]), "x")


def test_masked_rows_may_hold_anything() -> None:
    x = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]])
    assert inputs.tokens(x, torch.tensor([True, False])).tolist() == [[1, 2], [0, 0]]
    assert inputs.tokens(x.half(), torch.tensor([True, False])).dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (5,), (1,), (2, 5), (3, 4), (1, 2, 4)])
def test_masks_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 4\), one entry a token"):
        inputs.check_tokens(torch.ones(2, 4, 3), torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 4)])
def test_masks_that_fit(shape: tuple[int, ...]) -> None:
    inputs.check_tokens(torch.ones(2, 4, 3), torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_centred_leaves_no_rounding_of_equal_entries(dtype: torch.dtype) -> None:
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(0), dtype=dtype).repeat(999, 1)
    assert bool((inputs.centred(x, None) == 0).all())
    x[0, 0] += 1e-3
    assert float(inputs.centred(x, None)[0, 0]) == pytest.approx(1e-3 * 998 / 999, rel=1e-3)
    assert float(inputs.centred(x, None)[1, 0]) == pytest.approx(
        -1e-3 / 999, rel=0.2 if dtype == torch.float32 else 1e-9
    )
