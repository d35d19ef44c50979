"""The log-sum-exps of rows and of columns in one pass: each tile of logits serves both.

    S_ij = q_i·k_j/τ      R_i = log Σ_j exp S_ij      C_j = log Σ_i exp S_ij

with gradients, for incoming dR and dC,

    G_ij = exp(S_ij − R_i) dR_i + exp(S_ij − C_j) dC_j     dq = G k/τ     dk = Gᵀ q/τ

That is one product forward and three backward; two separate directions would need twice as many. The weights are exp(S)
without a shift, as in `symmetric`; larger logits go through `walk`, once in each direction.
"""

from typing import Any

import torch
from torch import Tensor

from uncollapse.pairwise import backends, walk
from uncollapse.pairwise.grid import ABSENT, LOG2E, PLAIN, Grid, Pairs, Tile, memory
from uncollapse.pairwise.numerics import full_dtype
from uncollapse.pairwise.products import accumulate
from uncollapse.pairwise.symmetric import is_moderate


@torch.library.custom_op("uncollapse::log_sums", mutates_args=())
def log_sums_operator(q: Tensor, k: Tensor, temperature: float, no_self: bool) -> tuple[Tensor, Tensor]:
    """Return R (b, n) and C (b, m) for q (b, n, d) and k (b, m, d); no_self: without the pairs i = j."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return backends.run(q, log_sums, q, k, temperature, no_self)


@torch.library.custom_op("uncollapse::log_sums_backward", mutates_args=())
def _log_sums_backward_operator(
    d_row: Tensor,
    d_column: Tensor,
    row: Tensor,
    column: Tensor,
    q: Tensor,
    k: Tensor,
    temperature: float,
    no_self: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k; `row` and `column` may be sums over more keys and queries than these."""
    arguments = d_row, d_column, row, column, q, k, temperature, no_self
    with torch.autocast(q.device.type, enabled=False):
        dq, dk = backends.run(q, log_sums_backward, *arguments)
    return dq.to(q.dtype), dk.to(k.dtype)


def log_sums(q: Tensor, k: Tensor, temperature: float, no_self: bool) -> tuple[Tensor, Tensor]:
    """Return R and C, tile by tile."""
    if _applies(q, k, temperature):
        return _forward(q, k, temperature, Grid(Pairs(no_self=no_self), q.shape[1], k.shape[1], q.device))
    return _one_way(q, k, temperature, no_self), _one_way(k, q, temperature, no_self)


def log_sums_backward(
    d_row: Tensor,
    d_column: Tensor,
    row: Tensor,
    column: Tensor,
    q: Tensor,
    k: Tensor,
    temperature: float,
    no_self: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k, tile by tile."""
    if _applies(q, k, temperature):
        grid = Grid(Pairs(no_self=no_self), q.shape[1], k.shape[1], q.device)
        return _backward(q, k, temperature, grid, _shares(d_row, row), _shares(d_column, column))
    dq, dk = _one_way_backward(q, k, temperature, no_self, row, d_row)
    more_dk, more_dq = _one_way_backward(k, q, temperature, no_self, column, d_column)
    return dq.add_(more_dq), dk.add_(more_dk)


def _applies(q: Tensor, k: Tensor, temperature: float) -> bool:
    if q.device.type != "cpu" or q.numel() == 0 or k.numel() == 0:
        return False
    lengths = [float(torch.linalg.vector_norm(x, dim=-1).max()) for x in (q, k)]
    return is_moderate(lengths[0] * lengths[1] / temperature, max(q.shape[1], k.shape[1]), q.dtype)


def _forward(q: Tensor, k: Tensor, temperature: float, grid: Grid) -> tuple[Tensor, Tensor]:
    row, column = q.new_zeros(q.shape[:2]), k.new_zeros(k.shape[:2])
    for c in grid.chunks(q.shape[0]):
        for t in grid:
            weight = _weights(q[c], k[c], temperature, t)
            row[c, t.rows] += weight.sum(-1)
            column[c, t.keys] += weight.sum(-2)
    return row.log_(), column.log_()


def _backward(
    q: Tensor, k: Tensor, temperature: float, grid: Grid, row: Tensor, column: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k for the factors of each pair's weight, by its row and by its column."""
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    for c in grid.chunks(q.shape[0]):
        for t in grid:
            weight = _weights(q[c], k[c], temperature, t)
            push = memory.sums("push", row[c, t.rows], column[c, t.keys]).mul_(weight)  # G
            accumulate(dq[c, t.rows], push, k[c, t.keys], alpha=1 / temperature)
            accumulate(dk[c, t.keys], push.mT, q[c, t.rows], alpha=1 / temperature)
    return dq, dk


def _weights(q: Tensor, k: Tensor, temperature: float, t: Tile) -> Tensor:
    """Return exp(S) of a tile, 0 for excluded pairs."""
    weight = memory.product("weight", q[:, t.rows], k[:, t.keys], LOG2E / temperature).exp2_()
    t.fill_absent(weight, 0)
    return weight


def _shares(d_log: Tensor, log_sum: Tensor) -> Tensor:
    """Return d_log/exp(log_sum), and 0 in rows where no key is left."""
    nothing = torch.isneginf(log_sum)
    return d_log.masked_fill(nothing, 0) * (-log_sum).masked_fill(nothing, ABSENT).exp()


def _one_way(q: Tensor, k: Tensor, temperature: float, no_self: bool) -> Tensor:
    return walk.forward(q, k, k[..., :0], None, temperature, Pairs(no_self=no_self))[1]


def _one_way_backward(
    q: Tensor, k: Tensor, temperature: float, no_self: bool, log_sum: Tensor, d_log: Tensor
) -> tuple[Tensor, Tensor]:
    mean, kind = q.new_empty(*log_sum.shape, 0), torch.full_like(log_sum, PLAIN, dtype=torch.uint8)
    saved = mean, log_sum, kind, q.new_empty(q.shape[0], 0, 0)
    dq, dk, _, _ = walk.backward(
        q, k, k[..., :0], None, temperature, Pairs(no_self=no_self), saved, torch.zeros_like(mean), d_log
    )
    assert dk is not None  # it is None only for k = None
    return dq, dk


@log_sums_operator.register_fake
def _(q: Tensor, k: Tensor, temperature: float, no_self: bool) -> tuple[Tensor, Tensor]:
    dtype = full_dtype(q)
    return q.new_empty(q.shape[:2], dtype=dtype), k.new_empty(k.shape[:2], dtype=dtype)


_log_sums_backward_operator.register_fake(lambda *args: (torch.empty_like(args[4]), torch.empty_like(args[5])))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, ctx.temperature, ctx.no_self = inputs
    ctx.save_for_backward(*output, q, k)


def _gradient(ctx: Any, d_row: Tensor, d_column: Tensor) -> tuple[Tensor | None, ...]:
    return *_log_sums_backward_operator(d_row, d_column, *ctx.saved_tensors, ctx.temperature, ctx.no_self), None, None


log_sums_operator.register_autograd(_gradient, setup_context=_remember)
