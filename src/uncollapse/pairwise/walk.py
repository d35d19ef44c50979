"""Forward and backward over the whole batch: chunks of it go to the walk that suits them."""

import torch
from torch import Tensor

from uncollapse.pairwise import rows, symmetric
from uncollapse.pairwise.grid import (
    ABSENT,
    LOG2E,
    PLAIN,
    SYMMETRIC,
    Grid,
    InputGradients,
    Inputs,
    OutputGradients,
    Outputs,
    Pairs,
)

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
    """Mean (b, n, e), logarithm of the sum (b, n), how each row was computed (b, n), and what `backward` may reuse.

    q (b, n, d), k (b, m, d) or None for k = q, v (b, m, e) where e may be 0, bias (b, m). keep: the weights, which are
    then in one tile, see `keeps_weights`.
    """
    batch, n, m = q.shape[0], q.shape[1], v.shape[1]
    kind = torch.full((batch, n), PLAIN, dtype=torch.uint8, device=q.device)
    weight = q.new_empty(batch, *((n, m) if keep else (0, 0)))
    found = Outputs(v.new_empty(batch, n, v.shape[-1]), q.new_empty(batch, n), kind, weight)
    given = Inputs(q, q if k is None else k, v, bias, temperature)
    grid, upper = _grids(pairs, n, m, q.device, same=k is None)
    for c in grid.chunks(batch):
        part, out = given.chunk(c), Outputs(*(t[c] for t in found))
        if upper is None or not symmetric.forward(part, upper, out):
            rows.forward(part, grid, out)
    return found.mean, found.log2sum.div_(LOG2E), found.kind, found.weight


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
    """Gradients of q, k, v and bias; with k = None, q's is that of both roles."""
    mean, log_sum, kind, weight = saved
    given = Inputs(q, q if k is None else k, v, bias, temperature)
    grid, upper = _grids(pairs, q.shape[1], v.shape[1], q.device, same=k is None)
    make = torch.empty_like if grid.whole else torch.zeros_like
    dq = make(q)
    to = InputGradients(dq, dq if k is None else make(k), make(v), None if bias is None else torch.zeros_like(bias))
    nothing, log2sum = torch.isneginf(log_sum), log_sum * LOG2E
    if bool(nothing.any()):
        d_mean, d_log = d_mean.masked_fill(nothing[..., None], 0), d_log.masked_fill(nothing, 0)
        log2sum = log2sum.masked_fill(nothing, -ABSENT)  # all weights of such a row become 0
    for c in grid.chunks(q.shape[0]):
        part, came = given.chunk(c), OutputGradients(d_mean[c], d_log[c])
        found = Outputs(mean[c], log2sum[c], kind[c], weight[c])
        out = InputGradients(to.q[c], to.k[c], to.v[c], None if to.bias is None else to.bias[c])
        if upper is not None and bool(found.kind[:, :1].eq(SYMMETRIC).any()):
            symmetric.backward(part, upper, found, came, out)
        else:
            rows.backward(part, grid, found, came, out, same=k is None)
    return to.q, None if k is None else to.k, to.v, to.bias


def spread(
    q: Tensor, k: Tensor, d: Tensor, bias: Tensor | None, temperature: float, pairs: Pairs, log_sum: Tensor
) -> Tensor:
    """Pᵀ d (b, m, e) for d (b, n, e): each query gives its d to the keys, by weight. The adjoint of the mean."""
    out = d.new_zeros(k.shape[0], k.shape[1], d.shape[-1])
    log2sum = (log_sum * LOG2E).masked_fill(torch.isneginf(log_sum), -ABSENT)
    given = Inputs(q, k, k[..., :0], bias, temperature)
    grid = Grid(pairs, q.shape[1], k.shape[1], q.device)
    for c in grid.chunks(q.shape[0]):
        part = given.chunk(c)
        for t in grid:
            out[c, t.keys].baddbmm_(rows.softmax(part, log2sum[c], t).mT, d[c, t.rows])
    return out


def _grids(pairs: Pairs, n: int, m: int, device: torch.device, same: bool) -> tuple[Grid, Grid | None]:
    """All tiles, and those on and above the diagonal where the symmetric walk may be worth it."""
    grid = Grid(pairs, n, m, device)
    return grid, Grid(pairs, n, m, device, upper=True) if same and not grid.single else None
