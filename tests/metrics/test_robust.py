"""Robust measures against their formulas, written out in float64 for one set at a time."""

import math

import pytest
import torch
from torch import Tensor

from uncollapse.metrics import robust


def kept_rows(x: Tensor, mask: Tensor) -> Tensor:
    """The real rows without the features of largest energy."""
    rows = x[mask].double()
    k = min(robust.FEATURES, rows.shape[1] // 16)
    energy = rows.square().sum(0)
    order = energy.argsort(descending=True)
    if energy[order[k:]].sum() < robust.REST * energy.sum():
        k = 0
    return rows[:, sorted(order[k:].tolist())]


def naive_cosine(x: Tensor, mask: Tensor) -> float:
    rows = kept_rows(x, mask)
    pairs = [(i, j) for i in range(len(rows)) for j in range(len(rows)) if i != j]
    return sum(float(rows[i] @ rows[j] / (rows[i].norm() * rows[j].norm())) for i, j in pairs) / len(pairs)


def naive_rank(rows: Tensor) -> float:
    sigma = torch.linalg.svdvals(rows)
    p = (sigma / sigma.sum()).tolist()
    return math.exp(-sum(q * math.log(q) for q in p if q > 1e-12))


def naive_share(x: Tensor, mask: Tensor) -> float:
    rows = kept_rows(x, mask)
    unit = rows / rows.norm(dim=1, keepdim=True)
    dropped = min(robust.FEATURES, x.shape[-1] // 16)
    return naive_rank(unit - unit.mean(0)) / min(len(rows) - 1, x.shape[-1] - dropped)


@pytest.mark.parametrize("dim", [4, 20, 64])
def test_measures_equal_their_formulas_with_padding(dim: int) -> None:
    x = torch.randn(3, 12, dim, generator=torch.Generator().manual_seed(dim)) + 0.5
    x[..., 0] *= 30
    mask = torch.arange(12) < torch.tensor([12, 7, 5])[:, None]
    x[~mask] = torch.nan
    cosine, share = robust.robust_cosine(x, mask), robust.rank_share(x, mask)
    for number in range(3):
        assert float(cosine[number]) == pytest.approx(naive_cosine(x[number], mask[number]), abs=2e-6)
        assert float(share[number]) == pytest.approx(naive_share(x[number], mask[number]), abs=1e-6)


def test_sample_share_equals_its_formula() -> None:
    rows = torch.randn(200, 24, generator=torch.Generator().manual_seed(0)) @ torch.randn(24, 24)
    unit = rows.double() / rows.double().norm(dim=1, keepdim=True)
    shift = unit - unit.mean(0)
    want = naive_rank(shift / shift.square().mean(0).sqrt()) / 24
    assert float(robust.sample_rank_share(rows)) == pytest.approx(want, abs=1e-6)


def test_rogue_features_do_not_rule() -> None:
    x = torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 64, dtype=torch.bool)
    rogue = x.clone()
    rogue[..., 5] += 1000
    rogue[..., 7] *= 1000
    assert float(robust.robust_cosine(rogue, mask).abs().max()) < 0.02
    assert float((robust.rank_share(rogue, mask) - robust.rank_share(x, mask)).abs().max()) < 0.02


def test_features_that_are_all_there_is_are_no_outliers() -> None:
    x = torch.zeros(1, 32, 64)
    x[..., :2] = torch.randn(1, 32, 2, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 32, dtype=torch.bool)
    assert float(robust.rank_share(x, mask)) == pytest.approx(2 / 31, rel=0.05)


def test_first_real_token_with_either_padding() -> None:
    mask = torch.tensor([[True, True, True, False], [False, True, True, True], [False] * 4])
    assert robust.drop_first_token(mask).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
        [False] * 4,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rows_and_zero_rows(dtype: torch.dtype) -> None:
    same = torch.randn(48, dtype=dtype).expand(1, 9, 48)
    mask = torch.ones(1, 9, dtype=torch.bool)
    assert float(robust.robust_cosine(same, mask)) == pytest.approx(1, abs=1e-6)
    assert float(robust.rank_share(same, mask)) == 0
    assert float(robust.sample_rank_share(same[0])) == 0
    zero = torch.zeros(1, 9, 48, dtype=dtype)
    assert float(robust.robust_cosine(zero, mask)) == 1
    assert float(robust.rank_share(zero, mask)) == 0
    assert float(robust.sample_rank_share(zero[0, :1])) == 0
