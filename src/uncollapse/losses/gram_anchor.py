"""Gram anchoring: similarities of patches that stay those of an earlier checkpoint (DINOv3, arXiv 2508.10104)."""

import torch
from torch import Tensor

from uncollapse.pairwise.numerics import check_rows, prepare, real_count, unit_rows
from uncollapse.pairwise.pair_means import reduce_pairs
from uncollapse.registry import loss

PAPER = "DINOv3, arXiv 2508.10104"


@loss(needs=("tokens", "pairs"), paper=PAPER)
def gram_anchor_loss(x: Tensor, anchor: Tensor, *, normalize: bool = True, mask: Tensor | None = None) -> Tensor:
    """Keep the similarities of the patches of an image what they were in an anchor model.

        (1/n²) ‖XXᵀ − GGᵀ‖_F²

    DINOv3, arXiv 2508.10104, as a mean over the n² pairs, which the released code takes. The features may move
    as long as their similarities stay. It acts on dense features that decay in long training; it does not spread
    features, as `patch_cosine_loss` does, but returns to those of an earlier checkpoint. Memory is linear in n.

    Args:
        x: patches (..., n, d) of the model in training.
        anchor: patches (..., n, e) of the same images in the anchor, such as an earlier checkpoint; row i belongs to
            row i of x. Compute them without a gradient. Resize the feature map of an anchor with more patches first.
        normalize: divide rows by their norm first, as the authors do; a zero row stays zero.
        mask: (..., n) bool, True = real. Masked patches may hold anything and have no influence.

    Returns:
        A scalar, the mean over images, in float32 (float64 for float64 inputs); 0 where x is the anchor or a rotation
        of it, and for an image without a real patch.

    >>> import torch
    >>> gram_anchor_loss(torch.ones(2, 3), torch.eye(2))  # two of four similarities are 1 in place of 0
    tensor(0.5000)
    """
    check_rows(x, mask)
    check_rows(anchor, mask, "anchor")
    if x.shape[:-1] != anchor.shape[:-1]:
        raise ValueError(
            "anchor must have the patches of x, row i belongs to row i; got shapes "
            f"{tuple(anchor.shape)} and {tuple(x.shape)}."
        )
    h, g = prepare(x, mask), prepare(anchor, mask)
    if normalize:
        h, g = unit_rows(h), unit_rows(g)
    h, g = h.to(torch.promote_types(h.dtype, g.dtype)), g.to(torch.promote_types(h.dtype, g.dtype))
    pairs = reduce_pairs(lambda now, then: (now - then).square(), h, g)
    selves = (h.square().sum(-1) - g.square().sum(-1)).square().sum(-1)
    return ((2 * pairs + selves) / real_count(h, mask).clamp(min=1).square()).mean()
