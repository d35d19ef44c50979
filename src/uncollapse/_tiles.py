"""The arithmetic under `pairwise`: all pairs, tile by tile, forward and backward.

For queries q, keys k, values v and log-weights b (one a key, −inf = the key is absent)

    S_ij = q_i·k_j/τ + b_j      L_i = log Σ_j exp S_ij      P_ij = exp(S_ij − L_i)      o_i = Σ_j P_ij v_j

with gradients, for incoming dO and dL,

    G_ij = P_ij (dO_i·(v_j − o_i) + dL_i)     dq = G k/τ     dk = Gᵀ q/τ     dv = Pᵀ dO     db_j = Σ_i G_ij

Two walks over the pairs compute this. `rows` takes every tile; it handles everything. `symmetric` is for q = k beyond
one tile, on the CPU: it visits only the tiles on and above the diagonal, and each serves both directions, which saves
about a third of the work. Both need a few megabytes beside their inputs and outputs.

Decisions that the formulas do not show:

- Powers of two: torch's `exp2` is about three times as fast as `exp` on CPUs and as exact; log₂e is folded into q.
- Absent pairs get a very low but finite logit, so that no −inf − −inf appears; rows with nothing left are found by
  their log-sum-exp afterwards, in linear time.
- G cancels where one key outweighs all others of its row (o_i ≈ v_j). But Σ_j G_ij = dL_i, so the entry of such a
  ruling key is dL_i minus the others, which do not cancel: exact zeros stay zero, small gradients keep their digits.
- The batch is walked in chunks, and tiles live in memory that is kept: at a few hundred tokens, fresh memory costs as
  much as the arithmetic.
"""

import math

import torch
from torch import Tensor

from uncollapse._grid import Grid, Pairs, Tile, memory

ABSENT = -1e30  # the logit of a pair that does not count: finite, see above
LOG2E = math.log2(math.e)
SAFE_LOGIT = {torch.float32: 60.0, torch.float64: 300.0}  # |S| within it: exp(S) needs no shift
PLAIN, RULED, SYMMETRIC = 0, 1, 2  # how a row was computed: see `forward`


