"""Forward and backward over all pairs of a batch: each chunk goes to the pass that suits it.

For queries q, keys k, values v and log-weights b (one per key, −inf = the key is excluded)

    S_ij = q_i·k_j/τ + b_j      L_i = log Σ_j exp S_ij      P_ij = exp(S_ij − L_i)      o_i = Σ_j P_ij v_j

with gradients, for incoming dO and dL,

    G_ij = P_ij (dO_i·(v_j − o_i) + dL_i)     dq = G k/τ     dk = Gᵀ q/τ     dv = Pᵀ dO     db_j = Σ_i G_ij

Two passes compute this. The general one visits every tile, with a running maximum, and handles every case. `symmetric`
is for q = k beyond one tile, on the CPU: it visits only the tiles on and above the diagonal, each of which serves both
directions. `both_ways` returns the log-sum-exps of rows and of columns from the same tiles. All need a few megabytes in
addition to inputs and outputs.

Decisions that the formulas do not show:

- Powers of two: `exp2` is faster than `exp` on CPUs and as exact; log₂e is folded into the product.
- Excluded pairs get a very low but finite logit, so that −inf − −inf never appears. Rows with no key left are found by
  their log-sum-exp afterwards, in linear time.
- G cancels where one key outweighs all others of its row (o_i ≈ v_j). But Σ_j G_ij = dL_i, so the entry of such a
  dominant key is dL_i minus the others, which do not cancel: exact zeros stay zero, small gradients keep their digits.
- The batch is processed in chunks, and tiles reuse their memory: at a few hundred tokens, new memory costs as much as
  the arithmetic.
"""

import torch
from torch import Tensor

from uncollapse.pairwise import symmetric
from uncollapse.pairwise.grid import (
    ABSENT,
    DOMINANCE,
    DOMINATED,
    LOG2E,
    PLAIN,
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
from uncollapse.pairwise.threads import for_each_chunk

Saved = tuple[Tensor, Tensor, Tensor, Tensor]


def forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    pairs: Pairs,
    keep: bool = False,
) -> Saved:
    """Return mean (b, n, e), log of the sum (b, n), how each row was computed (b, n), and weights for `backward`.

    q (b, n, d), k (b, m, d) or None for k = q, v (b, m, e) where e may be 0, bias (b, m). keep: return the weights,
    which must fit one tile, see `keeps_weights`.
    """
    batch, n, m = q.shape[0], q.shape[1], v.shape[1]
    kind = torch.full((batch, n), PLAIN, dtype=torch.uint8, device=q.device)
    weight = q.new_empty(batch, *((n, m) if keep else (0, 0)))
    outputs = Outputs(v.new_empty(batch, n, v.shape[-1]), q.new_empty(batch, n), kind, weight)
    inputs = Inputs(q, q if k is None else k, v, bias, temperature)
    grid, upper = _grids(pairs, n, m, q.device, same=k is None)

    def work(c: slice) -> None:
        part, out = inputs.chunk(c), Outputs(*(t[c] for t in outputs))
        if upper is None or not symmetric.forward(part, upper, out):
            _forward_general(part, grid, out)

    for_each_chunk(work, grid, inputs)
    return outputs.mean, outputs.log2sum.div_(LOG2E), outputs.kind, outputs.weight


