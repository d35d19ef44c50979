"""Means over all pairs of rows: cosine, Gaussian potential (arXiv 2005.10242) and any function of dot products.

Metrics and losses share these functions; distances of positive pairs are among them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from uncollapse.pairwise import Pairs, all_pairs, all_ranks, numerics
from uncollapse.pairwise.grid import ABSENT

FLAT = 0.01  # t below which all potentials of unit rows are near 1: float32 loses the digits of their logarithm


def pair_distances(x: Tensor, y: Tensor, alpha: float, mask: Tensor | None, normalize: bool) -> Tensor:
    """Return ‖x_i − y_i‖^α (..., n), 0 for masked rows; the gradient is 0 where x_i = y_i."""
    x, y = numerics.prepare(x, mask), numerics.prepare(y, mask)
    if normalize:
        x, y = numerics.unit_rows(x), numerics.unit_rows(y)
    squared = (x - y).square().sum(-1)
    apart = squared != 0  # True for NaN, which stays NaN
    return torch.where(apart, squared, 1).pow(alpha / 2) * apart  # the power has no gradient at 0


def log_potential(
    x: Tensor, t: float, mask: Tensor | None, exclude_self: bool, normalize: bool, gather: bool = False
) -> Tensor:
    """Return log mean_{i≠j} exp(−t‖x_i − x_j‖²) (...), which can be differentiated once.

    The arguments are those of `uniformity`; values are not checked, for the losses.
    """
    x = numerics.prepare(x, mask)
    if normalize and t < FLAT and x.dtype != torch.float64:
        return log_potential(x.double(), t, mask, exclude_self, normalize, gather).to(x.dtype)
    if all_ranks.spans_ranks(gather):
        return _log_potential_over_ranks(x if mask is None else x[mask], t, exclude_self, normalize)
    if x.numel() == 0:
        return x.sum((-2, -1))
    # without normalization the three terms of a distance cancel: make them smaller and use more digits
    points = x if normalize else numerics.center(x.double(), mask)
    log_sum: Tensor = _LogPotentialSum.apply(points, t, mask, exclude_self, normalize)  # type: ignore[no-untyped-call]
    if mask is None and x.shape[-2] > 1:
        return (log_sum - math.log(x.shape[-2] * (x.shape[-2] - exclude_self))).to(x.dtype)
    count = numerics.real_count(points, mask)
    pairs = count * (count - 1 if exclude_self else count)
    return (log_sum - pairs.clamp(min=1).log()).masked_fill(pairs < 1, 0).to(x.dtype)


def _log_potential_over_ranks(x: Tensor, t: float, exclude_self: bool, normalize: bool) -> Tensor:
    """Return the same for rows (n, d) of one set that several processes share."""
    points = numerics.unit_rows(x) if normalize else all_ranks.center(x.double(), None)
    fall = -t * points.square().sum(-1)  # −t‖x_i − x_j‖² = 2t x_i·x_j − t‖x_j‖² − t‖x_i‖²
    own = all_pairs(points, points, None, 1 / (2 * t), Pairs(no_self=exclude_self), fall)[1]
    sums = all_ranks.log_add(own, all_ranks.log_sum(points, points, 1 / (2 * t), fall)) + fall
    n = all_ranks.total_rows(x)
    pairs = n * (n - 1 if exclude_self else n)
    if pairs < 1:
        return all_ranks.total(x.sum()) * 0
    return (all_ranks.log_total(sums) - math.log(pairs)).to(x.dtype)


class _LogPotentialSum(torch.autograd.Function):
    """L = log Σ_ij exp(−t‖x_i − x_j‖²) (...) over real rows, of unit norm if `normalize`; 0 where no pair is left.

    The gradient 4t Σ_j p_ij (x_j − x_i), with p_ij the share of a pair in the sum, needs only the softmax means of the
    rows. They come with the sums, so one pass over the pairs serves both forward and backward.
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
            sums = sums + fall  # (..., n): −inf for masked rows
        total = torch.logsumexp(sums, -1, keepdim=True)
        total = total.masked_fill(torch.isneginf(total), 0)
        if ctx.needs_input_grad[0]:
            slope = means.sub_(x).mul_((sums - total).exp().mul_(4 * t)[..., None])
            if inverse is not None:  # through the division by the norms: only the part orthogonal to each row
                slope.addcmul_(x, (slope * x).sum(-1, keepdim=True), value=-1).mul_(inverse)
            ctx.save_for_backward(slope)
        return total.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the slopes were computed without a graph and have no gradient of their own
            raise RuntimeError("uniformity can be differentiated only once; remove create_graph=True.")
        (slope,) = ctx.saved_tensors
        return slope * d_total[..., None, None], None, None, None, None