def forward(
    q: Tensor, k: Tensor | None, v: Tensor, bias: Tensor | None, temperature: float, pairs: Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (b, n, e), log of the sum (b, n), and how each row was computed (b, n).

    q (b, n, d), k (b, m, d) or None for k = q, v (b, m, e) where e may be 0, bias (b, m).
    """
    batch, n, m = q.shape[0], q.shape[1], v.shape[1]
    mean, log2sum = v.new_empty(batch, n, v.shape[-1]), q.new_empty(batch, n)
    kind = torch.full((batch, n), PLAIN, dtype=torch.uint8, device=q.device)
    grid = Grid(pairs, n, m, q.device)
    upper = None if k is not None or grid.single else Grid(pairs, n, m, q.device, upper=True)
    for c in grid.chunks(batch):
        given, out = (*_chunk(c, q, k, v, bias), temperature), (mean[c], log2sum[c], kind[c])
        if upper is None or not _symmetric_forward(*given, upper, out):
            _rows_forward(*given, grid, out)
    return mean, log2sum.div_(LOG2E), kind


def backward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    pairs: Pairs,
    saved: tuple[Tensor, Tensor, Tensor],
    d_mean: Tensor,
    d_log: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of q, k, v and bias; with k = None, q's is that of both roles."""
    mean, log_sum, kind = saved
    grid = Grid(pairs, q.shape[1], v.shape[1], q.device)
    upper = None if k is not None or grid.single else Grid(pairs, q.shape[1], v.shape[1], q.device, upper=True)
    make = torch.empty_like if grid.whole else torch.zeros_like
    dq, dv = make(q), make(v)
    dk = dq if k is None else make(k)
    d_bias = None if bias is None else torch.zeros_like(bias)
    nothing, log2sum = torch.isneginf(log_sum), log_sum * LOG2E
    if bool(nothing.any()):
        d_mean, d_log = d_mean.masked_fill(nothing[..., None], 0), d_log.masked_fill(nothing, 0)
        log2sum = log2sum.masked_fill(nothing, -ABSENT)  # all weights of such a row become 0
    for c in grid.chunks(q.shape[0]):
        given = *_chunk(c, q, k, v, bias), temperature
        came = mean[c], log2sum[c], d_mean[c], d_log[c]
        to = dq[c], dk[c], dv[c], None if d_bias is None else d_bias[c]
        if upper is not None and bool(kind[c, :1].eq(SYMMETRIC).any()):
            _symmetric_backward(*given, upper, came, to)
        else:
            _rows_backward(*given, grid, came, kind[c] == RULED, to, same=k is None)
    return dq, None if k is None else dk, dv, d_bias


def spread(
    q: Tensor, k: Tensor, d: Tensor, bias: Tensor | None, temperature: float, pairs: Pairs, log_sum: Tensor
) -> Tensor:
    """Pᵀ d (b, m, e) for d (b, n, e): each query gives its d to the keys, by weight. The adjoint of the mean."""
    out = d.new_zeros(k.shape[0], k.shape[1], d.shape[-1])
    nothing = torch.isneginf(log_sum)
    log2sum = (log_sum * LOG2E).masked_fill(nothing, -ABSENT)
    grid = Grid(pairs, q.shape[1], k.shape[1], q.device)
    for c in grid.chunks(q.shape[0]):
        for t in grid:
            rows, keys = slice(t.a, t.b), slice(t.lo, t.hi)
            weight = _softmax(q[c], k[c], None if bias is None else bias[c], temperature, log2sum[c], t)
            out[c, keys].baddbmm_(weight.mT, d[c, rows])
    return out


def _softmax(q: Tensor, k: Tensor, bias: Tensor | None, temperature: float, log2sum: Tensor, t: Tile) -> Tensor:
    """The weights P of a tile."""
    weight = memory.product("weight", q[:, t.a : t.b], k[:, t.lo : t.hi], LOG2E / temperature)
    if bias is not None:
        weight.add_(bias[:, None, t.lo : t.hi], alpha=LOG2E)
    weight.sub_(log2sum[:, t.a : t.b, None])
    t.fill_absent(weight, ABSENT)
    return weight.exp2_()


def _chunk(
    c: slice, q: Tensor, k: Tensor | None, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Batch elements c of the inputs; what absent keys hold, even NaN, is put out of the way."""
    keys = q if k is None else k
    if bias is None:
        return q[c], keys[c], v[c], None
    absent = torch.isneginf(bias[c])[..., None]
    return q[c], keys[c].masked_fill(absent, 0), v[c].masked_fill(absent, 0), bias[c]


def _rows_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    grid: Grid,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    mean, log2sum, kind = out
    peak, total = torch.full_like(log2sum, ABSENT), torch.zeros_like(log2sum)
    beta = 0.0 if grid.whole else 1.0
    if not grid.whole:
        mean.zero_()
    for t in grid:
        rows, keys = slice(t.a, t.b), slice(t.lo, t.hi)
        weight = memory.product("weight", q[:, rows], k[:, keys], LOG2E / temperature)
        if bias is not None:
            weight.add_(bias[:, None, keys], alpha=LOG2E).clamp_(min=ABSENT)
        t.fill_absent(weight, ABSENT)
        highest = weight.amax(-1)
        if t.lo > t.first:  # what came before, relative to the new peak
            highest = torch.maximum(peak[:, rows], highest)
            fade = (peak[:, rows] - highest).exp2_()
            total[:, rows] *= fade
            mean[:, rows] *= fade[..., None]
        weight.sub_(highest[..., None]).exp2_()
        total[:, rows] += weight.sum(-1)
        if v.shape[-1] > 0:
            mean[:, rows].baddbmm_(weight, v[:, keys], beta=beta)
        peak[:, rows] = highest
    nothing = (peak < ABSENT / 2) | (total == 0)
    mean.div_(total.masked_fill(nothing, torch.inf)[..., None])
    log2sum.copy_(peak + total.log2()).masked_fill_(nothing, -torch.inf)
    kind.masked_fill_((total < 2) & ~nothing, RULED)  # the largest weight is 1: more than half of the row


def _rows_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    grid: Grid,
    came: tuple[Tensor, Tensor, Tensor, Tensor],
    ruled: Tensor,
    to: tuple[Tensor, Tensor, Tensor, Tensor | None],
    same: bool,
) -> None:
    mean, log2sum, d_mean, d_log = came
    dq, dk, dv, d_bias = to
    level = d_log - (d_mean * mean).sum(-1)
    ruler = Ruler(ruled, d_log) if v.shape[-1] > 0 and bool(ruled.any()) else None
    beta, alpha = 0.0 if grid.whole else 1.0, 1 / temperature
    for t in grid:
        rows, keys = slice(t.a, t.b), slice(t.lo, t.hi)
        weight = _softmax(q, k, bias, temperature, log2sum, t)
        if v.shape[-1] > 0:
            dv[:, keys].baddbmm_(weight.mT, d_mean[:, rows], beta=beta)
            push = memory.product("push", d_mean[:, rows], v[:, keys]).add_(level[:, rows, None]).mul_(weight)  # G
        else:
            push = weight.mul_(d_log[:, rows, None])
        if ruler is not None:
            ruler.take(push, weight, t)
        if d_bias is not None:
            d_bias[:, keys] += push.sum(-2)
        if same and grid.whole:  # dq + dk = (G + Gᵀ) q, one product instead of two; G is 0 at absent keys
            dq.baddbmm_(push + push.mT, q, beta=0.0, alpha=alpha)
        else:
            dq[:, rows].baddbmm_(push, k[:, keys], beta=beta, alpha=alpha)
            dk[:, keys].baddbmm_(push.mT, q[:, rows], beta=beta, alpha=alpha)
    if ruler is not None:
        ruler.give(q, k, alpha, (dq, dk, d_bias))


class Ruler:
    """The entries of G that belong to a row's ruling key, from what the others leave of Σ_j G_ij = dL_i."""

    def __init__(self, ruled: Tensor, d_log: Tensor) -> None:
        self.ruled, self.rest = ruled, d_log.clone()
        self.key = torch.zeros_like(ruled, dtype=torch.long)

    def take(self, push: Tensor, weight: Tensor, t: Tile) -> None:
        """Empty the ruling entries of a tile of G and note the sums of the others."""
        rows = slice(t.a, t.b)
        b, i, j = ((weight > 0.5) & self.ruled[:, rows, None]).nonzero(as_tuple=True)
        push[b, i, j] = 0
        self.key[:, rows][b, i] = j + t.lo
        self.rest[:, rows] -= push.sum(-1)

    def give(self, q: Tensor, k: Tensor, alpha: float, to: tuple[Tensor, Tensor, Tensor | None]) -> None:
        """Add what the ruling entries contribute to the gradients of q, k and bias."""
        dq, dk, d_bias = to
        b, i = self.ruled.nonzero(as_tuple=True)
        j, push = self.key[b, i], self.rest[b, i, None]
        dq.index_put_((b, i), push * k[b, j] * alpha, accumulate=True)
        dk.index_put_((b, j), push * q[b, i] * alpha, accumulate=True)
        if d_bias is not None:
            d_bias.index_put_((b, j), push.squeeze(-1), accumulate=True)


def _symmetric_forward(
    x: Tensor,
    _: Tensor,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    grid: Grid,
    out: tuple[Tensor, Tensor, Tensor],
) -> bool:
    """False, with nothing of value written, where it cannot be used or one key outweighs the others of its row."""
    if not _symmetric_applies(x, bias, temperature, grid.pairs):
        return False
    mean, log2sum, kind = out
    share = x.new_ones(x.shape[:-1]) if bias is None else (bias * LOG2E).exp2()
    values = v if bias is None else v * share[..., None]
    total, peak = torch.zeros_like(share), torch.zeros_like(share)
    mean.zero_()
    for t in grid:
        rows, keys, others = slice(t.a, t.b), slice(t.lo, t.hi), slice(max(t.b, t.lo), t.hi)
        weight = memory.product("weight", x[:, rows], x[:, keys], LOG2E / temperature).exp2_()
        t.fill_absent(weight, 0)
        beyond = weight[..., others.start - t.lo :]  # the same weights, seen from their keys
        if bias is None:
            total[:, rows] += weight.sum(-1)
            total[:, others] += beyond.sum(-2)
        else:
            total[:, rows] += torch.bmm(weight, share[:, keys, None]).squeeze(-1)
            total[:, others] += torch.bmm(beyond.mT, share[:, rows, None]).squeeze(-1)
        if v.shape[-1] > 0:
            mean[:, rows].baddbmm_(weight, values[:, keys])
            mean[:, others].baddbmm_(beyond.mT, values[:, rows])
            peak[:, rows] = torch.maximum(peak[:, rows], weight.amax(-1))
            peak[:, others] = torch.maximum(peak[:, others], beyond.amax(-2))
    if bool((peak > total / 2).any()):
        return False
    mean.div_(total.clamp(min=torch.finfo(x.dtype).tiny)[..., None])
    torch.log2(total, out=log2sum)
    kind.fill_(SYMMETRIC)
    return True


def _symmetric_applies(x: Tensor, bias: Tensor | None, temperature: float, pairs: Pairs) -> bool:
    if x.device.type != "cpu" or pairs.offset is not None or not pairs.mirrored or x.numel() == 0:
        return False
    largest = float(torch.linalg.vector_norm(x, dim=-1).max()) ** 2 / temperature
    if bias is not None:
        largest = max(largest, float(bias.masked_fill(torch.isneginf(bias), 0).abs().max()))
    return largest <= SAFE_LOGIT[x.dtype]  # False for NaN


def _symmetric_backward(
    x: Tensor,
    _: Tensor,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    grid: Grid,
    came: tuple[Tensor, Tensor, Tensor, Tensor],
    to: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> None:
    mean, log2sum, d_mean, d_log = came
    dx, _, dv, d_bias = to
    share = x.new_ones(x.shape[:-1]) if bias is None else (bias * LOG2E).exp2()
    pull = _with_columns(d_mean, d_log - (d_mean * mean).sum(-1)) * (-log2sum).exp2()[..., None]
    offer = _with_columns(v, 1.0) * share[..., None]
    left, right = torch.cat([pull, offer], -1), torch.cat([offer, pull], -1)
    d_share = torch.zeros_like(share)
    for t in grid:
        rows, keys, others = slice(t.a, t.b), slice(t.lo, t.hi), slice(max(t.b, t.lo), t.hi)
        weight = memory.product("weight", x[:, rows], x[:, keys], LOG2E / temperature).exp2_()
        t.fill_absent(weight, 0)
        beyond = weight[..., others.start - t.lo :]
        if v.shape[-1] > 0:
            dv[:, rows].baddbmm_(weight, pull[:, keys, :-1])
            dv[:, others].baddbmm_(beyond.mT, pull[:, rows, :-1])
        if bias is not None:
            d_share[:, rows] += torch.bmm(weight, pull[:, keys, -1:]).squeeze(-1)
            d_share[:, others] += torch.bmm(beyond.mT, pull[:, rows, -1:]).squeeze(-1)
        push = memory.product("push", left[:, rows], right[:, keys]).mul_(weight)  # G_ij + G_ji
        dx[:, rows].baddbmm_(push, x[:, keys])
        dx[:, others].baddbmm_(push[..., others.start - t.lo :].mT, x[:, rows])
    dx.div_(temperature)
    if d_bias is not None:
        d_bias.copy_(((dv * v).sum(-1) + d_share) * share)
        dv.mul_(share[..., None])


def _with_columns(x: Tensor, *columns: Tensor | float) -> Tensor:
    """x (..., d) with more features: a product of two such adds them to every entry without a pass of its own."""
    full = [c.unsqueeze(-1) if isinstance(c, Tensor) else x.new_full((*x.shape[:-1], 1), c) for c in columns]
    return torch.cat([x, *full], -1)
