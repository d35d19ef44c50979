"""The walk that handles everything: all tiles, with a running maximum."""

import torch
from torch import Tensor

from uncollapse.pairwise.grid import (
    ABSENT,
    DOMINANCE,
    DOMINATED,
    LOG2E,
    Grid,
    InputGradients,
    Inputs,
    OutputGradients,
    Outputs,
    Tile,
    memory,
)


def forward(given: Inputs, grid: Grid, out: Outputs) -> None:
    """Write means, sums and the rows that one key rules."""
    mean, log2sum, kind, kept = out
    beta = 0.0 if grid.whole else 1.0
    if not grid.whole:
        mean.zero_()
        peak, total = torch.full_like(log2sum, ABSENT), torch.zeros_like(log2sum)
    for t in grid:
        weight = _logits(given, t, kept if kept.numel() else None)
        if given.bias is not None:
            weight.clamp_(min=ABSENT)
        t.fill_absent(weight, ABSENT)
        highest = weight.amax(-1)
        if t.lo > t.first:  # what came before, relative to the new peak
            highest = torch.maximum(peak[:, t.rows], highest)
            fade = (peak[:, t.rows] - highest).exp2_()
            total[:, t.rows] *= fade
            mean[:, t.rows] *= fade[..., None]
        weight.sub_(highest[..., None]).exp2_()
        if given.v.shape[-1] > 0:
            mean[:, t.rows].baddbmm_(weight, given.v[:, t.keys], beta=beta)
        if grid.whole:
            peak, total = highest, weight.sum(-1)
        else:
            peak[:, t.rows] = highest
            total[:, t.rows] += weight.sum(-1)
    nothing = peak < ABSENT / 2
    total.masked_fill_(nothing, torch.inf)
    mean.div_(total[..., None])
    if kept.numel():
        kept.div_(total[..., None])
    torch.add(peak, total.log2(), out=log2sum).masked_fill_(nothing, -torch.inf)
    kind.masked_fill_(total < DOMINANCE, DOMINATED)  # the largest weight is 1


def backward(given: Inputs, grid: Grid, found: Outputs, came: OutputGradients, to: InputGradients, same: bool) -> None:
    """Fill the gradients. `same`: q and k are one tensor, and so are their gradients."""
    level = came.log - (came.mean * found.mean).sum(-1)
    ruled = found.kind == DOMINATED
    ruler = DominantKeys(ruled, came.log) if given.v.shape[-1] > 0 and bool(ruled.any()) else None
    beta, alpha = 0.0 if grid.whole else 1.0, 1 / given.temperature
    for t in grid:
        weight = found.weight if found.weight.numel() else softmax(given, found.log2sum, t)
        if given.v.shape[-1] > 0:
            to.v[:, t.keys].baddbmm_(weight.mT, came.mean[:, t.rows], beta=beta)
            push = memory.product("push", came.mean[:, t.rows], given.v[:, t.keys])
            push.add_(level[:, t.rows, None]).mul_(weight)  # G
        else:
            push = weight.mul_(came.log[:, t.rows, None])
        if ruler is not None:
            ruler.take(push, weight, t)
        if to.bias is not None:
            to.bias[:, t.keys] += push.sum(-2)
        if same and grid.whole:  # dq + dk = (G + Gᵀ) q, one product instead of two; G is 0 at absent keys
            to.q.baddbmm_(push + push.mT, given.q, beta=0.0, alpha=alpha)
        else:
            to.q[:, t.rows].baddbmm_(push, given.k[:, t.keys], beta=beta, alpha=alpha)
            to.k[:, t.keys].baddbmm_(push.mT, given.q[:, t.rows], beta=beta, alpha=alpha)
    if ruler is not None:
        ruler.give(given, to)


def softmax(given: Inputs, log2sum: Tensor, t: Tile) -> Tensor:
    """The weights P of a tile."""
    weight = _logits(given, t).sub_(log2sum[:, t.rows, None])
    t.fill_absent(weight, ABSENT)
    return weight.exp2_()


def _logits(given: Inputs, t: Tile, into: Tensor | None = None) -> Tensor:
    """S of a tile in powers of two, absent pairs included; in a tensor of its own, if it is to be kept."""
    logits = memory.product("weight", given.q[:, t.rows], given.k[:, t.keys], LOG2E / given.temperature, into)
    return logits if given.bias is None else logits.add_(given.bias[:, None, t.keys], alpha=LOG2E)


class DominantKeys:
    """The entries of G that belong to a row's ruling key, from what the others leave of Σ_j G_ij = dL_i."""

    def __init__(self, ruled: Tensor, d_log: Tensor) -> None:
        self.ruled, self.rest = ruled, d_log.clone()
        self.key = torch.zeros_like(ruled, dtype=torch.long)

    def take(self, push: Tensor, weight: Tensor, t: Tile) -> None:
        """Empty the ruling entries of a tile of G and note the sums of the others."""
        b, i, j = ((weight > 0.5) & self.ruled[:, t.rows, None]).nonzero(as_tuple=True)
        push[b, i, j] = 0
        self.key[:, t.rows][b, i] = j + t.lo
        self.rest[:, t.rows] -= push.sum(-1)

    def give(self, given: Inputs, to: InputGradients) -> None:
        """Add what the ruling entries contribute to the gradients of q, k and bias."""
        b, i = self.ruled.nonzero(as_tuple=True)
        j, push = self.key[b, i], self.rest[b, i, None]
        scaled = push / given.temperature
        to.q.index_put_((b, i), scaled * given.k[b, j], accumulate=True)
        to.k.index_put_((b, j), scaled * given.q[b, i], accumulate=True)
        if to.bias is not None:
            to.bias.index_put_((b, j), push.squeeze(-1), accumulate=True)
