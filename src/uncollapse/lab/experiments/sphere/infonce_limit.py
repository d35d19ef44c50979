"""InfoNCE with M negatives compared with its limit for M → ∞ (Wang & Isola, arXiv 2005.10242, Theorem 1).

For a positive pair (x, y) and negatives x⁻ let c = e^{x·y/τ} / E e^{x·x⁻/τ} and r = e^{x·x⁻/τ} / E e^{x·x⁻/τ}, whose
mean is 1. Then, with r̄ the mean of M draws of r,

    L_M − log M = [−x·y/τ + log E e^{x·x⁻/τ}] + log(c/M + r̄)

The brackets are the limit. The mean of the rest is the bias; with u = (r̄ − 1) / (1 + c/M), whose mean is 0, it is

    log(1 + c/M) + E[log(1 + u) − u]  →  (c − Var r / 2) / M

After subtracting u, the noise falls as 1/M, like the bias itself, so that the bias can be measured for any M. A single
draw deviates from its mean by √(Var r / M).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.metrics.hypersphere import uniformity_optimum
from uncollapse.pairwise import Pairs, all_pairs, numerics

Array = NDArray[np.float64]
BLOCKS = 256  # means of M negatives that one set of negatives gives, at most: small M have enough of them
ERRORS = 2.0  # standard errors on either side of a slope


@dataclass(frozen=True)
class Terms:
    """The two terms of the limit: −E x·y/τ, and E_x log E_{x⁻} e^{x·x⁻/τ}."""

    alignment: float
    uniformity: float

    @property
    def limit(self) -> float:
        """Return the limit of L_M − log M."""
        return self.alignment + self.uniformity


@dataclass(frozen=True)
class Pair:
    """A positive pair among its negatives: c and the variance of r, as above. draw: draws values of r."""

    positive: float
    variance: float
    draw: Callable[[np.random.Generator, tuple[int, int]], Array]


def collapsed_terms(temperature: float) -> Terms:
    """Return the terms where all points are one: perfectly aligned, and as far from uniform as possible."""
    return Terms(-1 / temperature, 1 / temperature)


def uniform_terms(dim: int, temperature: float) -> Terms:
    """Return the terms at the optimum: pairs perfectly aligned, and points uniform on the sphere in R^m."""
    return Terms(-1 / temperature, uniformity_optimum(dim, 1 / (2 * temperature)) + 1 / temperature)


def uniform_pair(dim: int, temperature: float) -> Pair:
    """Return a pair at the optimum. By symmetry all are alike, and the law of their negatives is known exactly."""
    if dim < 2:
        raise UsageError(f"Uniform points on the sphere need at least 2 dimensions, got {dim}.")
    log_mean = uniform_terms(dim, temperature).uniformity
    log_square = uniformity_optimum(dim, 1 / temperature) + 2 / temperature

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
        along = generator.standard_normal(shape)  # a Gaussian's direction is uniform
        across = generator.chisquare(dim - 1, shape)
        return np.exp(along / np.sqrt(along**2 + across) / temperature - log_mean)

    return Pair(math.exp(1 / temperature - log_mean), math.expm1(log_square - 2 * log_mean), draw)


class Population:
    """Two unit views x, y (n, d) of n images, which are the whole distribution.

    Every view is an anchor with the other view as its partner. Its negatives are the views of all other images, equally
    likely and drawn with replacement, so the limit of each pair is exact.
    """

    def __init__(self, x: Tensor, y: Tensor, temperature: float) -> None:
        if x.shape != y.shape or x.dim() != 2 or len(x) < 2:
            raise UsageError(
                f"Expected two views (n, d) of at least two images, got shapes {tuple(x.shape)} and {tuple(y.shape)}."
            )
        numerics.check_finite(x, "x")
        numerics.check_finite(y, "y")
        self.rows, self.temperature = torch.cat([x, y]).double(), temperature
        self.partner = torch.arange(2 * len(x)).roll(len(x))
        self.positives = (self.rows * self.rows[self.partner]).sum(-1) / temperature
        others = Pairs(no_self=True, excluded=torch.stack([torch.arange(2 * len(x)), self.partner]))
        sums = all_pairs(self.rows, self.rows, None, temperature, others)[1]
        self.log_means = sums - math.log(2 * len(x) - 2)

    def terms(self) -> Terms:
        """Return the terms of the limit."""
        return Terms(-float(self.positives.mean()), float(self.log_means.mean()))

    def anchors(self, count: int, seed: int) -> Tensor:
        """Return the indices of `count` random views, or of all if there are no more."""
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed))
        return order[:count]

    def pairs(self, anchors: Tensor) -> Iterator[Pair]:
        """Yield the pairs of some anchors."""
        for at in anchors.tolist():
            logs = self.rows @ self.rows[at] / self.temperature - self.log_means[at]
            is_other = torch.ones(len(logs), dtype=torch.bool)
            is_other[[at, int(self.partner[at])]] = False
            yield finite_pair(math.exp(float(self.positives[at] - self.log_means[at])), logs[is_other].exp().numpy())


def finite_pair(positive: float, values: Array) -> Pair:
    """Return a pair whose r is one of some equally likely values with mean 1."""

    def draw(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
        return values.take(generator.integers(len(values), size=shape, dtype=np.int32))

    return Pair(positive, float(values.var()), draw)


@dataclass(frozen=True)
class Slope:
    """Slope of a line through logarithms, with an interval of two standard errors over the pairs."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curves:
    """Measurements of each pair for each number of negatives, as arrays (pairs, counts).

    biases: mean of the term after the limit. noise: variance of that mean over draws of the negatives. variances:
    variance of a single draw.
    """

    counts: tuple[int, ...]
    biases: Array
    noise: Array
    variances: Array

    @property
    def bias(self) -> Array:
        """Return the mean bias over the pairs."""
        mean: Array = self.biases.mean(0)
        return mean

    @property
    def error(self) -> Array:
        """Return the standard error of the bias of these pairs, which comes from the drawn negatives alone."""
        found: Array = np.sqrt(self.noise.sum(0)) / len(self.noise)
        return found

    @property
    def fluctuation(self) -> Array:
        """Return the standard deviation of a single draw for a fixed pair: the root of the mean variance over pairs."""
        found: Array = np.sqrt(self.variances.mean(0))
        return found

    def bias_slope(self, least: int) -> Slope | None:
        """Return the slope of the bias from `least` negatives on; None where the bias changes its sign or is 0."""
        return fit_slope(self.counts, self.biases, least)

    def fluctuation_slope(self, least: int) -> Slope | None:
        """Return the slope of the fluctuation from `least` negatives on; None where there is none."""
        return fit_slope(self.counts, self.variances, least, root=True)


