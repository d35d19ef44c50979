"""Metrics of attention maps: similarity of their rows, deviation and entropy."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from uncollapse.metrics.similarity import CONTRA_NORM
from uncollapse.pairwise import numerics
from uncollapse.pairwise.pair_means import mean_from_sum, pair_cosine
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


@dataclass(frozen=True)
class RowSums:
    """What the metrics above need of some rows of attention maps (..., heads, r, n): sums of several parts add up.

    unit: Σ_i a_i/‖a_i‖ (..., heads, n). pointing: how many rows are not empty. deviation: Σ_i of the standard
    deviations of the rows. entropy: Σ_i of their entropies. All (..., heads).
    """

    unit: Tensor
    pointing: Tensor
    deviation: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, attn: Tensor, count: Tensor, keys: Tensor | None = None, rows: Tensor | None = None) -> "RowSums":
        """Return the sums over rows of maps, which are overwritten. NotFiniteError if a real row is not finite.

        attn: (..., heads, r, n). count: number of real keys (...). keys: (..., n), rows: (..., r) bool, True = real.
        """
        if keys is not None:
            attn = attn.masked_fill_(~keys[..., None, None, :], 0)
        found = cls._of(attn, count, keys, rows)
        if bool(torch.isfinite(found.entropy.sum())):
            return found
        if rows is not None:
            attn = attn.masked_fill_(~rows[..., None, :, None], 0)
        numerics.check_finite(attn, "attn")
        return cls._of(attn, count, keys, rows)

    @classmethod
    def _of(cls, attn: Tensor, count: Tensor, keys: Tensor | None, rows: Tensor | None) -> "RowSums":
        norms, count = torch.linalg.vector_norm(attn, dim=-1), count.clamp(min=1)[..., None, None]
        inverse = torch.where(norms > 0, 1 / norms, 0)
        logs = attn.clamp(min=torch.finfo(attn.dtype).tiny).log_()
        entropy = -logs.mul_(attn).sum(-1)
        mean = attn.sum(-1, dtype=torch.float64).to(attn.dtype) / count
        shift = torch.sub(attn, mean[..., None], out=logs)
        shift = shift if keys is None else shift.masked_fill_(~keys[..., None, None, :], 0)
        deviation = torch.linalg.vector_norm(shift, dim=-1) / count.sqrt()
        if rows is not None:
            inverse, deviation, entropy = (x * rows[..., None, :] for x in (inverse, deviation, entropy))
        unit = (inverse[..., None, :] @ attn).squeeze(-2)
        return cls(unit, (inverse > 0).sum(-1), deviation.sum(-1), entropy.sum(-1))

    def __add__(self, other: "RowSums") -> "RowSums":
        return RowSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def metrics(self, count: Tensor) -> dict[str, Tensor]:
        """Return the three metrics (...) of maps with this number of real tokens (...), from the sums over all rows."""
        each = count[..., None]
        similarity = mean_from_sum(self.unit, self.pointing, each.expand_as(self.pointing))
        entropy = self.entropy / each.clamp(min=1) / each.clamp(min=2).log()
        return {
            "attention_similarity": similarity.mean(-1),
            "attention_std": (self.deviation / each.clamp(min=1)).mean(-1),
            "attention_entropy": entropy.masked_fill(each < 2, 0).mean(-1),
        }


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
