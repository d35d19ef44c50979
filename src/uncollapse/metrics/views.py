"""Metrics of embeddings of samples: LiDAR, which needs several views per sample, and α-ReQ."""

import torch
from torch import Tensor

from uncollapse.metrics.spectrum import gram_spectrum, rank_from_singular_values
from uncollapse.pairwise import all_ranks, numerics
from uncollapse.registry import metric

LIDAR = "LiDAR: Sensing Linear Probing Performance in Joint Embedding SSL Architectures, arXiv 2312.04000"
ALPHA_REQ = "α-ReQ: Assessing Representation Quality by Measuring Eigenspectrum Decay (Agrawal et al., NeurIPS 2022)"


@metric(needs=("views",), better="higher", bounds=(0, None), paper=LIDAR)
def lidar(x: Tensor, *, delta: float = 1e-4, gather: bool = False) -> Tensor:
    """Return LiDAR: the effective rank of the spread between samples, relative to the spread between their views.

        exp(−Σ_k p_k log p_k),   p = λ/Σλ,   λ the eigenvalues of Σ_w^(−½) Σ_b Σ_w^(−½)
        Σ_b = 1/n Σ_i (μ_i − μ)(μ_i − μ)ᵀ,   Σ_w = 1/(nq) Σ_iv (x_iv − μ_i)(x_iv − μ_i)ᵀ + δI

    with μ_i the mean over the views of sample i and μ the mean of the μ_i. Thilak et al., arXiv 2312.04000.

    Args:
        x: embeddings (n, q, d) of q ≥ 2 views of each of n ≥ 2 samples.
        delta: δ > 0; it acts as a minimal spread between views, so the value depends on the scale of x.
        gather: take the samples of all processes as one set; every process gets the value.

    Returns:
        A scalar, from 1 to min(n − 1, d), in float32 or float64; 0 if all samples have the same mean.

    >>> import torch
    >>> views = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]], [[0.0, 1.0]], [[0.0, -1.0]]]).expand(4, 2, 2)
    >>> lidar(views)
    tensor(2.)
    """
    several = all_ranks.spans_ranks(gather)
    if several:
        all_ranks.check_alike(x, x.movedim(-1, 0))  # as many views, too
    if x.dim() != 3 or x.shape[1] < 2 or (len(x) < 2 and not several):
        raise ValueError(f"x must have shape (n, q, d) with at least 2 samples and 2 views, got {tuple(x.shape)}.")
    if not delta > 0:
        raise ValueError(f"delta must be positive, got {delta}.")
    views = numerics.prepare_tokens(x, None).double()
    within = numerics.center(views, None).flatten(0, 1)  # (nq, d)
    n = all_ranks.total(views.new_tensor(float(len(x))), gather)
    between = all_ranks.center(views.mean(1), None, gather) / n.sqrt()  # (n, d)
    spread = all_ranks.total(within.mT @ within, gather) / (n * x.shape[1])
    root, failed = torch.linalg.cholesky_ex(
        spread + delta * torch.eye(x.shape[-1], dtype=spread.dtype, device=x.device)
    )
    if not torch.compiler.is_compiling() and int(failed):
        raise ValueError(f"delta = {delta} is too small compared with the spread of the views; scale x or raise delta.")
    # λ are the squared singular values of R⁻¹(M − μ)ᵀ/√n, for any root RRᵀ = Σ_w
    whitened = torch.linalg.solve_triangular(root, between.mT, upper=False)
    return rank_from_singular_values(gram_spectrum(whitened.mT, several).square()).to(numerics.full_dtype(x))


@metric(better=None, paper=ALPHA_REQ)
def alpha_req(x: Tensor, *, low: int = 1, high: int | None = None, gather: bool = False) -> Tensor:
    """Return α-ReQ: how fast the eigenvalues of the covariance decay.

        α = −slope of log λ_k against log k, by least squares over k = low … high,   λ_1 ≥ λ_2 ≥ …

    Agrawal et al., NeurIPS 2022. Healthy near 1: a larger α means few dimensions, a smaller one noise in all of them.

    Args:
        x: embeddings (n, d).
        low: the first index, counted from 1.
        high: the last index; None is min(n − 1, d, 100). State the range when you compare values.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        A scalar, in float32 or float64. Vanishing eigenvalues do not enter the fit, which needs at least two others.

    >>> import torch
    >>> spread = torch.diag(torch.arange(1.0, 6.0) ** -0.5)
    >>> alpha_req(torch.cat([spread, -spread]))
    tensor(1.)
    """
    if x.dim() != 2:
        raise ValueError(
            f"x must have shape (n, d), got {tuple(x.shape)}; flatten batches first, for example x.flatten(0, 1)."
        )
    all_ranks.check_one_set(x, gather)
    largest = min(all_ranks.total_rows(x, gather) - 1, x.shape[1])
    high = min(largest, 100) if high is None else high
    if not 1 <= low < high <= largest:
        raise ValueError(f"low and high must satisfy 1 ≤ low < high ≤ min(n − 1, d) = {largest}, got {low} and {high}.")
    matrix = all_ranks.center(numerics.prepare_tokens(x, None).double(), None, gather)
    peak = all_ranks.maximum(matrix.abs().amax() if x.numel() else matrix.new_zeros(()), gather)
    sigma = gram_spectrum(matrix / torch.where(peak > 0, peak, 1), gather)[low - 1 : high]
    index = torch.arange(low, high + 1, dtype=sigma.dtype, device=x.device)[sigma > 0].log()
    if len(index) < 2:
        raise ValueError(
            f"The fit needs two positive eigenvalues from {low} to {high}, got {len(index)}: x has collapsed."
        )
    level = 2 * sigma[sigma > 0].log()
    lever = index - index.mean()
    return (-(lever @ level) / lever.square().sum()).to(numerics.full_dtype(x))
