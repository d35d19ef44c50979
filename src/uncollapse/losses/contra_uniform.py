"""The uniformity loss whose gradient step is ContraNorm, a baseline in the paper (arXiv 2303.06562)."""

from typing import Literal

import torch
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
    form: Literal["mean", "published"] = "mean",
    gather: bool = False,
) -> Tensor:
    """Return the uniformity loss of the tokens of each sequence (ContraNorm, arXiv 2303.06562, Eq. 3).

        mean:       mean over sequences of  (1/n) Σ_i log Σ_j exp(h_i·h_j/τ),   j = i included
        published:  Σ_i log Σ_j exp(f_i·f_j/τ),   over the rows of one matrix

    "mean" is for the tokens of the last layer. "published" is Eq. 3 as printed, for pooled features of examples (B, d).
    The released code also applies it to the d features of each pooled row: `contra_uniform_loss(unit.unsqueeze(-1),
    normalize=False)`, with unit rows, is that sum divided by batch·d.

    Args:
        x: tokens (..., n, d); with form="published" (batch, d).
        temperature: τ > 0; a tensor with one element can be learned.
        mask: (..., n) bool, True = real. Masked tokens may hold anything and have no influence.
        normalize: divide rows by their norm first; a zero row stays zero.
        form: see above.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes. Rows (n, d)
            of all processes are one matrix; each sequence of (..., n, d) stays in its process.

    Returns:
        A scalar in float32 (float64 for float64 inputs); log n + 1/τ for identical rows, the maximum for normalized
        ones. Sequences without a real token do not count; without any real token it is 0.

    >>> import torch
    >>> contra_uniform_loss(torch.eye(3))  # log(e + 2)
    tensor(1.5514)
    """
    if form not in ("mean", "published"):
        raise ValueError(f"form must be 'mean' or 'published', got {form!r}.")
    check_rows(x, mask, gather=gather)
    check_temperature(temperature)
    if form == "published":
        check_matrix(x)
    h = prepare(x, mask)
    h = unit_rows(h) if normalize else h
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
    summed = torch.stack([(each.sum(-1) / real.clamp(min=1)).sum(), (real > 0).sum().to(h.dtype)])
    summed = all_ranks.total(summed, gather)
    return summed[0] / summed[1].detach().clamp(min=1)
