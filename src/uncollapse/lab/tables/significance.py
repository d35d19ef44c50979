"""Is one setting better than another? Differences between runs of the same seed, and how likely they are by chance."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uncollapse.errors import UsageError

if TYPE_CHECKING:  # the command line starts without it
    import numpy as np
    from numpy.typing import NDArray

EXACT = 12  # pairs up to which all 2ⁿ signs are tried
FLIPS = 100_000  # random ones beyond
SAME = 1e-12  # of the sum of sizes: sums that are equal on paper differ by their rounding


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


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """The differences between two sets of figures by seed, with an exact test.

    If both were alike, each difference could as well have the other sign. p is the share of all 2ⁿ choices of signs
    whose mean is at least as far from 0 as the one that came: with n = 5 it cannot be below 2/32. Beyond 12 pairs,
    100,000 random choices with a fixed seed stand for all, and the one that came counts as one of them, so that p is
    never 0.

    >>> found = compare({0: 0.82, 1: 0.81, 2: 0.84, 3: 0.83}, {0: 0.80, 1: 0.80, 2: 0.80, 3: 0.80})
    >>> found.n, round(found.mean, 4), found.p
    (4, 0.025, 0.125)
    """
    import numpy as np

    common = sorted(a.keys() & b.keys())
    if not common:
        raise UsageError(
            "A paired comparison needs figures of the same seed on both sides: "
            f"one has the seeds {sorted(a)}, the other {sorted(b)}."
        )
    differences = {seed: a[seed] - b[seed] for seed in common}
    p = sign_flip(np.array(list(differences.values())))
    return Paired(differences, p, tuple(sorted(a.keys() ^ b.keys())))


def sign_flip(differences: "NDArray[np.float64]") -> float:
    """The two-sided p of the sign-flip permutation test of a mean of 0."""
    import numpy as np

    n = len(differences)
    came = abs(float(differences.sum())) - SAME * float(np.abs(differences).sum())
    if n <= EXACT:
        flips = 1 - 2.0 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)  # (2ⁿ, n): all signs
        return float(np.mean(np.abs(flips @ differences) >= came))
    signs = np.random.default_rng(0).integers(0, 2, (FLIPS, n), dtype=np.int8) * 2 - 1
    return float((np.count_nonzero(np.abs(signs @ differences) >= came) + 1) / (FLIPS + 1))
