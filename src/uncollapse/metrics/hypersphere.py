"""Alignment and uniformity on the unit sphere (Wang & Isola, arXiv 2005.10242)."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uncollapse import distributed
from uncollapse.pairwise import Pairs, all_pairs, all_ranks, numerics
from uncollapse.registry import metric

SHARPEST = 1e6  # beyond which the series of the optimum would take too long
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
    """Mean distance of positive pairs.

        (1/n) Σ_i ‖x_i − y_i‖^α

    Wang & Isola, arXiv 2005.10242. Small means invariant, but a collapsed encoder has 0 too: read it beside
    `uniformity`.

    Args:
        x: rows (..., n, d).
        y: their partners (..., n, d).
        alpha: the exponent, positive.
        mask: (..., n) bool, True = a real pair.
        normalize: divide each row by its length first; a zero row stays zero.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), in float32 or float64; 0 without a real pair.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> alignment(x, x.flip(0))
    tensor(2.)
    """
    numerics.check_tokens(x, mask)
    numerics.check_tokens(y, mask, "y")
    if x.shape != y.shape:
        raise ValueError(f"x and y must have the same shape, got {tuple(x.shape)} and {tuple(y.shape)}.")
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}.")
    numerics.check_finite(numerics.prepared(x, mask), "x")
    numerics.check_finite(numerics.prepared(y, mask), "y")
    all_ranks.check_set(x, gather)
    each = distances(x, y, alpha, mask, normalize)
    summed = all_ranks.total(each.sum(-1), gather)
    return summed / all_ranks.total(numerics.real_count(numerics.as_full(x), mask), gather).clamp(min=1)


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
    """Logarithm of the mean Gaussian potential over all pairs of rows.

        log mean_{i≠j} exp(−t‖x_i − x_j‖²)

    Wang & Isola, arXiv 2005.10242. 0 is full collapse; `uniformity_optimum` is the value of a uniform distribution.
    Memory is linear in n.

    Args:
        x: rows (..., n, d).
        t: sharpness of the potential, positive.
        mask: (..., n) bool, True = a real row.
        exclude_self: leave out the pairs i = j, as the authors do. Otherwise the value is never below the optimum.
        normalize: divide each row by its length first; a zero row stays zero. Otherwise distances are taken in float64.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), in float32 or float64; 0 with fewer than two real rows.

    >>> import torch
    >>> uniformity(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]))
    tensor(-8.)
    """
    check_sharpness(t)
    all_ranks.check_set(x, gather)
    return log_potential(numerics.tokens(x, mask), t, mask, exclude_self, normalize, gather)


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
    """Mean Gaussian potential over all pairs of rows: exp of `uniformity`, with the same arguments.

        mean_{i≠j} exp(−t‖x_i − x_j‖²)

    Wang & Isola, arXiv 2005.10242.

    Returns:
        (...), between 0 and 1; 1 is full collapse, and is given with fewer than two real rows.

    >>> import torch
    >>> pairwise_potential(torch.zeros(2, 3))
    tensor(1.)
    """
    return uniformity(x, t, mask=mask, exclude_self=exclude_self, normalize=normalize, gather=gather).exp()


def uniformity_optimum(d: int, t: float = 2.0) -> float:
    """The least `uniformity` of any distribution on the unit sphere in R^d: that of the uniform one.

        −2t + log ₀F₁(; d/2; t²)

    Wang & Isola, arXiv 2005.10242. The series is summed in logarithms, so nothing overflows. A finite sample without
    self pairs may lie below it.

    Args:
        d: dimension of the space, at least 1.
        t: sharpness of the potential, positive and at most 1e6.

    >>> round(uniformity_optimum(128), 4)
    -3.9375
    """
    if d < 1 or not 0 < t <= SHARPEST:
        raise ValueError(f"d must be at least 1 and t positive and at most {SHARPEST:g}, got d = {d} and t = {t}.")
    k = np.arange(
        int(2 * t) + 60
    )  # the largest term lies before t, and beyond 2t each is less than a quarter of the last
    log_ratio = 2 * math.log(t) - np.log((d / 2 + k) * (k + 1))
    log_terms = np.concatenate([[0.0], np.cumsum(log_ratio)])
    peak = int(log_terms.argmax())
    others = np.exp(np.delete(log_terms, peak) - log_terms[peak])
    return float(-2 * t + log_terms[peak] + math.log1p(others.sum()))


def check_sharpness(t: float) -> None:
    """Raise unless t is a positive, finite number."""
    if isinstance(t, Tensor):
        raise TypeError(
            "t is the sharpness of the potential, a number; got a tensor. Pass a mask as mask=, a view as y=."
        )
    if not 0 < t < math.inf:
        raise ValueError(f"t must be positive and finite, got {t}.")


def distances(x: Tensor, y: Tensor, alpha: float, mask: Tensor | None, normalize: bool) -> Tensor:
    """(..., n): what `alignment` is the mean of, 0 for rows that are not real; the gradient at equal rows is 0."""
    x, y = numerics.prepared(x, mask), numerics.prepared(y, mask)
    if normalize:
        x, y = numerics.unit_rows(x), numerics.unit_rows(y)
    squared = (x - y).square().sum(-1)
    apart = squared != 0  # NaN is apart, and stays NaN
    return torch.where(apart, squared, 1).pow(alpha / 2) * apart  # the power has no gradient at 0


def log_potential(
    x: Tensor, t: float, mask: Tensor | None, exclude_self: bool, normalize: bool, gather: bool = False
) -> Tensor:
    """`uniformity` without its checks, for the losses. Differentiable once."""
    x = numerics.prepared(x, mask)
    if gather and distributed.world_size() > 1:
        return _spread_potential(x if mask is None else x[mask], t, exclude_self, normalize)
    if x.numel() == 0:
        return x.sum((-2, -1))
    # unnormalised, the three terms of a distance cancel: make them smaller and give them more digits
    points = x if normalize else numerics.centred(x.double(), mask)
    log_sum: Tensor = _LogPotentialSum.apply(points, t, mask, exclude_self, normalize)  # type: ignore[no-untyped-call]
    if mask is None and x.shape[-2] > 1:
        return (log_sum - math.log(x.shape[-2] * (x.shape[-2] - exclude_self))).to(x.dtype)
    count = numerics.real_count(points, mask)
    pairs = count * (count - 1 if exclude_self else count)
    return (log_sum - pairs.clamp(min=1).log()).masked_fill(pairs < 1, 0).to(x.dtype)


def _spread_potential(x: Tensor, t: float, exclude_self: bool, normalize: bool) -> Tensor:
    """The same for rows (n, d) of one set that is spread over processes."""
    points = numerics.unit_rows(x) if normalize else all_ranks.centred(x.double(), None)
    fall = -t * points.square().sum(-1)  # −t‖x_i − x_j‖² = 2t x_i·x_j − t‖x_j‖² − t‖x_i‖²
    own = all_pairs(points, points, None, 1 / (2 * t), Pairs(no_self=exclude_self), fall)[1]
    sums = all_ranks.joined(own, all_ranks.log_sum(points, points, 1 / (2 * t), fall)) + fall
    n = all_ranks.row_count(x)
    pairs = n * (n - 1 if exclude_self else n)
    if pairs < 1:
        return all_ranks.total(x.sum()) * 0
    return (all_ranks.log_total(sums) - math.log(pairs)).to(x.dtype)


class _LogPotentialSum(torch.autograd.Function):
    """L = log Σ_ij exp(−t‖x_i − x_j‖²) (...) over real rows, of length one if `normalize`; 0 where no pair is left.

    The gradient, 4t Σ_j p_ij (x_j − x_i) with p_ij the share of a pair in the sum, needs only the softmax means of the
    rows. They come with the sums, so one walk over the pairs serves both directions.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: float, mask: Tensor | None, exclude_self: bool, normalize: bool) -> Tensor:
        inverse = numerics.inverse_norms(x).unsqueeze(-1) if normalize else None
        x = x if inverse is None else x * inverse
        values, pairs = (x if ctx.needs_input_grad[0] else None), Pairs(no_self=exclude_self)
        if inverse is not None and mask is None and _all_positive(inverse):  # −t‖x_i − x_j‖² = 2t x_i·x_j − 2t
            means, sums = all_pairs(x, x, values, 1 / (2 * t), pairs)
            sums = sums - 2 * t
        else:  # −t‖x_i − x_j‖² = 2t x_i·x_j − t‖x_j‖² − t‖x_i‖²
            fall = -t * torch.linalg.vector_norm(x, dim=-1).square()
            fall = fall if mask is None else fall.masked_fill(~mask, -torch.inf)
            means, sums = all_pairs(x, x, values, 1 / (2 * t), pairs, fall)
            sums = sums + fall  # (..., n): −inf for rows that are not real
        total = torch.logsumexp(sums, -1, keepdim=True)
        total = total.masked_fill(torch.isneginf(total), 0)
        if ctx.needs_input_grad[0]:
            slope = means.sub_(x).mul_((sums - total).exp().mul_(4 * t)[..., None])
            if inverse is not None:  # through the division by the lengths: across the rows only
                slope.addcmul_(x, (slope * x).sum(-1, keepdim=True), value=-1).mul_(inverse)
            ctx.save_for_backward(slope)
        return total.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the slopes were computed without a graph: their own gradient would be missing
            raise RuntimeError("uniformity can be differentiated once only; leave out create_graph=True.")
        (slope,) = ctx.saved_tensors
        return slope * d_total[..., None, None], None, None, None, None


def _all_positive(x: Tensor) -> bool:
    """Whether no entry is 0; not known where a look would stall."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu" and x.amin().item() > 0
