"""Metrics of how similar tokens are, and how similar their features are."""

import torch
from torch import Tensor

from uncollapse.pairwise import all_ranks, numerics
from uncollapse.pairwise.pair_means import pair_cosine
from uncollapse.registry import metric

CONTRA_NORM = "ContraNorm: A Contrastive Learning Perspective on Oversmoothing and Beyond, arXiv 2303.06562"
DECORR = "Feature Overcorrelation in Deep Graph Neural Networks: A New Perspective, arXiv 2206.07743"
ROGUE = "All Bark and No Bite: Rogue Dimensions in Transformer Language Models, arXiv 2109.04404"
WIDEST = 2**16  # features of which all pairs are compared: about a minute on one core


@metric(better="lower", bounds=(-1, 1), paper=CONTRA_NORM)
def mean_cosine(
    x: Tensor, mask: Tensor | None = None, *, absolute: bool = False, center: bool = False, gather: bool = False
) -> Tensor:
    """Return the mean cosine of all pairs of different tokens.

        1/(n(n−1)) Σ_{i≠j} cos(x_i, x_j) = (‖Σ_i x̂_i‖² − n) / (n(n−1)),   x̂_i = x_i/‖x_i‖

    ContraNorm, arXiv 2303.06562; DiversePatch, arXiv 2104.12753. The closed form needs O(nd).

    Args:
        x: tokens (..., n, d).
        mask: (..., n) bool, True = real.
        absolute: take |cos|, as in the later version of DiversePatch. This needs O(n²d) time and memory linear in n,
            and has no gradient over several processes.
        center: subtract the mean of the real tokens first, which removes a direction that all tokens share.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), in float32 or float64; 0 with fewer than two real tokens. A zero token has cosine 0 with every other.

    >>> import torch
    >>> mean_cosine(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
    tensor(0.3333)
    """
    all_ranks.check_one_set(x, gather)
    x = numerics.prepare_tokens(x, mask)
    if center:
        x = all_ranks.center(x, mask, gather)
    return pair_cosine(x, numerics.real_count(x, mask), absolute, gather)


@metric(better="higher", bounds=(0, None), paper=CONTRA_NORM)
def token_variance(x: Tensor, mask: Tensor | None = None, *, gather: bool = False) -> Tensor:
    """Return the sum of the squared distances of the tokens from their mean.

        Var(X) = ‖(I − eeᵀ)X‖_F² = Σ_i ‖x_i − x̄‖²,   e = 1/√n

    ContraNorm, arXiv 2303.06562, Proposition 1.

    Args:
        x: tokens (..., n, d).
        mask: (..., n) bool, True = real.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), in float32 or float64; 0 with fewer than two real tokens, and for equal tokens.

    >>> import torch
    >>> token_variance(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    tensor(2.)
    """
    all_ranks.check_one_set(x, gather)
    return all_ranks.total(
        all_ranks.center(numerics.prepare_tokens(x, mask), mask, gather).square().sum((-2, -1)), gather
    )


@metric(better="higher", bounds=(0, None), paper=CONTRA_NORM)
def feature_variance(x: Tensor, mask: Tensor | None = None, *, gather: bool = False) -> Tensor:
    """Return the variance over the features of each token, summed over tokens.

        Σ_i 1/(d−1) Σ_c (x_ic − mean_c x_ic)²

    This is what the published code of ContraNorm (arXiv 2303.06562) logs, with torch's unbiased variance. The
    variance of its Proposition 1 is `token_variance`.

    Args:
        x: tokens (..., n, d).
        mask: (..., n) bool, True = real.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), in float32 or float64; 0 without a real token and for d = 1.

    >>> import torch
    >>> feature_variance(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor(2.)
    """
    all_ranks.check_one_set(x, gather)
    x = numerics.prepare_tokens(x, mask)
    mean = x.mean(-1, keepdim=True, dtype=torch.float64).to(x.dtype)  # equal features differ from it by exactly 0
    return all_ranks.total((x - mean).square().sum((-2, -1)) / max(1, x.shape[-1] - 1), gather)


@metric(better="lower", bounds=(0, 1), paper=DECORR)
def feature_correlation(x: Tensor, mask: Tensor | None = None, *, gather: bool = False) -> Tensor:
    """Return the mean absolute Pearson correlation of all pairs of different features.

        1/(d(d−1)) Σ_{a≠b} |ρ(x_·a, x_·b)|

    DeCorr, arXiv 2206.07743. It compares all pairs of features: time grows with d².

    Args:
        x: tokens (..., n, d), d at most 65,536.
        mask: (..., n) bool, True = real.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), in float32 or float64; 0 with fewer than two real tokens or one feature. A constant feature has
        correlation 0 with every other.

    >>> import torch
    >>> feature_correlation(torch.tensor([[1.0, 0.0, 1.0], [-1.0, 0.0, -1.0]]))
    tensor(0.3333)
    """
    all_ranks.check_one_set(x, gather)
    if x.shape[-1] > WIDEST:
        raise ValueError(
            f"feature_correlation compares all pairs of at most {WIDEST:,} features, got {x.shape[-1]:,}. Pass a "
            "random sample of the features, x[..., torch.randperm(x.shape[-1])[:8192]]: its expectation is the same."
        )
    if all_ranks.spans_ranks(gather):
        return _correlation_over_ranks(numerics.prepare_tokens(x, mask), mask)
    columns = numerics.center(numerics.prepare_tokens(x, mask), mask).mT  # (..., d, n)
    return pair_cosine(columns, columns.new_full(columns.shape[:-2], columns.shape[-2]), absolute=True)


@metric(better="lower", bounds=(0, 1), paper=ROGUE)
def outlier_share(x: Tensor, mask: Tensor | None = None, *, k: int = 3, gather: bool = False) -> Tensor:
    """Return the share of the variance over tokens that lies in the k features of largest variance.

        Σ_{c ∈ top k} v_c / Σ_c v_c,   v_c = Σ_i (x_ic − x̄_c)²

    A large share means that a few rogue dimensions dominate the cosine: Timkey & van Schijndel, arXiv 2109.04404.

    Args:
        x: tokens (..., n, d).
        mask: (..., n) bool, True = real.
        k: number of features, at least 1; values above d count as d.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), in float32 or float64; 0 where there is no variance.

    >>> import torch
    >>> outlier_share(torch.tensor([[3.0, 1.0], [-3.0, -1.0]]), k=1)
    tensor(0.9000)
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    all_ranks.check_one_set(x, gather)
    shift = all_ranks.center(numerics.prepare_tokens(x, mask), mask, gather)
    spread: Tensor = torch.linalg.vector_norm(shift, dim=-2, dtype=torch.float64)  # whose squares do not overflow
    variance = all_ranks.total(spread.square(), gather)
    total = variance.sum(-1)
    largest = variance.topk(min(k, x.shape[-1]), -1).values.sum(-1)
    return (largest / torch.where(total > 0, total, 1)).to(shift.dtype)


def _correlation_over_ranks(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return `feature_correlation` of rows (n, d) that several processes share, from the covariance of all rows."""
    shift = all_ranks.center(x, mask).double()
    gram = all_ranks.total(shift.mT @ shift)
    inverse = torch.where(gram.diagonal() > 0, gram.diagonal(), 1).rsqrt() * (gram.diagonal() > 0)
    correlation = (gram * inverse * inverse[:, None]).abs().clamp(max=1)
    d = x.shape[-1]
    return ((correlation.sum() - correlation.diagonal().sum()) / max(1, d * (d - 1))).to(x.dtype)