def measure_curves(pairs: Iterable[Pair], largest: int, draws: int, seed: int) -> Curves:
    """Return the bias and the fluctuation for 1, 2, 4 … `largest` negatives.

    Args:
        pairs: One pair or more.
        largest: Largest number of negatives, a power of two.
        draws: Sets of `largest` negatives per pair, at least 2. Smaller sets are parts of them.
        seed: Seed of the draws.
    """
    counts = tuple(2**power for power in range(largest.bit_length()))
    generator = np.random.default_rng(seed)
    found = np.array([list(_levels(pair, counts, draws, generator)) for pair in pairs])
    return Curves(counts, found[..., 0], found[..., 1], found[..., 2])


def _levels(
    pair: Pair, counts: tuple[int, ...], draws: int, generator: np.random.Generator
) -> Iterator[tuple[float, float, float]]:
    """Yield for each number of negatives the bias, the variance of this mean, and that of a single draw."""
    means = pair.draw(generator, (draws, counts[-1]))
    for count in counts:
        if count > 1:
            means = (means[:, ::2] + means[:, 1::2]) / 2
        own = pair.positive / count
        u = (means[:, :BLOCKS].ravel() - 1) / (1 + own)
        logs = np.log1p(u)
        rest = logs - u
        yield math.log1p(own) + rest.mean(), rest.var(ddof=1) / len(rest), logs.var(ddof=1)


def fit_slope(counts: tuple[int, ...], values: Array, least: int, *, root: bool = False) -> Slope | None:
    """Fit the slope of log |mean over pairs of values (pairs, counts)| over log M, for M from `least` on.

    The standard error is a jackknife over the pairs. root: fit the root of the mean instead.
    """
    asked = np.array(counts) >= least
    if asked.sum() < 2 or len(values) < 2:
        raise UsageError(
            f"A slope needs at least two pairs, and two numbers of negatives from {least} on; got {len(values)} pairs "
            f"and {asked.sum()} numbers."
        )
    x, chosen = np.log(np.array(counts)[asked]), values[:, asked]
    means = np.concatenate([chosen.mean(0)[None], (chosen.sum(0) - chosen) / (len(chosen) - 1)])
    if not ((means > 0).all() or (means < 0).all()):
        return None
    slopes = np.log(np.abs(means)) @ (x - x.mean()) / ((x - x.mean()) ** 2).sum() / (2 if root else 1)
    error = math.sqrt((len(chosen) - 1) * slopes[1:].var())
    return Slope(float(slopes[0]), float(slopes[0] - ERRORS * error), float(slopes[0] + ERRORS * error))
