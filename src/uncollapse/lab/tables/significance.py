"""Compare settings: paired differences with their interval and exact test, Holm's correction, intervals of means.

All intervals are Student's t intervals at 95 %: they assume that the values are roughly normal, which a few seeds can
neither confirm nor refute. The sign-flip test does not assume it.
"""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uncollapse.errors import UsageError

if TYPE_CHECKING:  # the command line starts without it
    import numpy as np
    from numpy.typing import NDArray

EXACT = 12  # pairs up to which all 2ⁿ signs are tried
FLIPS = 100_000  # random ones beyond
SAME = 1e-12  # of the sum of sizes: sums that are equal on paper differ by their rounding
CONFIDENCE = 0.95  # of all intervals
NODES = 64  # of the quadrature in `t_quantile`, which is then exact to about 1e-12

Interval = tuple[float, float]


@dataclass(frozen=True)
class Paired:
    """Differences a − b over common seeds. p: two-sided, of the sign-flip test. left_out: seeds of one side alone."""

    differences: dict[int, float]
    p: float
    left_out: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        """The number of pairs."""
        return len(self.differences)

    @property
    def mean(self) -> float:
        """Of the differences."""
        return statistics.fmean(self.differences.values())

    @property
    def std(self) -> float | None:
        """Of the differences, with n − 1; None for a single pair."""
        return statistics.stdev(self.differences.values()) if self.n > 1 else None

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of the mean difference; None for a single pair."""
        return mean_interval(self.mean, self.std, self.n)


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """Return the differences between two sets of metrics by seed, with an exact test.

    Under the null hypothesis each difference could as well have the other sign. p is the share of all 2ⁿ choices of
    signs whose mean is at least as far from 0 as the observed one: with n = 5 it cannot be below 2/32. Beyond 12 pairs,
    100,000 random choices with a fixed seed are used, and the observed one counts as one of them, so that p is never 0.

    >>> found = compare({0: 0.82, 1: 0.81, 2: 0.84, 3: 0.83}, {0: 0.80, 1: 0.80, 2: 0.80, 3: 0.80})
    >>> found.n, round(found.mean, 4), found.p
    (4, 0.025, 0.125)
    """
    import numpy as np

    common = sorted(a.keys() & b.keys())
    if not common:
        raise UsageError(
            "A paired comparison needs metrics of the same seeds on both sides: "
            f"one has the seeds {sorted(a)}, the other {sorted(b)}."
        )
    differences = {seed: a[seed] - b[seed] for seed in common}
    p = sign_flip(np.array(list(differences.values())))
    return Paired(differences, p, tuple(sorted(a.keys() ^ b.keys())))


def sign_flip(differences: "NDArray[np.float64]") -> float:
    """Return the two-sided p of the sign-flip permutation test of a mean of 0."""
    import numpy as np

    n = len(differences)
    came = abs(float(differences.sum())) - SAME * float(np.abs(differences).sum())
    if n <= EXACT:
        flips = 1 - 2.0 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)  # (2ⁿ, n): all signs
        return float(np.mean(np.abs(flips @ differences) >= came))
    signs = np.random.default_rng(0).integers(0, 2, (FLIPS, n), dtype=np.int8) * 2 - 1
    return float((np.count_nonzero(np.abs(signs @ differences) >= came) + 1) / (FLIPS + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values of a family of tests, adjusted by Holm's step-down method, in the given order.

    The smallest of m is multiplied by m, the next by m − 1, and so on; none may be below the one before it, or above 1.
    If no difference is real, the chance that any adjusted p is at most 0.05 is at most 0.05.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = floor
    return adjusted


def adjust(pairs: Sequence[Paired]) -> list[float | None]:
    """Return Holm's p of each comparison of a family; None for a single pair, which cannot be tested."""
    adjusted = iter(holm([pair.p for pair in pairs if pair.n > 1]))
    return [next(adjusted) if pair.n > 1 else None for pair in pairs]


def mean_interval(mean: float, std: float | None, n: int, family: int = 1) -> Interval | None:
    """Return Student's 95 % interval of a mean of n values with standard deviation `std`; None if n < 2.

    family: how many such intervals shall hold together with 95 % (Bonferroni), as when the best of them is chosen.

    >>> [round(end, 2) for end in mean_interval(2.0, 1.0, 6)], [round(end, 2) for end in mean_interval(2.0, 1.0, 6, 10)]
    ([0.95, 3.05], [0.05, 3.95])
    """
    if std is None or n < 2:
        return None
    half = t_quantile(n - 1, 1 - (1 - CONFIDENCE) / family) * std / math.sqrt(n)
    return mean - half, mean + half


def difference_interval(
    mean: float, deviations: tuple[float | None, float | None], counts: tuple[int | None, int | None]
) -> Interval | None:
    """Return the 95 % interval of the difference `mean` between the means of two independent samples.

    The standard error is Welch's, √(s₁²/n₁ + s₂²/n₂). The degrees of freedom are the smaller n − 1 instead of Welch's
    estimate: that is conservative, and a noisier sample can then only widen the interval. None if a deviation is not
    known, or is of fewer than two values.
    """
    known = [(s, n) for s, n in zip(deviations, counts, strict=True) if s is not None and n is not None and n > 1]
    if len(known) < 2:
        return None
    half = t_quantile(min(n for _, n in known) - 1) * math.sqrt(sum(s**2 / n for s, n in known))
    return mean - half, mean + half


@functools.cache
def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """Return the t with P(|T| ≤ t) = confidence for Student's T with at least one degree of freedom.

    With t = √ν·tan θ the density becomes proportional to cos^(ν−1) θ, which is integrated by quadrature and inverted by
    bisection.

    >>> round(t_quantile(4), 3)
    2.776
    """
    import numpy as np

    points, weights = np.polynomial.legendre.leggauss(NODES)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        inside = scale * angle * float(weights @ np.cos(angle * (points + 1) / 2) ** (freedom - 1))
        low, high = (angle, high) if inside < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(high)
