"""Resampling, and the mean of a stream of which a sample is kept."""

import math

import pytest
import torch

from uncollapse.diagnosis.stats.scalar import VALUES, ScalarStats
from uncollapse.metrics import bootstrap
from uncollapse.metrics.bootstrap import Bootstrap, mean_interval


def test_blocks_add_up_and_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.cat(list(Bootstrap(draws=7, seed=5).chosen(11)))
    assert whole.shape == (7, 11)
    assert 0 <= int(whole.min()) <= int(whole.max()) <= 10
    monkeypatch.setattr(bootstrap, "BLOCK", 25)  # two draws at a time
    assert [len(block) for block in Bootstrap(draws=7, seed=5).chosen(11)] == [2, 2, 2, 1]


def test_ends_lean_the_other_way_than_the_draws() -> None:
    ratios = torch.tensor([-1.0, 0.0, 4.0])
    assert Bootstrap(0.99).ends(2.0, 0.1, ratios, (0.0, 4.0)) == pytest.approx((1.6, 2.1))
    assert Bootstrap(0.99).ends(2.0, 1.0, ratios, (0.0, 2.5)) == (0.0, 2.5)


def test_draws_that_say_nothing() -> None:
    asked = Bootstrap(0.9)
    assert asked.ends(2.0, 0.1, torch.tensor([math.nan]), (0.0, 4.0)) == (0.0, 4.0)
    assert asked.ends(2.0, 0.1, torch.tensor([math.inf, -1.0, math.nan]), (0.0, 4.0)) == pytest.approx((0.0, 2.1))
    assert asked.ends(2.0, 0.0, torch.tensor([math.inf]), (0.0, 4.0)) == (2.0, 2.0)


def test_the_value_is_never_outside() -> None:
    assert Bootstrap(0.5).ends(1.0, 1.0, torch.tensor([0.1, 0.2, 0.3]), (0.0, 4.0)) == pytest.approx((0.7, 1.0))


def test_a_sample_tells_the_shape_and_all_numbers_the_width() -> None:
    numbers = torch.rand(5 * VALUES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread, asked = ScalarStats(0), Bootstrap(draws=300)
    for part in numbers.split(1000):
        spread.update(part)
    found = spread.interval(1.0, asked)
    assert (found.value, found.rows) == (pytest.approx(float(numbers.mean()), rel=1e-12), 5 * VALUES)
    exact = mean_interval(numbers, float(numbers.mean()), float(numbers.std()), len(numbers), 1.0, asked)
    assert found.high - found.low == pytest.approx(exact.high - exact.low, rel=0.15)
    kept = mean_interval(numbers[:VALUES], 0.5, float(numbers.std()), VALUES, 1.0, asked)
    assert found.high - found.low == pytest.approx((kept.high - kept.low) / math.sqrt(5), rel=0.15)
