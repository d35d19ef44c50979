"""What is done to the features of nodes before a model sees them."""

import torch
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean

NORMALISATIONS = ("auto", "rows", "unit", "standard", "none")


def normalise(x: Tensor, how: str) -> Tensor:
    """Features (n, d) on a common scale.

    - rows: the absolute values of each node sum to one;
    - unit: each node has length one;
    - standard: each feature has mean zero and variance one over all nodes;
    - none: as they are;
    - auto: rows where no value is negative (bags of words), none otherwise.

    Nodes without features, and features that are the same everywhere, become zero.

    >>> normalise(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), "rows")
    tensor([[0.7500, 0.2500],
            [0.0000, 0.0000]])
    """
    if how not in NORMALISATIONS:
        hint = did_you_mean(how, NORMALISATIONS)
        raise UsageError(f"normalise must be one of {', '.join(NORMALISATIONS)}, got {how!r}.{hint}")
    if how == "auto":
        how = "rows" if bool((x >= 0).all()) else "none"
    if how == "rows":
        return x / x.abs().sum(1, keepdim=True).clamp(min=1e-12)
    if how == "unit":
        return torch.nn.functional.normalize(x, dim=1, eps=1e-12)
    if how == "standard":
        centred = x - x.mean(0)
        varies = x.amax(0) > x.amin(0)  # rounding leaves a variance where there is none
        return torch.where(varies, centred / centred.square().mean(0).sqrt().clamp(min=1e-12), 0.0)
    return x


def hide(x: Tensor, nodes: Tensor, share: float, seed: int) -> Tensor:
    """Set the features of a share of some nodes (mask) to zero, drawn by the seed: PairNorm's missing features."""
    if not 0.0 <= share <= 1.0:
        raise UsageError(f"missing must be a share between 0 and 1, got {share}.")
    candidates = nodes.nonzero().squeeze(1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return x.index_fill(0, candidates[order[: round(share * len(candidates))]], 0.0)
