"""Metrics of alignment and uniformity on the unit sphere (Wang & Isola, arXiv 2005.10242)."""

import math

import numpy as np
from torch import Tensor

from uncollapse.pairwise import all_ranks, numerics
from uncollapse.pairwise.pair_means import log_potential, pair_distances
from uncollapse.registry import metric

SHARPEST = 1e6  # largest t: beyond it the series of the optimum takes too long
ROUNDING = 1e-5  # what float32 may leave of 0 in a uniformity, per unit of t
PAPER = "Alignment and Uniformity on the Hypersphere, ICML 2020, arXiv 2005.10242"


@metric(needs=("tokens", "pairs"), better=None, bounds=(0, None), paper=PAPER)
def alignment(
    x: Tensor,
    y: Tensor,
    alpha: float = 2.0,
    *,
    mask: Tensor | None = None,
    normalize: bool = True,
    gather: bool = False,
) -> Tensor:
    """Return the mean distance of positive pairs.

        (1/n) Σ_i ‖x_i − y_i‖^α

    Wang & Isola, arXiv 2005.10242. A small value means invariance, but a collapsed encoder has 0 too: read it together
    with `uniformity`.

    Args:
        x: rows (..., n, d).
        y: their partners (..., n, d).
        alpha: the exponent, positive.
        mask: (..., n) bool, True = a real pair.
        normalize: divide each row by its norm first; a zero row stays zero.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), in float32 or float64; 0 without a real pair.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> alignment(x, x.flip(0))
    tensor(2.)
    """
    all_ranks.check_one_set(x, gather)
    numerics.check_tokens(x, mask)
    numerics.check_tokens(y, mask, "y")
    if x.shape != y.shape:
        raise ValueError(f"x and y must have the same shape, got {tuple(x.shape)} and {tuple(y.shape)}.")
    numerics.check_positive_number(alpha, "alpha")
    numerics.check_finite(numerics.prepare(x, mask), "x")
    numerics.check_finite(numerics.prepare(y, mask), "y")
    each = pair_distances(x, y, alpha, mask, normalize)
    summed = all_ranks.total(each.sum(-1), gather)
    return summed / all_ranks.total(numerics.real_count(numerics.to_full(x), mask), gather).clamp(min=1)


@metric(better="lower", bounds=(None, 0), paper=PAPER)
def uniformity(
    x: Tensor,
    t: float = 2.0,
    *,
    mask: Tensor | None = None,
    exclude_self: bool = True,
    normalize: bool = True,
    gather: bool = False,
) -> Tensor:
    """Return the logarithm of the mean Gaussian potential over all pairs of rows.

        log mean_{i≠j} exp(−t‖x_i − x_j‖²)

    Wang & Isola, arXiv 2005.10242. 0 is full collapse; `uniformity_optimum` is the value of a uniform distribution.
    Memory is linear in n.

    Args:
        x: rows (..., n, d).
        t: sharpness of the potential, positive.
        mask: (..., n) bool, True = a real row.
        exclude_self: exclude the pairs i = j, as the authors do. Otherwise the value is never below the optimum.
        normalize: divide each row by its norm first; a zero row stays zero. Otherwise distances are in float64.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), in float32 or float64; 0 with fewer than two real rows.

    >>> import torch
    >>> uniformity(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]))
    tensor(-8.)
    """
    numerics.check_positive_number(t, "t")
    all_ranks.check_one_set(x, gather)
    return log_potential(numerics.prepare_tokens(x, mask), t, mask, exclude_self, normalize, gather)


@metric(better="lower", bounds=(0, 1), paper=PAPER)
def pairwise_potential(
    x: Tensor,
    t: float = 2.0,
    *,
    mask: Tensor | None = None,
    exclude_self: bool = True,
    normalize: bool = True,
    gather: bool = False,
) -> Tensor:
    """Return the mean Gaussian potential over all pairs of rows: exp of `uniformity`, with the same arguments.

        mean_{i≠j} exp(−t‖x_i − x_j‖²)

    Wang & Isola, arXiv 2005.10242.

    Returns:
        (...), between 0 and 1; 1 is full collapse, and is returned for fewer than two real rows.

    >>> import torch
    >>> pairwise_potential(torch.zeros(2, 3))
    tensor(1.)
    """
    return uniformity(x, t, mask=mask, exclude_self=exclude_self, normalize=normalize, gather=gather).exp()


def uniformity_optimum(d: int, t: float = 2.0) -> float:
    """Return the lowest `uniformity` of any distribution on the unit sphere in R^d, that of the uniform one.

        −2t + log ₀F₁(; d/2; t²)

    Wang & Isola, arXiv 2005.10242. The series is summed in logarithms, so that nothing overflows. A finite sample
    without self pairs can lie below it.

    Args:
        d: dimension of the space, at least 1.
        t: sharpness of the potential, positive and at most 1e6.

    >>> round(uniformity_optimum(128), 4)
    -3.9375
    """
    if d < 1 or not 0 < t <= SHARPEST:
        raise ValueError(f"d must be at least 1 and t positive and at most {SHARPEST:g}, got d = {d} and t = {t}.")
    k = np.arange(int(2 * t) + 60)  # the largest term lies before t; beyond 2t each is below a quarter of the previous
    log_ratio = 2 * math.log(t) - np.log((d / 2 + k) * (k + 1))
    log_terms = np.concatenate([[0.0], np.cumsum(log_ratio)])
    peak = int(log_terms.argmax())
    others = np.exp(np.delete(log_terms, peak) - log_terms[peak])
    return float(-2 * t + log_terms[peak] + math.log1p(others.sum()))


def uniformity_gap(value: float | Tensor, d: int, t: float = 2.0) -> float:
    """Return how far a uniformity is from the optimum, in percent: 0 = the uniform distribution, 100 = one point.

        100·(u − u*) / (0 − u*),   u* = uniformity_optimum(d, t)

    Uniformity and its optimum depend on the dimension; the gap compares models of different widths. It is slightly
    negative for small samples below the optimum.

    Args:
        value: a `uniformity`, at most 0; rounding errors above 0 count as 0.
        d: dimension of the space, at least 1.
        t: the sharpness that the value was computed with.

    >>> round(uniformity_gap(-3.41, 128), 1)
    13.4
    """
    found, optimum = float(value), uniformity_optimum(d, t)
    if not found <= ROUNDING * (1 + t):
        raise ValueError(f"value must be a uniformity, which is at most 0, got {found}.")
    return 100 * (1 - min(found, 0.0) / optimum)
