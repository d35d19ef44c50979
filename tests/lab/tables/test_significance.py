"""The paired test against a loop over all signs, and against scipy."""

import statistics
from itertools import product

import numpy as np
import pytest
from scipy.stats import permutation_test

from uncollapse.errors import UsageError
from uncollapse.lab.tables.significance import compare, sign_flip


def naive(differences: list[float]) -> float:
    came = abs(sum(differences))
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    return sum(value >= came - 1e-12 for value in sums) / len(sums)


@pytest.mark.parametrize("n", [1, 2, 5, 9, 12])
def test_all_signs(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.4, 1.0, n)
    assert sign_flip(differences) == pytest.approx(naive(list(differences)), abs=1e-15)


def test_as_scipy_does_it() -> None:
    x, y = np.random.default_rng(3).normal(size=(2, 10))
    found = permutation_test((x - y,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip(x - y) == pytest.approx(found.pvalue)


def test_ties_and_rounding() -> None:
    assert sign_flip(np.zeros(6)) == 1.0
    assert sign_flip(np.array([0.1, 0.2, -0.3])) == 1.0  # 0 on paper, 5e-17 in floating point
    assert sign_flip(np.full(6, 0.1)) == 2 / 64


def test_many_pairs_are_sampled_and_repeat() -> None:
    differences = np.random.default_rng(0).normal(0.5, 1.0, 16)
    exact = naive(list(differences))
    assert sign_flip(differences) == pytest.approx(exact, abs=4 * (exact / 100_000) ** 0.5 + 1e-4)
    assert sign_flip(differences) == sign_flip(differences)
    assert sign_flip(np.ones(40)) == pytest.approx(1 / 100_001)


def test_seeds_are_matched_whatever_their_order() -> None:
    found = compare({0: 0.80, 1: 0.82, 2: 0.84, 3: 0.90}, {9: 0.1, 1: 0.80, 0: 0.79})
    assert found.differences == pytest.approx({0: 0.01, 1: 0.02})
    assert (found.n, found.left_out, found.p) == (2, (2, 3, 9), 0.5)
    assert found.mean == pytest.approx(0.015)
    assert found.std == pytest.approx(statistics.stdev((0.01, 0.02)))
    assert compare({0: 0.5}, {0: 0.4}).std is None


def test_no_pairs() -> None:
    with pytest.raises(UsageError, match=r"one has the seeds \[0, 1\], the other \[7\]"):
        compare({0: 0.8, 1: 0.9}, {7: 0.5})
