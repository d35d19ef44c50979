"""Alignment and uniformity as losses (Wang & Isola, arXiv 2005.10242)."""

import math

import torch
from torch import Tensor

from uncollapse.pairwise import Pairs, all_pairs, all_ranks
from uncollapse.pairwise.numerics import check_pair, check_positive_number, check_rows, to_full, unit_rows
from uncollapse.pairwise.pair_means import log_potential, pair_distances
from uncollapse.registry import loss

PAPER = "Alignment and Uniformity on the Hypersphere, ICML 2020, arXiv 2005.10242"


@loss(needs=("tokens", "pairs"), paper=PAPER)
def align_loss(x: Tensor, y: Tensor, alpha: float = 2.0, *, normalize: bool = True, gather: bool = False) -> Tensor:
    """Pull the two views of each example together.

        mean over i of ‖x_i − y_i‖^α

    Wang & Isola, arXiv 2005.10242. A collapsed encoder has the minimum 0: use it together with `uniform_loss`.

    Args:
        x: first views (..., n, d).
        y: second views (..., n, d); row i belongs to row i of x.
        alpha: the exponent, positive.
        normalize: divide rows by their norm first; a zero row stays zero. The authors' code assumes unit rows.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes.

    Returns:
        A scalar in float32 (float64 for float64 inputs). Where x_i = y_i the gradient is zero for every alpha.

    >>> import torch
    >>> x = torch.eye(2)
    >>> align_loss(x, x.flip(0))
    tensor(2.)
    """
    check_pair(x, y, gather=gather)
    check_positive_number(alpha, "alpha")
    return all_ranks.mean(pair_distances(x, y, alpha, None, normalize), gather)


@loss(needs=("tokens",), paper=PAPER)
def uniform_loss(
    x: Tensor,
    t: float = 2.0,
    *,
    y: Tensor | None = None,
    queue: Tensor | None = None,
    within: bool = True,
    normalize: bool = True,
    exclude_self: bool = True,
    gather: bool = False,
) -> Tensor:
    """Spread rows over the unit sphere.

        log mean over i ≠ j of exp(−t‖x_i − x_j‖²)

    Wang & Isola, arXiv 2005.10242. The mean is over pairs within each batch element. With both views, the loss is the
    mean of their two values, as in the authors' code. With a queue, as in their code for MoCo (arXiv 1911.05722), the
    mean is over all pairs of a row and a key, and over the pairs i < j of rows. Memory is linear in n.

    Args:
        x: rows (..., n, d).
        t: sharpness of the potential, positive.
        y: second views, of the same shape.
        queue: further keys (K, d) to push rows away from, such as those of earlier batches.
        within: with a queue, include the pairs of rows too.
        normalize: divide rows by their norm first; a zero row stays zero. The authors' code assumes unit rows.
        exclude_self: exclude the pairs i = j, as the authors do. Only without a queue.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes. Rows (n, d)
            of all processes are one set, and the queue must be the same in all; each element of (..., n, d) is a set.

    Returns:
        A scalar in float32 (float64 for float64 inputs); without a queue, 0 for identical rows and for a single row.

    >>> import torch
    >>> uniform_loss(torch.eye(2))
    tensor(-4.)
    >>> uniform_loss(torch.eye(2), queue=-torch.eye(2), within=False)  # distances are 2 and √2
    tensor(-4.6750)
    """
    check_positive_number(t, "t")
    if y is None:
        check_rows(x, gather=gather)
    else:
        check_pair(x, y, gather=gather)
    if queue is not None:
        _check_queue(queue, x, exclude_self)
    across = gather and x.dim() == 2  # the rows of all processes are one set
    values = []
    for rows in (x,) if y is None else (x, y):
        if queue is None:
            each = log_potential(rows, t, None, exclude_self, normalize, across)
        else:
            each = _with_queue(rows, queue, t, within, normalize, across)
        values.append(all_ranks.mean(each, gather and not across))
    return values[0] if y is None else (values[0] + values[1]) / 2


def _with_queue(x: Tensor, queue: Tensor, t: float, within: bool, normalize: bool, gather: bool) -> Tensor:
    """Return the log of the mean potential (...) of x against the queue and, with `within`, within x."""
    n, keys = all_ranks.total_rows(x, gather), queue.shape[0]
    outer = _against(x, queue, t, normalize, gather)
    inner = n * (n - 1) // 2 if within else 0
    if not inner:
        return outer - math.log(n * keys)
    own = log_potential(x, t, None, True, normalize, gather) + math.log(inner)
    return torch.logaddexp(outer, own) - math.log(n * keys + inner)


def _against(x: Tensor, queue: Tensor, t: float, normalize: bool, gather: bool) -> Tensor:
    """Return log Σ_ik exp(−t‖x_i − q_k‖²) = log Σ_ik exp(2t x_i·q_k − t‖x_i‖² − t‖q_k‖²) (...)."""
    full = to_full(x)
    if normalize:
        rows, queue = unit_rows(full), unit_rows(to_full(queue)).to(full.dtype)
    else:  # the three terms of a distance cancel: use more digits
        rows, queue = full.double(), queue.double()
    sums = all_pairs(rows, queue, None, 1 / (2 * t), Pairs(), -t * queue.square().sum(-1))[1]
    return all_ranks.log_total(sums - t * rows.square().sum(-1), gather).to(full.dtype)


def _check_queue(queue: Tensor, x: Tensor, exclude_self: bool) -> None:
    if not queue.is_floating_point() or queue.dim() != 2 or queue.shape[-1] != x.shape[-1] or queue.numel() == 0:
        raise ValueError(
            f"queue must be a float tensor (K, {x.shape[-1]}) with at least one row, got {queue.dtype} "
            f"{tuple(queue.shape)}."
        )
    if not exclude_self:
        raise ValueError("A queue has no pairs of a row with itself; remove exclude_self=False.")
