"""The pass that handles every case: all tiles, with a running maximum."""

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
from uncollapse.pairwise.products import accumulate


def forward(inputs: Inputs, grid: Grid, out: Outputs) -> None:
    """Write means, sums and which rows have a dominant key."""
    mean, log2sum, kind, kept = out
    beta = 0.0 if grid.whole else 1.0
    if not grid.whole:
        mean.zero_()
        peak, total = torch.full_like(log2sum, ABSENT), torch.zeros_like(log2sum)
    for t in grid:
        weight = _logits(inputs, t, kept if kept.numel() else None)
        if inputs.bias is not None:
            weight.clamp_(min=ABSENT)
        t.fill_absent(weight, ABSENT)
        highest = weight.amax(-1)
        if t.lo > t.first:  # rescale earlier sums to the new peak
            highest = torch.maximum(peak[:, t.rows], highest)
            fade = (peak[:, t.rows] - highest).exp2_()
            total[:, t.rows] *= fade
            mean[:, t.rows] *= fade[..., None]
        weight.sub_(highest[..., None]).exp2_()
        if inputs.v.shape[-1] > 0:
            accumulate(mean[:, t.rows], weight, inputs.v[:, t.keys], beta)
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
    kind.masked_fill_(total < DOMINANCE, DOMINATED)  # relative to the largest weight, which is 1


def backward(
    inputs: Inputs, grid: Grid, outputs: Outputs, d_out: OutputGradients, grads: InputGradients, same: bool
) -> None:
    """Fill the gradients. `same`: q and k are one tensor, and so are their gradients."""
    level = d_out.log - (d_out.mean * outputs.mean).sum(-1)
    dominated = outputs.kind == DOMINATED
    dominant = DominantKeys(dominated, d_out.log) if inputs.v.shape[-1] > 0 and bool(dominated.any()) else None
    beta, alpha = 0.0 if grid.whole else 1.0, 1 / inputs.temperature
    for t in grid:
        weight = outputs.weight if outputs.weight.numel() else softmax(inputs, outputs.log2sum, t)
        if inputs.v.shape[-1] > 0:
            accumulate(grads.v[:, t.keys], weight.mT, d_out.mean[:, t.rows], beta)
            push = memory.product("push", d_out.mean[:, t.rows], inputs.v[:, t.keys])
            push.add_(level[:, t.rows, None]).mul_(weight)  # G
        else:
            push = weight.mul_(d_out.log[:, t.rows, None])
        if dominant is not None:
            dominant.take(push, weight, t)
        if grads.bias is not None:
            grads.bias[:, t.keys] += push.sum(-2)
        if same and grid.whole:  # dq + dk = (G + Gᵀ) q: one product instead of two; G is 0 at excluded keys
            accumulate(grads.q, push + push.mT, inputs.q, 0.0, alpha)
        else:
            accumulate(grads.q[:, t.rows], push, inputs.k[:, t.keys], beta, alpha)
            accumulate(grads.k[:, t.keys], push.mT, inputs.q[:, t.rows], beta, alpha)
    if dominant is not None:
        dominant.give(inputs, grads)


def softmax(inputs: Inputs, log2sum: Tensor, t: Tile) -> Tensor:
    """Return the weights P of a tile."""
    weight = _logits(inputs, t).sub_(log2sum[:, t.rows, None])
    t.fill_absent(weight, ABSENT)
    return weight.exp2_()


def _logits(inputs: Inputs, t: Tile, into: Tensor | None = None) -> Tensor:
    """Return S·log₂e of a tile, including excluded pairs; in the tensor `into` if the weights are kept."""
    logits = memory.product("weight", inputs.q[:, t.rows], inputs.k[:, t.keys], LOG2E / inputs.temperature, into)
    return logits if inputs.bias is None else logits.add_(inputs.bias[:, None, t.keys], alpha=LOG2E)


class DominantKeys:
    """The entries of G of dominant keys: what the other entries of the row leave of Σ_j G_ij = dL_i."""

    def __init__(self, dominated: Tensor, d_log: Tensor) -> None:
        self.dominated, self.rest = dominated, d_log.clone()
        self.key = torch.zeros_like(dominated, dtype=torch.long)

    def take(self, push: Tensor, weight: Tensor, t: Tile) -> None:
        """Set the dominant entries of a tile of G to 0 and subtract the others from the rest."""
        b, i, j = ((weight > 0.5) & self.dominated[:, t.rows, None]).nonzero(as_tuple=True)
        push[b, i, j] = 0
        self.key[:, t.rows][b, i] = j + t.lo
        self.rest[:, t.rows] -= push.sum(-1)

    def give(self, inputs: Inputs, grads: InputGradients) -> None:
        """Add the contributions of the dominant entries to the gradients of q, k and bias."""
        b, i = self.dominated.nonzero(as_tuple=True)
        j, push = self.key[b, i], self.rest[b, i, None]
        scaled = push / inputs.temperature
        grads.q.index_put_((b, i), scaled * inputs.k[b, j], accumulate=True)
        grads.k.index_put_((b, j), scaled * inputs.q[b, i], accumulate=True)
        if grads.bias is not None:
            grads.bias.index_put_((b, j), push.squeeze(-1), accumulate=True)
