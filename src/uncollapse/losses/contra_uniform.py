"""The uniformity loss whose gradient step is ContraNorm, a baseline in the paper (arXiv 2303.06562)."""

from typing import Literal

from torch import Tensor

from uncollapse.pairwise import all_ranks, logsumexp
from uncollapse.pairwise.numerics import check_matrix, check_rows, check_temperature, prepare, real_count, unit_rows
from uncollapse.registry import loss

PAPER = "ContraNorm: A Contrastive Learning Perspective on Oversmoothing and Beyond, arXiv 2303.06562"


@loss(needs=("tokens",), paper=PAPER)
def contra_uniform_loss(
    x: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    normalize: bool = True,
    form: Literal["mean", "published", "features"] = "mean",
    gather: bool = False,
) -> Tensor:
    """Return the uniformity loss of the tokens of each sequence (ContraNorm, arXiv 2303.06562, Eq. 3).

        mean:       mean over sequences of  (1/n) Σ_i log Σ_j exp(h_i·h_j/τ),   j = i included
        published:  Σ_i log Σ_j exp(f_i·f_j/τ),   over the rows of one matrix
        features:   Σ_b Σ_i log Σ_j exp(f_bi·f_bj/τ),   over the features i, j of each row b

    "mean" is for the tokens of the last layer, the others are for pooled features of examples (B, d). "published" is
    Eq. 3 as printed, and `uniformity_loss_0` in the released code, which nothing there calls. "features" is
    `uniformity_loss`, the function of the call that is commented out there: it compares the features of one example
    with each other, not examples.

    Args:
        x: tokens (..., n, d); with the other forms (batch, d).
        temperature: τ > 0; a tensor with one element can be learned.
        mask: (..., n) bool, True = real. Masked tokens may hold anything and have no influence.
        normalize: divide rows by their norm first; a zero row stays zero.
        form: see above.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes. Rows (n, d)
            of all processes are one matrix; each sequence of (..., n, d) stays in its process.

    Returns:
        A scalar in float32 (float64 for float64 inputs); "mean" is log n + 1/τ for identical rows, the maximum for
        normalized ones. Sequences without a real token do not count; without any real token it is 0.

    >>> import torch
    >>> contra_uniform_loss(torch.eye(3))  # log(e + 2)
    tensor(1.5514)
    """
    if form not in ("mean", "published", "features"):
        raise ValueError(f"form must be 'mean', 'published' or 'features', got {form!r}.")
    check_rows(x, mask, gather=gather)
    check_temperature(temperature)
    if form != "mean":
        check_matrix(x)
    h = prepare(x, mask)
    h = unit_rows(h) if normalize else h
    if form == "features":
        column = h.unsqueeze(-1)  # (batch, d, 1)
        each = logsumexp(column, column, temperature=temperature).sum(-1)
        return all_ranks.total((each if mask is None else each.masked_fill(~mask, 0)).sum(), gather)
    across = h.dim() == 2 and all_ranks.spans_ranks(gather)
    if across and mask is not None:
        h, mask = h[mask], None
    each = logsumexp(h, h, temperature=temperature, mask=mask)  # (..., n)
    if across:
        each = all_ranks.log_add(each, all_ranks.log_sum(h, h, temperature))
    if mask is not None:
        each = each.masked_fill(~mask, 0)
    if form == "published":
        return all_ranks.total(each.sum(), gather)
    if across:
        return all_ranks.mean(each)
    real = real_count(h, mask)  # (...)
    return all_ranks.mean_of_sets(each.sum(-1) / real.clamp(min=1), real > 0, gather)
