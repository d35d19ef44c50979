"""The mean cosine over all pairs of rows."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from uncollapse.pairwise import all_ranks, numerics

TILE = 1 << 22  # largest number of cosines that are computed at once


def pair_cosine(x: Tensor, count: Tensor, absolute: bool = False, gather: bool = False) -> Tensor:
    """Return the mean cosine of pairs of different rows.

    Args:
        x: rows (..., n, d); masked rows are zero.
        count: number of real rows (...).
        absolute: take |cos|, in O(n²d) time and memory linear in n; otherwise O(nd).
        gather: take the rows (n, d) of all processes as one set; with `absolute` there is then no gradient.

    Returns:
        (...); 0 with fewer than two real rows. A zero row has cosine 0 with every other.
    """
    inverse = numerics.inverse_norms(x)
    selves, count = all_ranks.total((inverse > 0).sum(-1), gather), all_ranks.total(count, gather)
    with torch.autocast(x.device.type, enabled=False):
        if absolute:
            total = (_absolute_sum(x * inverse[..., None], gather) - selves).clamp(min=0)
        else:
            total = all_ranks.total(inverse[..., None, :] @ x, gather).square().sum((-2, -1)) - selves  # O(nd)
    mean: Tensor = total / (count * (count - 1)).clamp(min=1)
    return mean.masked_fill(count < 2, 0)


def _absolute_sum(unit: Tensor, gather: bool) -> Tensor:
    """Return Σ_ij |u_i·u_j| of unit rows (..., n, d), in row tiles that the backward pass recomputes."""
    n = unit.shape[-2]
    height = max(1, TILE // max(1, unit.numel() // unit.shape[-1])) if unit.numel() else 1
    total = unit.new_zeros(unit.shape[:-2])
    for start in range(0, n, height):
        rows, later = unit[..., start : start + height, :], unit[..., start:, :]
        total = total + checkpoint(_tile_sum, rows, later, use_reentrant=False, preserve_rng_state=False)
    if not all_ranks.spans_ranks(gather):
        return total
    unit, total = unit.detach(), total.detach()
    others = all_ranks.other_rows(unit)
    height = max(1, TILE // max(1, len(others)))
    for start in range(0, n, height):
        total = total + (unit[start : start + height] @ others.mT).abs().sum()
    return all_ranks.total(total)


def _tile_sum(rows: Tensor, later: Tensor) -> Tensor:
    """Return Σ |u_i·u_j| of rows with themselves, and twice with later rows: the matrix is symmetric."""
    cosine = (rows @ later.mT).abs()
    return 2 * cosine.sum((-2, -1)) - cosine[..., : rows.shape[-2]].sum((-2, -1))
