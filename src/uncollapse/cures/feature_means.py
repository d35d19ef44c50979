"""Softmax means over features: m = x P with P = softmax(uᵀu/τ) of each set, d×d instead of n×n.

The weights of a batch of sentences are larger than its tokens. They are computed a few sets at a time, while they are
in the cache. They are kept for the backward pass, unless sequences are so short that to compute them again is faster.
With G = P ∘ (xᵀg − t), where t_i = Σ_j P_ij (xᵀg)_ij = Σ_n (x ∘ gPᵀ)_ni,

    dx = g Pᵀ      du = u (G + Gᵀ)/τ

which is one product and several passes over d×d less than autograd needs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from uncollapse.pairwise.grid import LOG2E, Grid, Inputs, Pairs, memory
from uncollapse.pairwise.products import accumulate
from uncollapse.pairwise.threads import for_each_chunk

SHORT = 32  # tokens below which a product takes less time than new memory for d×d, or than adding a transpose


def feature_means(unit: Tensor, value: Tensor, temperature: float) -> Tensor:
    """Return value · softmax(unitᵀ unit/τ) (..., n, d) for unit and value (..., n, d), in float32 or float64."""
    ordinary = all(type(x) is Tensor and x.device.type == "cpu" for x in (unit, value))
    if torch.compiler.is_compiling() or not ordinary or unit.numel() == 0:
        return _plain(unit, value, temperature)
    flat = (x.reshape(-1, *x.shape[-2:]) for x in (unit, value))
    mean: Tensor = _FeatureMeans.apply(*flat, temperature)  # type: ignore[no-untyped-call]
    return mean.reshape(value.shape)


def _plain(unit: Tensor, value: Tensor, temperature: float) -> Tensor:
    return value @ (unit.mT @ (unit / temperature)).softmax(-1)


class _FeatureMeans(torch.autograd.Function):
    """The means of unit and value (b, n, d)."""

    @staticmethod
    def forward(ctx: Any, unit: Tensor, value: Tensor, temperature: float) -> Tensor:
        batch, _, dim = unit.shape
        keep = any(ctx.needs_input_grad) and unit.shape[1] >= SHORT
        kept = unit.new_empty(batch, *((dim, dim) if keep else (0, 0)))
        mean, log2sum = torch.empty_like(value), unit.new_empty(batch, dim, 1)

        def work(c: slice) -> None:
            weight = _logits(unit[c], temperature, kept[c] if keep else None)
            highest = weight.amax(-1, keepdim=True)
            total = weight.sub_(highest).exp2_().sum(-1, keepdim=True)
            accumulate(mean[c], value[c], weight.div_(total), 0.0)
            torch.add(highest, total.log2(), out=log2sum[c])

        _for_each_chunk(work, unit, value, temperature)
        ctx.save_for_backward(unit, value, kept, log2sum)
        ctx.temperature = temperature
        return mean

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, value, kept, log2sum = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted
            found = torch.autograd.grad(_plain(unit, value, ctx.temperature), (unit, value), d_mean, create_graph=True)
            return found[0], found[1], None
        d_mean, d_unit, d_value = d_mean.contiguous(), torch.empty_like(unit), torch.empty_like(value)

        def work(c: slice) -> None:
            x, g = value[c], d_mean[c]
            weight = kept[c] if kept.numel() else _logits(unit[c], ctx.temperature).sub_(log2sum[c]).exp2_()
            accumulate(d_value[c], g, weight.mT, 0.0)
            level = (x * d_value[c]).sum(-2)
            push = memory.product("push", x.mT, g.mT).sub_(level[..., None]).mul_(weight)  # G
            if unit.shape[1] < SHORT:
                accumulate(d_unit[c], unit[c], push, 0.0, 1 / ctx.temperature)
                accumulate(d_unit[c], unit[c], push.mT, 1.0, 1 / ctx.temperature)
            else:
                accumulate(d_unit[c], unit[c], push + push.mT, 0.0, 1 / ctx.temperature)

        _for_each_chunk(work, unit, value, ctx.temperature)
        return d_unit, d_value, None


def _logits(unit: Tensor, temperature: float, into: Tensor | None = None) -> Tensor:
    """Return uᵀu/τ · log₂e, in the tensor `into` if the weights are kept."""
    return memory.product("weight", unit.mT, unit.mT, LOG2E / temperature, into)


def _for_each_chunk(work: Callable[[slice], None], unit: Tensor, value: Tensor, temperature: float) -> None:
    dim = unit.shape[-1]
    inputs = Inputs(unit.mT, unit.mT, value, None, temperature)
    for_each_chunk(work, Grid(Pairs(), dim, dim, unit.device), inputs)
