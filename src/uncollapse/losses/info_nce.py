"""InfoNCE in linear memory: one positive against many negatives, from the batch, a queue or the caller."""

from functools import reduce
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from uncollapse.pairwise import Pairs, all_pairs, all_ranks, log_sums, logsumexp
from uncollapse.pairwise.numerics import check_matrix, check_pair, check_temperature, to_full, unit_rows
from uncollapse.registry import loss


@loss(
    needs=("tokens", "pairs"),
    paper="Representation Learning with Contrastive Predictive Coding, arXiv 1807.03748; "
    "NT-Xent: SimCLR, arXiv 2002.05709; queue: MoCo, arXiv 1911.05722",
)
def info_nce(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float | Tensor = 0.5,
    negatives: Literal["cross", "both"] | Tensor = "cross",
    queue: Tensor | None = None,
    symmetric: bool = False,
    normalize: bool = True,
    gather: bool = False,
) -> Tensor:
    """Contrast the positive partner of each row with its negatives.

        mean over i of  −log[ e^{x_i·y_i/τ} / (e^{x_i·y_i/τ} + Σ_{k in negatives of i} e^{x_i·k/τ}) ]

    InfoNCE (arXiv 1807.03748) as analyzed by Wang & Isola (arXiv 2005.10242). With M negatives, log(M+1) − loss is a
    lower bound on the mutual information of the two views. Memory is linear in the number of rows.

    Args:
        x: (B, d).
        y: (B, d); x_i and y_i are a positive pair.
        temperature: τ > 0; a tensor with one element can be learned.
        negatives: "cross": the B−1 rows y_j, j ≠ i, which is a cross entropy over x yᵀ/τ. "both": NT-Xent (arXiv
            2002.05709), the 2B−2 other rows of both views, averaged over all 2B rows. A tensor (M, d): these for every
            row; (B, M, d): M per row. MoCo's published loss is `negatives=queue`.
        queue: (K, d), only with "cross": further negatives of every row, such as earlier keys (MoCo, arXiv 1911.05722).
        symmetric: the mean of both directions, x against y and y against x. "both" is symmetric already. Not with a
            queue, which holds keys of one direction only.
        normalize: divide rows by their norm first; a zero row stays zero.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes. The queue
            must be the same in all; a tensor of negatives belongs to the rows of its own process.

    Returns:
        A scalar ≥ 0 in float32 (float64 for float64 inputs). Without negatives (one pair), loss and gradient are 0.

    >>> import torch
    >>> x = torch.eye(3)
    >>> info_nce(x, x, temperature=1.0)  # log(1 + 2/e)
    tensor(0.5514)
    """
    check_pair(x, y, gather=gather)
    _check(x, temperature, negatives, queue, symmetric)
    given = [to_full(t) for t in (x, y, negatives, queue) if isinstance(t, Tensor)]
    rows = [unit_rows(t) for t in given] if normalize else given
    x, y, others = rows[0], rows[1], rows[2:]
    across = all_ranks.spans_ranks(gather)
    own = isinstance(negatives, str)
    if own and negatives == "both":
        each = _both_views(x, y, temperature, across)
    elif own and symmetric:
        each = _both_directions(x, y, temperature, across)
    else:
        each = _one_direction(x, y, temperature, own, others, across)
        if symmetric:
            each = (each + _one_direction(y, x, temperature, own, others, across)) / 2
    return all_ranks.mean(each, gather)


def _one_direction(
    x: Tensor, y: Tensor, temperature: float | Tensor, own: bool, others: list[Tensor], across: bool
) -> Tensor:
    """Return the loss (B,) of x_i and y_i against the rest of y, if `own`, and against the rows of `others`."""
    sums = [logsumexp(x, y, temperature=temperature, exclude="self")] if own else []
    if own and across:
        sums.append(all_ranks.log_sum(x, y, temperature))
    for keys in others:
        queries = x if keys.dim() == 2 else x.unsqueeze(-2)  # (B, 1, d) against (B, M, d)
        sums.append(logsumexp(queries, keys, temperature=temperature).reshape(x.shape[0]))
    return contrast(_positive(x, y, temperature), reduce(all_ranks.log_add, sums))


def _both_directions(x: Tensor, y: Tensor, temperature: float | Tensor, across: bool) -> Tensor:
    """Return the loss (2B,) of x_i and y_i against the rest of y, and against the rest of x."""
    negative = torch.cat(log_sums(x, y, temperature, exclude_self=True))
    if across:
        negative = all_ranks.log_add(negative, torch.cat(all_ranks.log_sums(x, y, temperature)))
    return contrast(_positive(x, y, temperature).repeat(2), negative)


def _both_views(x: Tensor, y: Tensor, temperature: float | Tensor, across: bool) -> Tensor:
    """Return the loss (2B,) of every row of both views and its partner against all other rows."""
    z = torch.cat([x, y])
    row = torch.arange(z.shape[0], device=z.device)
    pairs = Pairs(no_self=True, excluded=torch.stack([row, row.roll(x.shape[0])]))
    negative = all_pairs(z, z, None, temperature, pairs)[1]
    if across:
        negative = all_ranks.log_add(negative, all_ranks.log_sum(z, z, temperature))
    return contrast(_positive(x, y, temperature).repeat(2), negative)


def _positive(x: Tensor, y: Tensor, temperature: float | Tensor) -> Tensor:
    return (x * y).sum(-1) / temperature


def contrast(positive: Tensor, negative: Tensor) -> Tensor:
    """Return −log[e^p / (e^p + e^n)] = log(1 + e^{n−p}), which keeps the digits of small losses."""
    return softplus(negative - positive, threshold=40.0)  # beyond it n − p: e^−40 is below the rounding of float64


def _check(
    x: Tensor,
    temperature: float | Tensor,
    negatives: str | Tensor,
    queue: Tensor | None,
    symmetric: bool,
) -> None:
    check_matrix(x)
    check_temperature(temperature)
    if isinstance(negatives, Tensor):
        _check_keys("negatives", negatives, x)
    elif negatives not in ("cross", "both"):
        raise ValueError(f"negatives must be 'cross', 'both' or a tensor (M, d) or (B, M, d), got {negatives!r}.")
    if symmetric and isinstance(negatives, str) and negatives == "both":
        raise ValueError("negatives='both' includes both directions already; remove symmetric=True.")
    if queue is None:
        return
    _check_keys("queue", queue, x, own=False)
    if not isinstance(negatives, str) or negatives != "cross":
        raise ValueError(
            "queue can only be combined with negatives='cross'; add its rows to negatives with torch.cat instead."
        )
    if symmetric:
        raise ValueError(
            "A queue holds keys of one direction: instead of symmetric=True, call twice, each with its own queue."
        )


def _check_keys(name: str, keys: Tensor, x: Tensor, own: bool = True) -> None:
    batch, d = x.shape
    shapes = f"(M, {d})" + (f" or ({batch}, M, {d})" if own else "")
    fits = keys.dim() == 2 or (own and keys.dim() == 3 and keys.shape[0] == batch)
    if not keys.is_floating_point() or not fits or keys.shape[-1] != d or keys.numel() == 0:
        raise ValueError(
            f"{name} must be a float tensor {shapes} with at least one row, got {keys.dtype} {tuple(keys.shape)}."
        )
