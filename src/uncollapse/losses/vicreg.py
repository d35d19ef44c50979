"""The variance and covariance terms of VICReg (Bardes et al., ICLR 2022, arXiv 2105.04906)."""

import torch
from torch import Tensor

from uncollapse.pairwise import all_ranks
from uncollapse.pairwise.numerics import check_rows, prepare, real_count
from uncollapse.registry import loss

PAPER = "VICReg: Variance-Invariance-Covariance Regularization, ICLR 2022, arXiv 2105.04906"


@loss(needs=("tokens",), paper=PAPER)
def variance_loss(
    x: Tensor, gamma: float = 1.0, *, eps: float = 1e-4, mask: Tensor | None = None, gather: bool = False
) -> Tensor:
    """Keep the standard deviation of each feature above γ.

        (1/d) Σ_j max(0, γ − √(Var(x_·j) + ε)),   Var with n − 1 in the denominator

    VICReg, arXiv 2105.04906, Eq. 1 and 2. It prevents complete collapse but not dimensional collapse, which
    `covariance_loss` does. The whole of VICReg, for two views, with the authors' weights:

        25 mse_loss(x, y) + 12.5 (variance_loss(x) + variance_loss(y)) + covariance_loss(x) + covariance_loss(y)

    Args:
        x: rows (..., n, d), not normalized.
        gamma: the standard deviation to reach, positive.
        eps: ε, which keeps the gradient finite; positive.
        mask: (..., n) bool, True = real. Masked rows may hold anything and have no influence.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes. Rows (n, d)
            of all processes are one set; each set of (..., n, d) stays in its process.

    Returns:
        A scalar, the mean over sets with at least two real rows, in float32 (float64 for float64 inputs); 0 if there
        are none. γ − √ε, with a gradient of zero, for identical rows.

    >>> import torch
    >>> variance_loss(torch.tensor([[1.0, 5.0], [-1.0, 5.0]]))  # the second feature is constant
    tensor(0.4950)
    """
    if not (gamma > 0 and eps > 0):
        raise ValueError(f"gamma and eps must be positive, got {gamma} and {eps}.")
    centered, count, across = _center(x, mask, gather)
    variance = all_ranks.total(centered.square().sum(-2), across) / (count - 1).clamp(min=1)[..., None]
    each = (gamma - (variance + eps).sqrt()).relu().mean(-1)
    return all_ranks.mean_of_sets(each, count > 1, gather and not across)


@loss(needs=("tokens",), paper=PAPER)
def covariance_loss(x: Tensor, *, mask: Tensor | None = None, gather: bool = False) -> Tensor:
    """Decorrelate the features of a set of rows.

        (1/d) Σ_{i≠j} C_ij²,   C = XᶜᵀXᶜ/(n − 1),   Xᶜ = rows minus their mean

    VICReg, arXiv 2105.04906, Eq. 3 and 4. It prevents dimensional collapse; features of variance zero are decorrelated
    too, so use it together with `variance_loss`, which shows the weights.

    Args:
        x: rows (..., n, d), not normalized. C is d × d.
        mask: (..., n) bool, True = real. Masked rows may hold anything and have no influence.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes. Rows (n, d)
            of all processes are one set; each set of (..., n, d) stays in its process.

    Returns:
        A scalar, the mean over sets with at least two real rows, in float32 (float64 for float64 inputs); 0 if there
        are none, and for identical rows.

    >>> import torch
    >>> covariance_loss(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    tensor(4.)
    """
    centered, count, across = _center(x, mask, gather)
    with torch.autocast(x.device.type, enabled=False):
        products = all_ranks.total(centered.mT @ centered, across)
    covariance = products / (count - 1).clamp(min=1)[..., None, None]
    diagonal = torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    each = covariance.masked_fill(diagonal, 0).square().sum((-2, -1)) / x.shape[-1]
    return all_ranks.mean_of_sets(each, count > 1, gather and not across)


def _center(x: Tensor, mask: Tensor | None, gather: bool) -> tuple[Tensor, Tensor, bool]:
    """Return centered rows, the number of real ones (...), and whether the sets of all processes are one."""
    check_rows(x, mask, gather=gather)
    h = prepare(x, mask)
    across = h.dim() == 2 and all_ranks.spans_ranks(gather)
    return all_ranks.center(h, mask, across), all_ranks.total(real_count(h, mask), across), across
