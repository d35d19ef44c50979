"""Metrics that a few outliers do not dominate.

In healthy GPT and Llama models a few rogue features (arXiv 2109.04404) and the first token of a sequence are up to
hundreds of times as large as everything else. The raw cosine and the raw rank are then near 1, although the tokens
differ in every other feature. Here these features and the first token are dropped, and tokens are normalized.
"""

import torch
from torch import Tensor

from uncollapse.metrics.spectrum import gram_spectrum, rank_from_singular_values
from uncollapse.pairwise import numerics
from uncollapse.pairwise.pair_means import mean_from_sum

FEATURES = 3  # features of largest energy that are dropped, at most one in sixteen
REST = 1e-6  # share of the energy that the other features must have; otherwise nothing is dropped
FLAT = 1e-10  # ratio of spread to energy below which unit rows are equal up to rounding
FLOOR = 1e-3  # features with less than this share of the largest deviation are noise, and not scaled up further


def drop_largest_features(x: Tensor) -> tuple[Tensor, int]:
    """Return x (..., n, d) with zeros in the features of largest energy of each set, and their number."""
    k = min(FEATURES, x.shape[-1] // 16)
    if k == 0 or x.numel() == 0:
        return x, 0
    energy = x.double().square().sum(-2)  # (..., d)
    top, places = energy.topk(k, -1)
    total = energy.sum(-1)
    alone = (total - top.sum(-1)) < REST * total  # there is nothing else: these features are not outliers
    drop = torch.zeros_like(energy, dtype=torch.bool).scatter(-1, places, True) & ~alone[..., None]
    return x.masked_fill(drop[..., None, :], 0), k


def drop_first_token(mask: Tensor) -> Tensor:
    """Return mask (..., n) without the first real token of each sequence, on whichever side padding is."""
    first = mask.cumsum(-1) == 1
    return mask & ~first


def robust_cosine(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean cosine of the real tokens of each set, x (..., n, d) -> (...), without its largest features.

    Zero tokens have no direction; a set of zero tokens only, as after dead units, has the value 1.
    """
    kept, _ = drop_largest_features(numerics.prepare(x, mask).double())
    return _cosine(kept, numerics.unit_rows(kept), mask)


def rank_share(x: Tensor, mask: Tensor) -> Tensor:
    """Return the effective rank of the centered unit tokens of each set over min(n − 1, d), from 0 (equal) to 1."""
    kept, dropped = drop_largest_features(numerics.prepare(x, mask).double())
    return _share(numerics.unit_rows(kept), mask, x.shape[-1] - dropped)


def cosine_and_rank_share(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return `robust_cosine` and `rank_share`; most of their steps are the same."""
    kept, dropped = drop_largest_features(numerics.prepare(x, mask).double())
    unit = numerics.unit_rows(kept)
    return _cosine(kept, unit, mask), _share(unit, mask, x.shape[-1] - dropped)


def _cosine(x: Tensor, unit: Tensor, mask: Tensor) -> Tensor:
    dead = (x == 0).all(-1).all(-1)
    pointing = (unit != 0).any(-1).sum(-1)
    return mean_from_sum(unit.sum(-2), pointing, mask.sum(-1)).clamp(-1, 1).masked_fill(dead, 1)


def _share(unit: Tensor, mask: Tensor, features: int) -> Tensor:
    shift = numerics.center(unit, mask)
    flat = shift.square().sum((-2, -1)) <= FLAT * unit.square().sum((-2, -1))
    most = (mask.sum(-1) - 1).clamp(min=1, max=features)
    rank = rank_from_singular_values(gram_spectrum(shift))
    return (rank / most).masked_fill(flat, 0).clamp(max=1)


def sample_rank_share(rows: Tensor) -> Tensor:
    """Return the effective rank of normalized rows (m, d) with standardized features over min(m − 1, d); 0 if equal."""
    unit = numerics.unit_rows(rows.double())
    shift = numerics.center(unit, None)
    if len(rows) < 2 or float(shift.square().sum()) <= FLAT * float(unit.square().sum()):
        return shift.new_zeros(())
    deviation = shift.square().mean(0).sqrt()
    shift = shift / deviation.clamp(min=FLOOR * float(deviation.max()))
    rank = rank_from_singular_values(gram_spectrum(shift))
    return (rank / min(len(rows) - 1, rows.shape[1])).clamp(max=1)
