"""Alignment and uniformity as losses (Wang & Isola, arXiv 2005.10242)."""

from torch import Tensor

from uncollapse.losses.checks import check_pair, check_rows
from uncollapse.metrics.hypersphere import PAPER, log_potential, mean_distance
from uncollapse.registry import loss


@loss(needs=("tokens", "pairs"), paper=PAPER)
def align_loss(x: Tensor, y: Tensor, alpha: float = 2.0, *, normalize: bool = True) -> Tensor:
    """Draw the two views of an example together.

        mean over i of ‖x_i − y_i‖^α

    Wang & Isola, arXiv 2005.10242. A collapsed encoder has the least value, 0: train it together with `uniform_loss`.

    Args:
        x: first views (..., n, d).
        y: second views (..., n, d), row by row those of x.
        alpha: the exponent, positive.
        normalize: divide rows by their length first; a row of zeros stays so. The authors' code assumes unit rows.

    Returns:
        A scalar, float32 (float64 for float64 inputs). Where x_i = y_i the gradient is zero for every alpha.

    >>> import torch
    >>> x = torch.eye(2)
    >>> align_loss(x, x.flip(0))
    tensor(2.)
    """
    check_pair(x, y)
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}.")
    return mean_distance(x, y, alpha, None, normalize).mean()


@loss(needs=("tokens",), paper=PAPER)
def uniform_loss(
    x: Tensor, t: float = 2.0, *, y: Tensor | None = None, normalize: bool = True, exclude_self: bool = True
) -> Tensor:
    """Spread rows over the unit sphere.

        log mean over i ≠ j of exp(−t‖x_i − x_j‖²)

    Wang & Isola, arXiv 2005.10242. The mean is over pairs within each batch element; with both views given, the loss is
    the mean of their two values, as in the authors' code. Memory is linear in n.

    Args:
        x: rows (..., n, d).
        t: sharpness of the potential, positive.
        y: second views, of the same shape.
        normalize: divide rows by their length first; a row of zeros stays so. The authors' code assumes unit rows.
        exclude_self: leave out the pairs i = j, as the authors do.

    Returns:
        A scalar, float32 (float64 for float64 inputs); 0 for identical rows and for a single row.

    >>> import torch
    >>> uniform_loss(torch.eye(2))
    tensor(-4.)
    """
    if not t > 0:
        raise ValueError(f"t must be positive, got {t}.")
    check_rows(x)
    value = log_potential(x, t, None, exclude_self, normalize).mean()
    if y is None:
        return value
    check_pair(x, y)
    return (value + log_potential(y, t, None, exclude_self, normalize).mean()) / 2
