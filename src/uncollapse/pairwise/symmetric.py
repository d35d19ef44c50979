"""The walk for q = k: each tile on and above the diagonal serves both directions.

The weights are exp(S) without a shift, so the logits must be moderate. A key's log-weight b_j acts as a share exp(b_j)
of its value. Rows that one key outweighs go to the other walk, which keeps their digits.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from uncollapse.pairwise.grid import (
    DOMINANCE,
    LOG2E,
    SYMMETRIC,
    Grid,
    InputGradients,
    Inputs,
    OutputGradients,
    Outputs,
    Pairs,
    Tile,
    memory,
)

SAFE_LOGIT = {torch.float32: 60.0, torch.float64: 300.0}  # |S| within it: exp(S) needs no shift
SAFE_SUM = {torch.float32: 80.0, torch.float64: 650.0}  # logarithms of sums that do not overflow


def forward(given: Inputs, grid: Grid, out: Outputs) -> bool:
    """Write means and sums; False, with nothing of value written, where this walk cannot serve."""
    if not _applies(given, grid.pairs):
        return False
    mean, log2sum, kind, _ = out
    share = _shares(given)
    values = given.v if given.bias is None else given.v * share[..., None]
    total, peak = torch.zeros_like(share), torch.zeros_like(share)
    mean.zero_()
    for t in grid:
        weight, beyond, others = _weights(given, t)
        if given.bias is None:
            total[:, t.rows] += weight.sum(-1)
            total[:, others] += beyond.sum(-2)
        else:
            _add_products(total.unsqueeze(-1), share.unsqueeze(-1), weight, beyond, t, others)
        if given.v.shape[-1] > 0:
            _add_products(mean, values, weight, beyond, t, others)
            peak[:, t.rows] = torch.maximum(peak[:, t.rows], weight.amax(-1))
            peak[:, others] = torch.maximum(peak[:, others], beyond.amax(-2))
    if bool((peak * DOMINANCE > total).any()):
        return False
    mean.div_(total.clamp(min=torch.finfo(total.dtype).tiny)[..., None])
    torch.log2(total, out=log2sum)
    kind.fill_(SYMMETRIC)
    return True


def backward(given: Inputs, grid: Grid, found: Outputs, came: OutputGradients, to: InputGradients) -> None:
    """Fill the gradients; that of q holds both roles."""
    share = _shares(given)
    level = came.log - (came.mean * found.mean).sum(-1)
    pull = _with_column(came.mean, level) * (-found.log2sum).exp2()[..., None]  # [dO, dL − dO·o]/Z
    offer = _with_column(given.v, torch.ones_like(share)) * share[..., None]
    left, right = torch.cat([pull, offer], -1), torch.cat([offer, pull], -1)
    d_mean, d_level, d_share = pull[..., :-1], pull[..., -1:], torch.zeros_like(share)
    combine: Callable[[str, Tensor, Tensor], Tensor] = memory.product
    if given.v.shape[-1] == 0 and given.bias is None:  # a product over two features takes longer than their sum
        combine, left, right = memory.sums, pull[..., 0], pull[..., 0]
    for t in grid:
        weight, beyond, others = _weights(given, t)
        if given.v.shape[-1] > 0:
            _add_products(to.v, d_mean, weight, beyond, t, others)
        if given.bias is not None:
            _add_products(d_share.unsqueeze(-1), d_level, weight, beyond, t, others)
        push = combine("push", left[:, t.rows], right[:, t.keys]).mul_(weight)  # G_ij + G_ji
        _add_products(to.q, given.q, push, push[..., others.start - t.lo :], t, others)
    to.q.div_(given.temperature)
    if to.bias is not None:
        to.bias.copy_(((to.v * given.v).sum(-1) + d_share) * share)
        to.v.mul_(share[..., None])


def _applies(given: Inputs, pairs: Pairs) -> bool:
    x, bias = given.q, given.bias
    if x.device.type != "cpu" or pairs.offset is not None or not pairs.mirrored or x.numel() == 0:
        return False
    largest = float(torch.linalg.vector_norm(x, dim=-1).max()) ** 2 / given.temperature
    if bias is not None:
        largest = max(largest, float(bias.masked_fill(torch.isneginf(bias), 0).abs().max()))
    value = float(given.v.abs().amax()) if given.v.numel() else 0.0
    return is_moderate(largest, max(value, 1.0) * x.shape[1], x.dtype)


def is_moderate(largest: float, terms: float, dtype: torch.dtype) -> bool:
    """Whether exp of logits of this size needs no shift, nor a sum of so many of them; False for NaN."""
    return largest <= SAFE_LOGIT[dtype] and largest + math.log(terms) <= SAFE_SUM[dtype]


def _shares(given: Inputs) -> Tensor:
    return given.q.new_ones(given.q.shape[:-1]) if given.bias is None else (given.bias * LOG2E).exp2()


def _weights(given: Inputs, t: Tile) -> tuple[Tensor, Tensor, slice]:
    """exp(S) of a tile, its part beyond the diagonal block, and which keys that part belongs to."""
    weight = memory.product("weight", given.q[:, t.rows], given.q[:, t.keys], LOG2E / given.temperature).exp2_()
    t.fill_absent(weight, 0)
    others = slice(max(t.b, t.lo), t.hi)
    return weight, weight[..., others.start - t.lo :], others


def _add_products(out: Tensor, of: Tensor, weight: Tensor, beyond: Tensor, t: Tile, others: slice) -> None:
    """out += W·of, for the tile and, beyond the diagonal, for its transpose."""
    out[:, t.rows].baddbmm_(weight, of[:, t.keys])
    out[:, others].baddbmm_(beyond.mT, of[:, t.rows])


def _with_column(x: Tensor, column: Tensor) -> Tensor:
    """x (..., d) with one more feature: a product of two such adds it to every entry without a pass of its own."""
    return torch.cat([x, column.unsqueeze(-1)], -1)
