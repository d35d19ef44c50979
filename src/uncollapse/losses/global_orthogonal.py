"""Global orthogonal regularization of embeddings (Zhang et al., ICCV 2017, arXiv 1708.06320)."""

from torch import Tensor

from uncollapse.pairwise import all_ranks
from uncollapse.pairwise.numerics import check_rows, prepare, real_count, unit_rows
from uncollapse.pairwise.pair_means import pair_cosine, pair_squares
from uncollapse.registry import loss

PAPER = "Learning Spread-out Local Feature Descriptors, ICCV 2017, arXiv 1708.06320"


@loss(needs=("tokens",), paper=PAPER)
def global_orthogonal_loss(x: Tensor, *, mask: Tensor | None = None, gather: bool = False) -> Tensor:
    """Make the first two moments of the cosine of different rows those of the uniform distribution on the sphere.

        M₁² + max(0, M₂ − 1/d),   M₁ = mean_{i≠j} cos(x_i, x_j),   M₂ = mean_{i≠j} cos(x_i, x_j)²

    Zhang et al., arXiv 1708.06320 (GOR). The authors draw one pair of different things per example; here all pairs of
    different rows count, in O(nd·min(n, d)) time. EmbeddingGemma (arXiv 2509.20354) uses M₂ alone. M₁ is
    `patch_cosine_loss`. Give each view of a thing in a call of its own, so that no pair belongs together.

    Args:
        x: rows (..., n, d), each of another thing.
        mask: (..., n) bool, True = real. Masked rows may hold anything and have no influence.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows; gradients are correct after DistributedDataParallel has averaged them over processes. Rows (n, d)
            of all processes are one set; each set of (..., n, d) stays in its process.

    Returns:
        A scalar, the mean over sets with at least two real rows, in float32 (float64 for float64 inputs); 0 if there
        are none. 2 − 1/d, the maximum, with a gradient of zero, for identical rows. A zero row has cosine 0 with all.

    >>> import torch
    >>> global_orthogonal_loss(torch.ones(4, 2))
    tensor(1.5000)
    """
    check_rows(x, mask, gather=gather)
    h = prepare(x, mask)
    across = h.dim() == 2 and all_ranks.spans_ranks(gather)
    own = real_count(h, mask)
    count = all_ranks.total(own, across)
    second = pair_squares(unit_rows(h), across) / (count * (count - 1)).clamp(min=1)
    each = pair_cosine(h, own, gather=across).square() + (second - 1 / x.shape[-1]).relu()
    return all_ranks.mean_of_sets(each, count > 1, gather and not across)
