"""Gather the geometry of embeddings in one pass, and choose from it how to mend them, or to leave them as they are."""

from dataclasses import dataclass

from torch import Tensor

from uncollapse.diagnosis.stats.compensated_sum import CompensatedSum
from uncollapse.diagnosis.stats.moments import Moments
from uncollapse.diagnosis.stats.streaming import check_entries, chunks, flat_rows
from uncollapse.errors import UsageError

LARGEST = 1e70  # largest entry whose fourth powers can be summed without overflow
ROUNDING = 1e-12  # smallest share of Σ ‖x‖⁴ that float64 sums resolve to about 1 %
EXTRA = ("fourth", "weighted")
ALIKE = 0.3  # mean cosine from which removing common directions has helped
TOP_ROWS = 10  # rows per removed direction


class Scatter:
    """Moments of rows, and the fourth-order sums that Ledoit–Wolf shrinkage needs; parts can be merged exactly.

        fourth = Σ_i ‖x_i‖⁴     weighted = Σ_i ‖x_i‖² x_i

    With these and the `Moments`, Σ_i ‖x_i − mean‖⁴ follows without a second pass.

    Args:
        dim: The number of features d. Memory is that of a few (d, d) matrices in float64.
    """

    def __init__(self, dim: int) -> None:
        self.moments = Moments(dim)
        self._sums = {"fourth": CompensatedSum.zero(1), "weighted": CompensatedSum.zero(dim)}

    @property
    def dim(self) -> int:
        """Return the number of features."""
        return self.moments.dim

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return self.moments.count

    def update(self, x: Tensor) -> None:
        """Add rows (..., d). NaN, infinite and huge entries (beyond 1e70) raise an error, and nothing is added."""
        flat = flat_rows(x, None, self.dim)
        check_entries(flat, LARGEST)
        self.moments.update(x)
        for rows in chunks(flat):
            each = rows.double()
            squares = each.square().sum(-1)
            self._sums["fourth"].add(squares.square().sum()[None])
            self._sums["weighted"].add(squares @ each)

    def merge(self, other: "Scatter") -> "Scatter":
        """Return the sums over both sets of rows, as a new object."""
        merged = Scatter.__new__(Scatter)
        merged.moments = self.moments.merge(other.moments)
        merged._sums = {name: self._sums[name].merge(other._sums[name]) for name in EXTRA}
        return merged

    def shrinkage(self) -> float:
        """Return the weight, from 0 to 1, with which the covariance shrinks towards a multiple of the identity.

        Ledoit & Wolf, A well-conditioned estimator for large-dimensional covariance matrices (2004): the weight that
        minimizes the expected squared error. UsageError if the mean is so much longer than the spread around it that
        rounding would decide, as with equal rows.
        """
        covariance, n, d = self.moments.covariance(), self.count, self.dim
        mu = float(covariance.trace()) / d
        total = float(covariance.square().sum())
        spread = total / d - mu**2  # squared distance of the covariance to mu·I, per feature
        if spread <= 1e-12 * mu**2:
            return 1.0
        error = (self._centered_fourth() / n - total) / (d * n)
        return min(max(error, 0.0), spread) / spread

    def _centered_fourth(self) -> float:
        """Return Σ_i ‖x_i − mean‖⁴, from ‖x − m‖² = ‖x‖² − 2x·m + ‖m‖²."""
        moments, mean = self.moments, self.moments.mean()
        c, squares = float(mean @ mean), float(moments.gram.trace())
        along = float(mean @ moments.gram @ mean)  # Σ (x·m)²
        fourth, weighted = float(self._sums["fourth"].value[0]), float(self._sums["weighted"].value @ mean)
        centered = fourth - 4 * weighted + 4 * along + 2 * c * squares - 3 * self.count * c**2
        if centered < ROUNDING * fourth:
            raise UsageError(
                "The mean of the rows is too long, compared with their spread, to choose the shrinkage of whitening. "
                "Subtract the mean first, or pass shrinkage as a number from 0 to 1."
            )
        return centered


@dataclass(frozen=True)
class Geometry:
    """What the choice is made from: the number of rows and features, and the mean cosine of two rows."""

    rows: int
    dim: int
    mean_cosine: float


@dataclass(frozen=True)
class Advice:
    """What to do with embeddings, and why. k: directions to remove, for all_but_the_top."""

    method: str
    reason: str
    k: int | None = None


def measure(scatter: Scatter) -> Geometry:
    """Return the geometry of rows."""
    return Geometry(scatter.count, scatter.dim, float(scatter.moments.mean_cosine()))


def usual_k(dim: int) -> int:
    """Return how many directions all_but_the_top removes of d features: d/100, at least 1 (arXiv 1702.01417)."""
    return max(1, min(round(dim / 100), dim - 1))


def advise(geometry: Geometry) -> Advice:
    """Return what to do with rows of a geometry.

    >>> advise(Geometry(10_000, 384, 0.05)).method, advise(Geometry(10_000, 384, 0.6)).method
    ('none', 'all_but_the_top')
    """
    cosine, k = geometry.mean_cosine, usual_k(geometry.dim)
    if cosine < ALIKE:
        return Advice("none", f"the mean cosine of two rows is {cosine:.2f}, below {ALIKE}: they are not alike")
    alike = f"the mean cosine of two rows is {cosine:.2f}: they share directions that say little about them"
    if geometry.rows < TOP_ROWS * k or geometry.dim < 2:
        return Advice("center", f"{alike}, and {geometry.rows:,} rows are too few to find more than their mean")
    return Advice("all_but_the_top", alike, k)
