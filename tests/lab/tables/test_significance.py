"""The paired test against a loop over all signs; it, intervals and Holm's correction against scipy and loops."""

import statistics
from itertools import product

import numpy as np
import pytest
from scipy.stats import permutation_test, t, ttest_1samp, ttest_ind

from uncollapse.errors import UsageError
from uncollapse.lab.tables.significance import (
    compare,
    difference_interval,
    holm,
    mean_interval,
    sign_flip,
    t_quantile,
)


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
    with pytest.raises(UsageError, match=r"\[0, 1\].*\[7\]"):
        compare({0: 0.8, 1: 0.9}, {7: 0.5})


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 29, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_quantiles_of_student(freedom: int, confidence: float) -> None:
    beyond = t.sf(t_quantile(freedom, confidence), freedom)  # quantiles of older versions of scipy are less exact
    assert beyond == pytest.approx((1 - confidence) / 2, rel=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_interval_of_paired_differences_as_scipy_has_it(n: int) -> None:
    a, b = np.random.default_rng(n).normal(size=(2, n))
    found = compare(dict(enumerate(a)), dict(enumerate(b))).interval
    expected = ttest_1samp(a - b, 0.0).confidence_interval(0.95)
    assert found == pytest.approx((expected.low, expected.high))


def test_intervals_of_little() -> None:
    assert compare({0: 0.5}, {0: 0.4}).interval is None
    assert mean_interval(3.0, 0.0, 4) == (3.0, 3.0)
    assert mean_interval(3.0, None, 4) is None
    assert difference_interval(1.0, (0.0, 0.0), (5, 5)) == (1.0, 1.0)
    for deviations, counts in (((None, 1.0), (1, 5)), ((1.0, 1.0), (5, None)), ((1.0, None), (5, 5))):
        assert difference_interval(1.0, deviations, counts) is None


def test_interval_of_two_samples_is_welchs_or_wider() -> None:
    """Welch's own with its fewest degrees of freedom: the same error, a larger quantile."""
    generator = np.random.default_rng(0)
    for n, m in ((5, 5), (3, 8), (2, 5)):
        a, b = generator.normal(0, 1, n), generator.normal(0.5, 3, m)
        difference = float(a.mean() - b.mean())
        low, high = difference_interval(difference, (a.std(ddof=1), b.std(ddof=1)), (n, m))
        error = (a.var(ddof=1) / n + b.var(ddof=1) / m) ** 0.5
        half = t.ppf(0.975, min(n, m) - 1) * error
        assert (low, high) == pytest.approx((difference - half, difference + half))
        welch = ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
        assert low <= welch.low
        assert high >= welch.high


def naive_holm(p_values: list[float]) -> list[float]:
    """The definition: of all tests with a p at most this one's, the largest (number not below it) × p."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    return [
        max(
            min(1.0, (len(p_values) - rank) * p_values[order[rank]])
            for rank in range(len(p_values))
            if rank <= order.index(i)
        )
        for i in range(len(p_values))
    ]


def test_holm() -> None:
    generator = np.random.default_rng(1)
    for size in (0, 1, 2, 7, 20):
        p_values = list(generator.uniform(0, 0.2, size))
        assert holm(p_values) == pytest.approx(naive_holm(p_values))
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.02, 0.02]) == pytest.approx([0.04, 0.04])