def _all_positive(x: Tensor) -> bool:
    """Return whether no entry is 0; False where reading it would stall a GPU."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu" and x.amin().item() > 0


TILE = 1 << 19  # largest number of dot products that are computed at once: 2 MiB, which measured fastest


def pair_cosine(x: Tensor, count: Tensor, absolute: bool = False, gather: bool = False) -> Tensor:
    """Return the mean cosine of pairs of different rows.

    Args:
        x: rows (..., n, d); masked rows are zero.
        count: number of real rows (...).
        absolute: take |cos|, in O(n²d) time and memory linear in n; otherwise O(nd).
        gather: take the rows (n, d) of all processes as one set.

    Returns:
        (...); 0 with fewer than two real rows. A zero row has cosine 0 with every other.
    """
    inverse = numerics.inverse_norms(x)
    count = all_ranks.total(count, gather)
    if absolute:
        total = 2 * reduce_pairs(torch.abs, x * inverse[..., None], gather=gather)
    else:
        pointing = all_ranks.total((inverse > 0).sum(-1), gather)
        with torch.autocast(x.device.type, enabled=False):
            unit_sum = all_ranks.total(inverse[..., None, :] @ x, gather).squeeze(-2)  # O(nd)
        return mean_from_sum(unit_sum, pointing, count)
    return _mean(total, count)


def mean_from_sum(unit_sum: Tensor, pointing: Tensor, count: Tensor) -> Tensor:
    """Return the mean cosine of `count` rows (...) from the sum of their unit rows (..., d); 0 for fewer than two.

    pointing: how many of them are not zero. Σ_{i≠j} cos(x_i, x_j) = ‖Σ_i x_i/‖x_i‖‖² − pointing.
    """
    return _mean(unit_sum.square().sum(-1) - pointing, count)


def _mean(total: Tensor, count: Tensor) -> Tensor:
    mean: Tensor = total / (count * (count - 1)).clamp(min=1)
    return mean.masked_fill(count < 2, 0)


@dataclass(frozen=True)
class SetSums:
    """Sums over the real tokens of each set, in one pass over them: of unit tokens, and of the tokens themselves.

    unit: Σ_i x_i/‖x_i‖ (b, d). plain: Σ_i x_i (b, d). pointing: how many tokens are not zero (b,). count: how many
    there are (b,).
    """

    unit: Tensor
    plain: Tensor
    pointing: Tensor
    count: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None) -> "SetSums":
        """Return the sums of sets x (b, n, d). NotFiniteError if a real token is not finite; others may be anything."""
        numerics.check_tokens(x, mask)
        x = numerics.to_full(x)
        found = cls._add_up(x, mask)
        if bool(torch.isfinite(found.plain.sum() + found.unit.sum())):
            return found
        return cls._add_up(numerics.prepare_tokens(x, mask), mask)  # it was in padding, or sums overflow

    @classmethod
    def _add_up(cls, x: Tensor, mask: Tensor | None) -> "SetSums":
        inverse = numerics.inverse_norms(x)
        weights = torch.stack([inverse, torch.ones_like(inverse)], -2)
        weights = weights if mask is None else weights * mask[:, None]
        with torch.autocast(x.device.type, enabled=False):
            unit, plain = (weights @ x).unbind(-2)
        return cls(unit, plain, (weights[:, 0] > 0).sum(-1), numerics.real_count(x, mask))

    def mean_cosine(self) -> Tensor:
        """Return the mean cosine of two tokens of each set (b,), see `metrics.mean_cosine`."""
        return mean_from_sum(self.unit, self.pointing, self.count)

    def means(self) -> Tensor:
        """Return the mean token of each set (b, d)."""
        return self.plain / self.count.clamp(min=1)[:, None]


def pair_squares(x: Tensor, gather: bool = False) -> Tensor:
    """Return Σ_{i≠j} (x_i·x_j)² = ‖XXᵀ‖² − Σ_i ‖x_i‖⁴ (...) of rows (..., n, d), from the smaller of XXᵀ and XᵀX."""
    across = all_ranks.spans_ranks(gather)
    with torch.autocast(x.device.type, enabled=False):
        small = x.shape[-2] <= x.shape[-1] and not across
        products = x @ x.mT if small else all_ranks.total(x.mT @ x, gather)
    selves = all_ranks.total(x.square().sum(-1).square().sum(-1), gather)
    return products.square().sum((-2, -1)) - selves


def reduce_pairs(
    term: Callable[..., Tensor], *rows: Tensor, mask: Tensor | None = None, log: bool = False, gather: bool = False
) -> Tensor:
    """Return Σ_{i<j} term(x_i·x_j, y_i·y_j, …) (...), or log Σ_{i<j} exp of it, in memory linear in n.

    Args:
        term: an elementwise function of dot products, one for each tensor in `rows`; backward recomputes its tiles.
        rows: tensors (..., n, d), which may differ in d.
        mask: (..., n) bool, True = real; masked rows must be finite.
        log: return the logarithm of the sum of exponentials; without a pair, a very low number.
        gather: take the rows (n, d) of all processes as one set. Not together with a mask.
    """
    n, parts = rows[0].shape[-2], []
    height = max(1, TILE // max(1, rows[0].shape[:-1].numel()))
    for a in range(0, n, height):
        tile = [(x[..., a : a + height, :], x[..., a:, :]) for x in rows]
        real = None if mask is None else mask[..., a : a + height, None] & mask[..., None, a:]
        parts.append(_reduce_tile(term, tile, real, log, upper=True))
    own = _combine(parts, rows[0], log)
    if not all_ranks.spans_ranks(gather):
        return own
    others, parts = [all_ranks.other_rows(x) for x in rows], []
    height = max(1, TILE // max(1, len(others[0])))
    for a in range(0, n, height):
        tile = [(x[a : a + height], y) for x, y in zip(rows, others, strict=True)]
        parts.append(_reduce_tile(term, tile, None, log, upper=False))
    cross = _combine(parts, others[0], log)  # each of these pairs is counted by two processes
    if log:
        return all_ranks.log_total(torch.stack([own, cross - math.log(2)]))
    return all_ranks.total(own + cross / 2)


def _reduce_tile(
    term: Callable[..., Tensor], tile: list[tuple[Tensor, Tensor]], real: Tensor | None, log: bool, upper: bool
) -> Tensor:
    """Return the sum over a tile (...); upper: only of pairs above its diagonal."""

    def reduce() -> Tensor:
        with torch.autocast(tile[0][0].device.type, enabled=False):
            values = term(*(x @ y.mT for x, y in tile))
        if upper:
            lower = torch.ones(values.shape[-2:], dtype=torch.bool, device=values.device).tril()
            values = values.masked_fill(lower, low)
        if real is not None:
            values = values.masked_fill(~real, low)
        return torch.logsumexp(values.flatten(-2), -1) if log else values.sum((-2, -1))

    low, (first, second) = ABSENT if log else 0.0, tile[0]
    if first.shape[-2] == 0 or second.shape[-2] == 0:
        return first.new_full(first.shape[:-2], low)
    summed: Tensor = checkpoint(reduce, use_reentrant=False, preserve_rng_state=False)
    return summed


def _combine(parts: list[Tensor], x: Tensor, log: bool) -> Tensor:
    """Return the sum of the tiles' sums, as a part of the graph of x also if there are none."""
    nothing = 0 * x.sum((-2, -1)) + (ABSENT if log else 0.0)
    each = torch.stack([nothing, *parts])
    return torch.logsumexp(each, 0) if log else each.sum(0)