def backward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    pairs: Pairs,
    saved: Saved,
    d_mean: Tensor,
    d_log: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and bias; with k = None, that of q includes its role as k."""
    mean, log_sum, kind, weight = saved
    inputs = Inputs(q, q if k is None else k, v, bias, temperature)
    grid, upper = _grids(pairs, q.shape[1], v.shape[1], q.device, same=k is None)
    new = torch.empty_like if grid.whole else torch.zeros_like
    dq = new(q)
    grads = InputGradients(dq, dq if k is None else new(k), new(v), None if bias is None else torch.zeros_like(bias))
    nothing, log2sum = torch.isneginf(log_sum), log_sum * LOG2E
    if bool(nothing.any()):
        d_mean, d_log = d_mean.masked_fill(nothing[..., None], 0), d_log.masked_fill(nothing, 0)
        log2sum = log2sum.masked_fill(nothing, -ABSENT)  # all weights of such a row become 0

    def work(c: slice) -> None:
        part, d_out = inputs.chunk(c), OutputGradients(d_mean[c], d_log[c])
        outputs = Outputs(mean[c], log2sum[c], kind[c], weight[c])
        out = InputGradients(grads.q[c], grads.k[c], grads.v[c], None if grads.bias is None else grads.bias[c])
        if upper is not None and bool(outputs.kind[:, :1].eq(SYMMETRIC).any()):
            symmetric.backward(part, upper, outputs, d_out, out)
        else:
            _backward_general(part, grid, outputs, d_out, out, same=k is None)

    for_each_chunk(work, grid, inputs)
    return grads.q, None if k is None else grads.k, grads.v, grads.bias


def spread(q: Tensor, k: Tensor | None, d: Tensor, bias: Tensor | None, temperature: float, pairs: Pairs) -> Tensor:
    """Return Pᵀ d (b, m, e) for d (b, n, e), the adjoint of the mean: each query distributes its d to the keys."""
    keys = q if k is None else k
    log_sum = forward(q, k, keys[..., :0], bias, temperature, pairs)[1]
    out = d.new_zeros(keys.shape[0], keys.shape[1], d.shape[-1])
    log2sum = (log_sum * LOG2E).masked_fill(torch.isneginf(log_sum), -ABSENT)
    inputs = Inputs(q, keys, keys[..., :0], bias, temperature)
    grid = Grid(pairs, q.shape[1], keys.shape[1], q.device)
    for c in grid.chunks(q.shape[0]):
        part = inputs.chunk(c)
        for t in grid:
            accumulate(out[c, t.keys], _softmax(part, log2sum[c], t).mT, d[c, t.rows])
    return out


def spread_backward(
    q: Tensor, k: Tensor | None, d: Tensor, bias: Tensor | None, temperature: float, pairs: Pairs, d_out: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return the gradients of q, k, d and bias: that of d is the mean of d_out, others are the mean's, incoming d."""
    saved = forward(q, k, d_out, bias, temperature, pairs)
    dq, dk, _, d_bias = backward(q, k, d_out, bias, temperature, pairs, saved, d, torch.zeros_like(saved[1]))
    return dq, dk, saved[0], d_bias


def _grids(pairs: Pairs, n: int, m: int, device: torch.device, same: bool) -> tuple[Grid, Grid | None]:
    """Return all tiles, and those on and above the diagonal where the symmetric pass may pay off."""
    grid = Grid(pairs, n, m, device)
    return grid, Grid(pairs, n, m, device, upper=True) if same and not grid.single else None


def _forward_general(inputs: Inputs, grid: Grid, out: Outputs) -> None:
    """Visit all tiles: write means, sums and which rows have a dominant key."""
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


def _backward_general(
    inputs: Inputs, grid: Grid, outputs: Outputs, d_out: OutputGradients, grads: InputGradients, same: bool
) -> None:
    """Fill the gradients. `same`: q and k are one tensor, and so are their gradients."""
    level = d_out.log - (d_out.mean * outputs.mean).sum(-1)
    dominated = outputs.kind == DOMINATED
    dominant = DominantKeys(dominated, d_out.log) if inputs.v.shape[-1] > 0 and bool(dominated.any()) else None
    beta, alpha = 0.0 if grid.whole else 1.0, 1 / inputs.temperature
    for t in grid:
        weight = outputs.weight if outputs.weight.numel() else _softmax(inputs, outputs.log2sum, t)
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


def _softmax(inputs: Inputs, log2sum: Tensor, t: Tile) -> Tensor:
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
