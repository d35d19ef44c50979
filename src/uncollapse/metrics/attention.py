"""Metrics of attention maps: similarity of their rows, deviation and entropy."""

import torch
from torch import Tensor

from uncollapse.metrics.similarity import CONTRA_NORM
from uncollapse.pairwise import numerics
from uncollapse.pairwise.pair_means import pair_cosine
from uncollapse.registry import metric

DIVERSE_PATCH = "Vision Transformers with Patch Diversification, arXiv 2104.12753"
ENTROPY = "Stabilizing Transformer Training by Preventing Attention Entropy Collapse, arXiv 2303.06296"

SLACK = 2**-6  # rounding to bfloat16 may carry the sum of a row this far beyond 1


@metric(needs=("attention",), better="lower", bounds=(0, 1), paper=CONTRA_NORM)
def attention_similarity(attn: Tensor, mask: Tensor | None = None, *, prefix: int = 0) -> Tensor:
    """Return the mean cosine between the rows of each attention map, averaged over heads.

        mean_h 1/(n(n−1)) Σ_{i≠j} cos(a_hi, a_hj)

    ContraNorm, arXiv 2303.06562. At 1 all tokens attend to the same places.

    Args:
        attn: attention after the softmax (..., heads, n, n), queries in rows.
        mask: (..., n) bool, True = real; rows and columns of other tokens are dropped.
        prefix: number of leading tokens (CLS, registers) whose rows and columns are dropped.

    Returns:
        (...), in float32 or float64; 0 with fewer than two tokens left. An empty row has cosine 0 with the others.

    >>> import torch
    >>> attention_similarity(torch.full((2, 4, 4), 0.25))
    tensor(1.)
    """
    attn, mask = _prepare_maps(attn, mask, prefix)
    return pair_cosine(attn, numerics.real_count(attn, mask)).mean(-1)


@metric(needs=("attention",), better="higher", bounds=(0, 1), paper=DIVERSE_PATCH)
def attention_std(attn: Tensor, mask: Tensor | None = None, *, prefix: int = 0) -> Tensor:
    """Return the standard deviation of each attention row, averaged over rows and heads.

        mean_{h,i} √(1/n Σ_j (a_hij − mean_j a_hij)²)

    Layer-wise attention deviation of DiversePatch, arXiv 2104.12753. At 0 every token attends evenly to all.

    Args:
        attn: attention after the softmax (..., heads, n, n), queries in rows.
        mask: (..., n) bool, True = real; rows and columns of other tokens are dropped.
        prefix: number of leading tokens whose rows and columns are dropped; the rest of a row is not renormalized.

    Returns:
        (...), in float32 or float64; 0 with fewer than two tokens left. The gradient of an even row is 0.

    >>> import torch
    >>> attention_std(torch.eye(2).expand(3, 2, 2))
    tensor(0.5000)
    """
    attn, mask = _prepare_maps(attn, mask, prefix)
    count = numerics.real_count(attn, mask).clamp(min=1)
    shift = numerics.center(attn.mT, mask)  # keys in rows
    variance = shift.square().sum(-2) / count[..., None]  # (..., heads, n)
    uneven = variance > 0
    deviation = torch.where(uneven, variance, 1).sqrt() * uneven
    return (deviation.sum(-1) / count).mean(-1)


@metric(needs=("attention",), better=None, bounds=(0, 1), paper=ENTROPY)
def attention_entropy(attn: Tensor, mask: Tensor | None = None, *, prefix: int = 0) -> Tensor:
    """Return the entropy of each attention row relative to its maximum, averaged over rows and heads.

        mean_{h,i} −Σ_j a_hij log a_hij / log n

    Zhai et al., arXiv 2303.06296. Near 0 each token attends to one other, near 1 evenly to all. Neither is healthy or
    unhealthy by itself.

    Args:
        attn: attention after the softmax (..., heads, n, n), queries in rows.
        mask: (..., n) bool, True = real; rows and columns of other tokens are dropped.
        prefix: number of leading tokens whose rows and columns are dropped. The rest of a row is not renormalized, so
            that with two tokens left the value can reach 1.07.

    Returns:
        (...), in float32 or float64; 0 with fewer than two tokens left. Zero entries get no gradient.

    >>> import torch
    >>> attention_entropy(torch.full((1, 4, 4), 0.25))
    tensor(1.)
    """
    attn, mask = _prepare_maps(attn, mask, prefix)
    count = numerics.real_count(attn, mask)
    entropy = -(attn * torch.where(attn > 0, attn, 1).log()).sum((-2, -1)) / count.clamp(min=1)
    return (entropy / count.clamp(min=2).log()).masked_fill(count < 2, 0).mean(-1)


def _prepare_maps(attn: Tensor, mask: Tensor | None, prefix: int) -> tuple[Tensor, Tensor | None]:
    """Check the maps; return them without prefix tokens and with zeros at masked ones, and the mask (..., 1, n)."""
    numerics.check_float(attn, "attn")
    if attn.dim() < 3 or attn.shape[-1] != attn.shape[-2] or attn.shape[-3] == 0:
        raise ValueError(f"attn must have shape (..., heads, n, n), got {tuple(attn.shape)}.")
    if not 0 <= prefix <= attn.shape[-1]:
        raise ValueError(f"prefix must be between 0 and n = {attn.shape[-1]}, got {prefix}.")
    if mask is not None:
        numerics.check_mask(mask, attn.shape[:-3] + attn.shape[-1:])
        mask = mask[..., None, prefix:]
    attn = numerics.prepare(attn[..., prefix:, prefix:], mask)
    if mask is not None:
        attn = attn.masked_fill(~mask[..., None, :], 0)
    numerics.check_finite(attn, "attn")
    _check_softmax(attn.detach())
    return attn, mask


def _check_softmax(attn: Tensor) -> None:
    """Raise unless rows are non-negative and sum to at most 1."""
    if attn.numel() == 0 or torch.compiler.is_compiling():
        return
    least, most = float(attn.amin()), float(attn.sum(-1).amax())
    if least < 0 or most > 1 + SLACK:
        raise ValueError(
            f"attn must hold attention after the softmax, with entries ≥ 0 and rows that sum to at most 1. Got a "
            f"minimum of {least:.4g} and a largest sum of {most:.4g}, as for logits or for maps after dropout."
        )
