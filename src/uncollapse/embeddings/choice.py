"""Choose how to mend embeddings from their geometry alone, or to leave them as they are."""

from dataclasses import dataclass

from uncollapse.embeddings.scatter import Scatter

ALIKE = 0.3  # mean cosine from which removing common directions has helped
TOP_ROWS = 10  # rows per removed direction


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
