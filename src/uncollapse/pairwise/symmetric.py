"""The pass for q = k: each tile on and above the diagonal serves both directions.

The weights are exp(S) without a shift, so the logits must be moderate. The log-weight b_j of a key scales its value by
exp(b_j). Rows with a dominant key go to the general pass, which keeps their digits.
"""

import math
from collections.abc import Callable, Iterator

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
from uncollapse.pairwise.products import accumulate
from uncollapse.pairwise.threads import for_each_share

SAFE_LOGIT = {torch.float32: 60.0, torch.float64: 300.0}  # up to this |S|, exp(S) needs no shift
SAFE_SUM = {torch.float32: 80.0, torch.float64: 650.0}  # up to this logarithm, a sum does not overflow


def forward(inputs: Inputs, grid: Grid, out: Outputs) -> bool:
    """Write means and sums and return True; return False, with `out` undefined, where this pass does not apply."""
    largest = _largest_logit(inputs, grid.pairs)
    if largest is None:
        return False
    share = _shares(inputs)
    values = inputs.v if inputs.bias is None else inputs.v * share[..., None]
    few = inputs.bias is not None or DOMINANCE * math.exp(2 * largest) > grid.fewest_keys()  # a key may dominate

    def work(tiles: Iterator[Tile]) -> tuple[Tensor, Tensor, Tensor]:
        total, peak, mean = torch.zeros_like(share), torch.zeros_like(share), torch.zeros_like(values)
        for t in tiles:
            weight, beyond, others = _weights(inputs, t)
            if inputs.bias is None:
                total[:, t.rows] += weight.sum(-1)
                total[:, others] += beyond.sum(-2)
            else:
                _add_products(total.unsqueeze(-1), share.unsqueeze(-1), weight, beyond, t, others)
            if values.shape[-1] > 0:
                _add_products(mean, values, weight, beyond, t, others)
                if few:
                    peak[:, t.rows] = torch.maximum(peak[:, t.rows], weight.amax(-1))
                    peak[:, others] = torch.maximum(peak[:, others], beyond.amax(-2))
        return total, peak, mean

    totals, peaks, means = zip(*for_each_share(work, grid, inputs), strict=True)
    total = _sum(totals)
    if bool((torch.stack(peaks).amax(0) * DOMINANCE > total).any()):
        return False
    torch.div(_sum(means), total.clamp(min=torch.finfo(total.dtype).tiny)[..., None], out=out.mean)
    torch.log2(total, out=out.log2sum)
    out.kind.fill_(SYMMETRIC)
    return True


def backward(inputs: Inputs, grid: Grid, outputs: Outputs, d_out: OutputGradients, grads: InputGradients) -> None:
    """Fill the gradients; that of q includes its role as k."""
    share = _shares(inputs)
    level = d_out.log - (d_out.mean * outputs.mean).sum(-1)
    pull = _with_column(d_out.mean, level) * (-outputs.log2sum).exp2()[..., None]  # [dO, dL − dO·o]/Z
    offer = _with_column(inputs.v, torch.ones_like(share)) * share[..., None]
    left, right = torch.cat([pull, offer], -1), torch.cat([offer, pull], -1)
    d_mean, d_level = pull[..., :-1], pull[..., -1:]
    del offer, level  # memory that both threads need
    combine: Callable[[str, Tensor, Tensor], Tensor] = memory.product
    if inputs.v.shape[-1] == 0 and inputs.bias is None:  # a product over two features is slower than their sum
        combine, left, right = memory.sums, pull[..., 0], pull[..., 0]

    def work(tiles: Iterator[Tile]) -> tuple[Tensor, Tensor, Tensor]:
        dq, dv, d_share = torch.zeros_like(inputs.q), torch.zeros_like(inputs.v), torch.zeros_like(share)
        for t in tiles:
            weight, beyond, others = _weights(inputs, t)
            if inputs.v.shape[-1] > 0:
                _add_products(dv, d_mean, weight, beyond, t, others)
            if inputs.bias is not None:
                _add_products(d_share.unsqueeze(-1), d_level, weight, beyond, t, others)
            push = combine("push", left[:, t.rows], right[:, t.keys]).mul_(weight)  # G_ij + G_ji
            _add_products(dq, inputs.q, push, push[..., others.start - t.lo :], t, others)
        return dq, dv, d_share

    parts = for_each_share(work, grid, inputs)
    dq, dv, d_share = map(_sum, zip(*parts, strict=True))
    torch.div(dq, inputs.temperature, out=grads.q)
    if grads.bias is not None:
        grads.bias.copy_(((dv * inputs.v).sum(-1) + d_share) * share)
        dv.mul_(share[..., None])
    grads.v.copy_(dv)


def _largest_logit(inputs: Inputs, pairs: Pairs) -> float | None:
    """Return what no logit exceeds, or None where this pass does not apply."""
    x, bias = inputs.q, inputs.bias
    if x.device.type != "cpu" or pairs.offset is not None or not pairs.mirrored or x.numel() == 0:
        return None
    largest = float(torch.linalg.vector_norm(x, dim=-1).max()) ** 2 / inputs.temperature
    if bias is not None:
        largest = max(largest, float(bias.masked_fill(torch.isneginf(bias), 0).abs().max()))
    value = float(inputs.v.abs().amax()) if inputs.v.numel() else 0.0
    return largest if is_moderate(largest, max(value, 1.0) * x.shape[1], x.dtype) else None


def is_moderate(largest: float, terms: float, dtype: torch.dtype) -> bool:
    """Return whether exp of logits of this size, and a sum of so many of them, need no shift; False for NaN."""
    return largest <= SAFE_LOGIT[dtype] and largest + math.log(terms) <= SAFE_SUM[dtype]


def _shares(inputs: Inputs) -> Tensor:
    return inputs.q.new_ones(inputs.q.shape[:-1]) if inputs.bias is None else (inputs.bias * LOG2E).exp2()


def _weights(inputs: Inputs, t: Tile) -> tuple[Tensor, Tensor, slice]:
    """Return exp(S) of a tile, its part beyond the diagonal block, and the keys of that part."""
    weight = memory.product("weight", inputs.q[:, t.rows], inputs.q[:, t.keys], LOG2E / inputs.temperature).exp2_()
    t.fill_absent(weight, 0)
    others = slice(max(t.b, t.lo), t.hi)
    return weight, weight[..., others.start - t.lo :], others


def _add_products(out: Tensor, of: Tensor, weight: Tensor, beyond: Tensor, t: Tile, others: slice) -> None:
    """Add W·of to out, for the tile and, beyond the diagonal, for its transpose."""
    accumulate(out[:, t.rows], weight, of[:, t.keys])
    accumulate(out[:, others], beyond.mT, of[:, t.rows])


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the sum of what threads found, in the memory of the first."""
    for other in parts[1:]:
        parts[0].add_(other)
    return parts[0]


def _with_column(x: Tensor, column: Tensor) -> Tensor:
    """Return x (..., d) with one more feature, so that a product adds it to every entry without another pass."""
    return torch.cat([x, column.unsqueeze(-1)], -1)
