"""The KoLeo regularizer: the distance of each row to its nearest neighbor (Sablayrolles et al., arXiv 1806.03198)."""

import torch
from torch import Tensor

from uncollapse.pairwise import all_ranks, nearest
from uncollapse.pairwise.numerics import check_rows, prepare, real_count, unit_rows
from uncollapse.registry import loss

PAPER = "Spreading Vectors for Similarity Search, ICLR 2019, arXiv 1806.03198"


@loss(needs=("tokens",), paper=PAPER)
def koleo_loss(
    x: Tensor, *, normalize: bool = True, eps: float = 1e-8, mask: Tensor | None = None, gather: bool = False
) -> Tensor:
    """Push each row away from its nearest neighbor.

        −(1/n) Σ_i log(ρ_i + ε),   ρ_i = min_{j≠i} ‖x_i − x_j‖

    Sablayrolles et al., arXiv 1806.03198; an estimate of minus the entropy of the rows (Kozachenko & Leonenko),
    used by DINOv2 and DINOv3 on class tokens. `uniform_loss` pushes all pairs apart, this one only the nearest. The
    released code gives inf for close images in float16, where its ε of 1e-8 is 0, and for a batch of one; here
    distances are computed in float32, and a row without neighbor does not count. Memory is linear in n.

    Args:
        x: rows (..., n, d).
        normalize: divide rows by their norm first; a zero row stays zero.
        eps: ε > 0, so that equal rows have a finite value. The gradient of a row is at most 1/ε.
        mask: (..., n) bool, True = real. Masked rows may hold anything and have no influence.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes. Rows (n, d)
            of all processes are one set; each set of (..., n, d) stays in its process.

    Returns:
        A scalar, the mean over sets with at least two real rows, in float32 (float64 for float64 inputs); 0 if there
        are none. −log ε, about 18.4, with a gradient of zero, for identical rows.

    >>> import torch
    >>> koleo_loss(torch.eye(3))  # all at distance √2
    tensor(-0.3466)
    """
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}.")
    check_rows(x, mask, gather=gather)
    h = prepare(x, mask)
    h = unit_rows(h) if normalize else h
    across = h.dim() == 2 and all_ranks.spans_ranks(gather)
    if across and mask is not None:
        h, mask = h[mask], None
    distance = nearest(h, h, mask=mask, exclude="self").distance  # (..., n)
    if across:
        other = nearest(h, all_ranks.other_rows(h)).distance
        distance = torch.where(other < distance, other, distance)
    alone = torch.isposinf(distance) if mask is None else torch.isposinf(distance) | ~mask
    summed = -(distance.masked_fill(alone, 1) + eps).log().masked_fill(alone, 0).sum(-1)
    summed, count = all_ranks.total(summed, across), all_ranks.total(real_count(h, mask), across)
    return all_ranks.mean_of_sets(summed / count.clamp(min=1), count > 1, gather and not across)
