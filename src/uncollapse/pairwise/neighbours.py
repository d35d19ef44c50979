"""The nearest key of each query, found tile by tile: no matrix of all distances is ever held."""

from typing import NamedTuple

import torch
from torch import Tensor

from uncollapse.pairwise.grid import Grid, Pairs, memory


class Nearest(NamedTuple):
    """Distance (..., n) of each query to its nearest key, and which key that is (..., n)."""

    distance: Tensor
    key: Tensor


def distances(q: Tensor, k: Tensor, index: Tensor) -> Tensor:
    """Return ‖q_i − k_index(i)‖ (b, n), with a gradient for the chosen rows only; inf for the index −1.

    The gradient is 0 where a row equals its nearest key.
    """
    if k.shape[1] == 0:
        return q.new_full(index.shape, torch.inf) + 0 * k.sum()  # part of the graph: other processes wait for it
    chosen = k.gather(1, index.clamp(min=0).unsqueeze(-1).expand(-1, -1, k.shape[-1]))
    apart: Tensor = torch.linalg.vector_norm(q - chosen, dim=-1)
    return apart.masked_fill(index < 0, torch.inf)


@torch.library.custom_op("uncollapse::nearest", mutates_args=())
def nearest_operator(
    q: Tensor, k: Tensor, bias: Tensor | None, offset: int | None, no_self: bool, excluded: Tensor | None
) -> Tensor:
    """Return the index (b, n) of the key with the least ‖q_i − k_j‖ − the first of several, −1 if no key is left.

    That is the key with the largest q_i·k_j − ‖k_j‖²/2. bias (b, m) is −inf for excluded keys, 0 for others.
    """
    weight = k.square().sum(-1).mul_(-0.5)
    weight = weight if bias is None else weight + bias
    best = q.new_full(q.shape[:2], -torch.inf)
    index = torch.full_like(best, -1, dtype=torch.int64)
    grid = Grid(Pairs(offset, no_self, excluded), q.shape[1], k.shape[1], q.device)
    for c in grid.chunks(q.shape[0]):
        for t in grid:
            tile = memory.product("weight", q[c, t.rows], k[c, t.keys]).add_(weight[c, None, t.keys])
            t.fill_absent(tile, -torch.inf)
            top, at = tile.max(-1)
            better = ~(top <= best[c, t.rows])  # also for NaN, which is not hidden
            best[c, t.rows] = torch.where(better, top, best[c, t.rows])
            index[c, t.rows] = torch.where(better, at + t.lo, index[c, t.rows])
    return index


@nearest_operator.register_fake
def _(q: Tensor, k: Tensor, bias: Tensor | None, offset: int | None, no_self: bool, excluded: Tensor | None) -> Tensor:
    return q.new_empty(q.shape[:2], dtype=torch.int64)
