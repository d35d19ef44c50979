"""VISReg: centre, scale and shape of a set of rows as three terms (Wu et al. 2026, arXiv 2606.02572)."""

import torch
from torch import Tensor

from uncollapse.losses.sigreg import random_directions
from uncollapse.pairwise import all_ranks
from uncollapse.pairwise.numerics import center, check_positive, check_rows, prepare, real_count
from uncollapse.registry import loss

PAPER = "VISReg: Variance-Invariance-Sketching Regularization for JEPA training, arXiv 2606.02572"
EPS = 1e-6  # added to standard deviations, as the authors do


@loss(needs=("tokens",), paper=PAPER)
def visreg_loss(
    x: Tensor,
    *,
    scale: float = 1.0,
    shape: float = 1.0,
    centering: float = 1.0,
    slices: int = 4096,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    gather: bool = False,
) -> Tensor:
    """Make rows an isotropic Gaussian, with terms of their own for scale, shape and centre.

        scale:      (1/d) Σ_j (1 − σ_j)²,   σ_j = standard deviation of feature j
        shape:      mean over directions a and rows i of (p_(i) − q_i)²,   p = a·(x − μ)/sg(σ)
        centering:  (1/d) Σ_j μ_j²

    VISReg, arXiv 2606.02572, Eq. 1, 5 and 6. p_(i) are the projections in ascending order, and q_i = Φ⁻¹(i/(n + 1)) the
    quantiles of a standard Gaussian: the shape is a sliced Wasserstein distance. σ is divided out without a gradient,
    so the shape does not act on the scale, and the scale keeps its gradient for rows that collapse, unlike
    `sigreg_loss`. The scale is `variance_loss` with both sides penalized. Add an invariance term over views: the whole
    is (1 − λ) of it and λ of this loss, with λ = 0.9 on large data and 0.6 on small data in the paper.

    Args:
        x: rows (..., n, d), not normalized; each set of n rows, such as one view, is compared alone.
        scale: weight of the scale.
        shape: weight of the shape; larger for long-tailed or low-rank data.
        centering: weight of the centre.
        slices: number of random directions, drawn anew in every call.
        mask: (..., n) bool, True = real. Masked rows may hold anything and have no influence.
        generator: where directions are drawn from, instead of torch's default generator.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows, with the directions of the first; gradients are correct after DistributedDataParallel has averaged
            them over processes. Rows (n, d) of all processes are one set; each set of (..., n, d) stays in its process.
            Without it, each process compares its own rows in directions of its own, as the authors do.

    Returns:
        A scalar, the mean over sets with at least two real rows, in float32 (float64 for float64 inputs); 0 if there
        are none. For identical rows the scale is 1 and has no gradient.

    >>> import torch
    >>> visreg_loss(torch.tensor([[1.0], [-1.0]]))  # scale and centre fit, quantiles are ±0.43
    tensor(0.3241)
    """
    check_positive(slices, "slices")
    check_rows(x, mask, gather=gather)
    h = prepare(x, mask)
    across = h.dim() == 2 and all_ranks.spans_ranks(gather)
    if across:
        h, mask = h if mask is None else h[mask], None
        h = torch.cat([h, all_ranks.other_rows(h)])
    count = real_count(h, mask)
    centered = center(h, mask)
    middle = h.sum(-2) / count.clamp(min=1)[..., None]
    deviation = torch.linalg.vector_norm(centered, dim=-2) / count.clamp(min=1).sqrt()[..., None] + EPS
    each = scale * (1 - deviation).square().mean(-1) + centering * middle.square().mean(-1)
    with torch.autocast(x.device.type, enabled=False):
        directions = random_directions(h, slices, generator, gather)
        projected = (centered / deviation.detach()[..., None, :]) @ directions  # (..., n, slices)
    each = each + shape * _distance_to_gaussian(projected, mask, count)
    return all_ranks.mean_of_sets(each, count > 1, gather and not across)


def _distance_to_gaussian(projected: Tensor, mask: Tensor | None, count: Tensor) -> Tensor:
    """Return the mean squared difference (...) of sorted projections (..., n, slices) and Gaussian quantiles."""
    if mask is not None:
        projected = projected.masked_fill(~mask[..., None], torch.inf)  # behind all others
    place = torch.arange(1, projected.shape[-2] + 1, device=projected.device, dtype=projected.dtype)
    behind = place > count[..., None]
    share = (place / (count[..., None] + 1)).masked_fill(behind, 0.5)
    quantiles, behind = torch.special.ndtri(share)[..., None], behind[..., None]
    apart = (projected.sort(-2).values.masked_fill(behind, 0) - quantiles).masked_fill(behind, 0)
    mean: Tensor = apart.square().mean(-1).sum(-1) / count.clamp(min=1)
    return mean
