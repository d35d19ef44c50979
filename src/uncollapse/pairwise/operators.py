"""The kernel as torch operators, which autograd differentiates and `torch.compile` treats as opaque nodes.

In those over all pairs k = None stands for k = q, and the last six arguments are the fields of `Pairs`. The gradient of
an argument that is None is an empty tensor, because operators can only return tensors. The nearest key of each query
is found tile by tile as well: no matrix of all distances is ever held.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from uncollapse.pairwise import backends, walk
from uncollapse.pairwise.grid import Grid, Pairs, memory
from uncollapse.pairwise.numerics import full_dtype

Gradients = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


@torch.library.custom_op("uncollapse::all_pairs", mutates_args=())
def all_pairs_operator(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    keep: bool,
    offset: int | None,
    no_self: bool,
    excluded: Tensor | None,
    mirrored: bool,
    row_group: Tensor | None,
    key_group: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return means, log-sum-exps and what the backward pass needs."""
    pairs = Pairs(offset, no_self, excluded, mirrored, row_group, key_group)
    return all_pairs_eagerly(q, k, v, bias, temperature, pairs, keep)


def all_pairs_eagerly(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    pairs: Pairs,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the same without gradients and without an operator's overhead; keep: return the weights for backward."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        if keep:
            return walk.forward(q, k, v, bias, temperature, pairs, keep)
        return backends.run(q, walk.forward, q, k, v, bias, temperature, pairs)


@torch.library.custom_op("uncollapse::all_pairs_backward", mutates_args=())
def _all_pairs_backward(
    d_mean: Tensor,
    d_log: Tensor,
    mean: Tensor,
    log_sum: Tensor,
    kind: Tensor,
    weight: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    bias: Tensor | None,
    temperature: float,
    keep: bool,
    offset: int | None,
    no_self: bool,
    excluded: Tensor | None,
    mirrored: bool,
    row_group: Tensor | None,
    key_group: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, saved = Pairs(offset, no_self, excluded, mirrored, row_group, key_group), (mean, log_sum, kind, weight)
    arguments = q, k, v, bias, temperature, pairs, saved, d_mean.contiguous(), d_log
    with torch.autocast(q.device.type, enabled=False):
        return _as_given(q, v, walk.backward(*arguments) if keep else backends.run(q, walk.backward, *arguments))


@torch.library.custom_op("uncollapse::spread", mutates_args=())
def spread_operator(
    q: Tensor,
    k: Tensor | None,
    d: Tensor,
    bias: Tensor | None,
    temperature: float,
    offset: int | None,
    no_self: bool,
    excluded: Tensor | None,
    mirrored: bool,
    row_group: Tensor | None,
    key_group: Tensor | None,
) -> Tensor:
    """Return Pᵀd for the softmax weights P."""
    pairs = Pairs(offset, no_self, excluded, mirrored, row_group, key_group)
    with torch.autocast(q.device.type, enabled=False):
        return backends.run(q, walk.spread, q, k, d, bias, temperature, pairs)


@torch.library.custom_op("uncollapse::spread_backward", mutates_args=())
def _spread_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor | None,
    d: Tensor,
    bias: Tensor | None,
    temperature: float,
    offset: int | None,
    no_self: bool,
    excluded: Tensor | None,
    mirrored: bool,
    row_group: Tensor | None,
    key_group: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs = Pairs(offset, no_self, excluded, mirrored, row_group, key_group)
    with torch.autocast(q.device.type, enabled=False):
        found = backends.run(q, walk.spread_backward, q, k, d, bias, temperature, pairs, d_out.contiguous())
        return _as_given(q, d, found)


def _as_given(q: Tensor, v: Tensor, found: Gradients) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v and bias in the dtypes of these; an empty tensor for None."""
    dq, dk, dv, d_bias = found
    dk = q.new_empty(0) if dk is None else dk
    d_bias = q.new_empty(0, dtype=full_dtype(q)) if d_bias is None else d_bias
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(v.dtype), d_bias


@all_pairs_operator.register_fake
def _(
    q: Tensor, k: Tensor | None, v: Tensor, bias: Tensor | None, temperature: float, keep: bool, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, sums = q.shape[:2], q.new_empty(0, dtype=full_dtype(q))
    weight = sums.new_empty(rows[0], *((rows[1], v.shape[1]) if keep else (0, 0)))
    return sums.new_empty(*rows, v.shape[-1]), sums.new_empty(rows), q.new_empty(rows, dtype=torch.uint8), weight


@spread_operator.register_fake
def _(q: Tensor, k: Tensor | None, d: Tensor, *_: object) -> Tensor:
    return d.new_empty(*(q if k is None else k).shape[:2], d.shape[-1], dtype=full_dtype(d))


def _fake_gradients(
    q: Tensor, k: Tensor | None, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dk = q.new_empty(0) if k is None else torch.empty_like(k)
    d_bias = q.new_empty(0, dtype=full_dtype(q)) if bias is None else torch.empty_like(bias)
    return torch.empty_like(q), dk, torch.empty_like(v), d_bias


_all_pairs_backward.register_fake(lambda *args: _fake_gradients(*args[6:10]))
_spread_backward.register_fake(lambda *args: _fake_gradients(*args[1:5]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    outputs = output if isinstance(output, tuple) else ()
    ctx.plain = [None if isinstance(value, Tensor) else value for value in inputs]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    ctx.where = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.save_for_backward(*tensors, *outputs)
    ctx.set_materialize_grads(False)  # otherwise zeros are allocated for outputs nobody reads, such as the weights


def _recall(ctx: Any) -> tuple[list[Any], list[Tensor]]:
    inputs, saved = list(ctx.plain), list(ctx.saved_tensors)
    for place, tensor in zip(ctx.where, saved, strict=False):
        inputs[place] = tensor
    return inputs, saved[len(ctx.where) :]


def _gradients(inputs: list[Any], found: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    dq, dk, dv, d_bias = found
    others = len(inputs) - 4
    return dq, None if inputs[1] is None else dk, dv, None if inputs[3] is None else d_bias, *[None] * others


def _all_pairs_gradient(
    ctx: Any, d_mean: Tensor | None, d_log: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    inputs, saved = _recall(ctx)
    if d_mean is None and d_log is None:
        return (None,) * len(inputs)
    came = (torch.zeros_like(of) if d is None else d for d, of in zip((d_mean, d_log), saved, strict=False))
    return _gradients(inputs, _all_pairs_backward(*came, *saved, *inputs))


def _spread_gradient(ctx: Any, d_out: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs, _ = _recall(ctx)
    if d_out is None:
        return (None,) * len(inputs)
    return _gradients(inputs, _spread_backward(d_out, *inputs))


all_pairs_operator.register_autograd(_all_pairs_gradient, setup_context=_remember)
spread_operator.register_autograd(_spread_gradient, setup_context=_remember)


class Nearest(NamedTuple):
    """Distance (..., n) of each query to its nearest key, and which key that is (..., n)."""

    distance: Tensor
    key: Tensor


def nearest_distances(q: Tensor, k: Tensor, index: Tensor) -> Tensor:
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
