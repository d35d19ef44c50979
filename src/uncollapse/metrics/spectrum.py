"""Metrics of how many dimensions a set of tokens spans, from its singular values.

The ranks use the eigenvalues of the smaller Gram matrix in float64, at most d × d, which is several times as fast as a
singular value decomposition. Singular values below about 2e-7 of the largest are not resolved and count as 0.
"""

import torch
from torch import Tensor

from uncollapse.metrics.similarity import CONTRA_NORM
from uncollapse.pairwise import all_ranks, numerics
from uncollapse.registry import metric

# Eigenvalues below this, relative to the largest, are rounding errors; up to 33 eps were measured.
NOISE = 128 * torch.finfo(torch.float64).eps

RANKME = "RankMe: Assessing the Downstream Performance of Pretrained Self-Supervised Representations, arXiv 2210.02885"
STABLE = "Sampling from large matrices: an approach through geometric functional analysis, arXiv math/0503442"
PARTICIPATION = "A theory of multineuronal dimensionality, dynamics and measurement (Gao et al.), bioRxiv 214262"


def singular_values(x: Tensor, mask: Tensor | None = None, *, center: bool = False) -> Tensor:
    """Return the singular values of the tokens, largest first, by a singular value decomposition in float64.

        σ_1 ≥ … ≥ σ_min(n,d) ≥ 0,   X = Σ_k σ_k u_k v_kᵀ

    The effective rank is computed from them (ContraNorm, arXiv 2303.06562).

    Args:
        x: tokens (..., n, d).
        mask: (..., n) bool, True = real. Each masked token adds a zero at the end.
        center: subtract the mean of the real tokens first.

    Returns:
        (..., min(n, d)), in float32 or float64; zeros for a zero matrix.

    >>> import torch
    >>> singular_values(torch.diag(torch.tensor([1.0, 3.0, 0.0])))
    tensor([3., 1., 0.])
    """
    sigma: Tensor = torch.linalg.svdvals(_matrix(x, mask, center, False))
    return sigma.to(numerics.full_dtype(x))


@metric(better="higher", bounds=(0, None), paper=CONTRA_NORM)
def effective_rank(x: Tensor, mask: Tensor | None = None, *, center: bool = False, gather: bool = False) -> Tensor:
    """Return the effective rank: the exponential of the entropy of the singular values.

        exp(−Σ_k p_k log p_k),   p_k = σ_k / Σ_l σ_l

    ContraNorm, arXiv 2303.06562, after Roy & Vetterli 2007.

    Args:
        x: tokens (..., n, d).
        mask: (..., n) bool, True = real.
        center: subtract the mean of the real tokens first.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), from 1 (all tokens on one line) to min(n, d), in float32 or float64; 0 for a zero matrix or no real
        token. Vanishing singular values get no gradient.

    >>> import torch
    >>> effective_rank(torch.eye(4))
    tensor(4.)
    """
    return rank_from_singular_values(_spectrum(x, mask, center, gather)[0]).to(numerics.full_dtype(x))


@metric(better="higher", bounds=(0, None), paper=STABLE)
def stable_rank(x: Tensor, mask: Tensor | None = None, *, center: bool = False, gather: bool = False) -> Tensor:
    """Return the stable rank: the squared Frobenius norm over the squared spectral norm.

        ‖X‖_F² / σ_1²

    Rudelson & Vershynin, arXiv math/0503442.

    Args:
        x: tokens (..., n, d).
        mask: (..., n) bool, True = real.
        center: subtract the mean of the real tokens first.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), from 1 to min(n, d), in float32 or float64; 0 for a zero matrix or no real token.

    >>> import torch
    >>> stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0])))
    tensor(1.5000)
    """
    sigma, _ = _spectrum(x, mask, center, gather)
    if sigma.shape[-1] == 0:
        return sigma.sum(-1).to(numerics.full_dtype(x))
    squared = sigma.square()
    return _ratio(squared.sum(-1), squared[..., 0]).to(numerics.full_dtype(x))


@metric(better="higher", bounds=(0, None), paper=PARTICIPATION)
def participation_ratio(x: Tensor, mask: Tensor | None = None, *, center: bool = False, gather: bool = False) -> Tensor:
    """Return the participation ratio: how many directions share the variance.

        (Σ_k σ_k²)² / Σ_k σ_k⁴

    Gao et al., bioRxiv 214262. It is computed from traces of the Gram matrix, without eigenvalues.

    Args:
        x: tokens (..., n, d).
        mask: (..., n) bool, True = real.
        center: subtract the mean of the real tokens first, as is usual for this metric.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), from 1 to min(n, d), in float32 or float64; 0 for a zero matrix or no real token.

    >>> import torch
    >>> participation_ratio(torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    tensor(2.)
    """
    gram = _gram(_rescale(x, mask, center, gather)[0], gather)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    return _ratio(trace.square(), gram.square().sum((-2, -1))).to(numerics.full_dtype(x))


@metric(better="higher", bounds=(0, None), paper=RANKME)
def rankme(
    x: Tensor, mask: Tensor | None = None, *, center: bool = False, eps: float = 1e-7, gather: bool = False
) -> Tensor:
    """Return RankMe: the effective rank of an embedding matrix, with ε added to each singular value.

        exp(−Σ_k p_k log p_k),   p_k = (σ_k + ε) / Σ_l (σ_l + ε),   k = 1 … min(n, d)

    RankMe, arXiv 2210.02885. The p_k are normalized after ε is added, so the value never exceeds min(n, d). Embeddings
    whose singular values are not far above ε look isotropic: scale them up first.

    Args:
        x: embeddings (..., n, d).
        mask: (..., n) bool, True = real; n above is the number of real rows.
        center: subtract the mean of the real rows first.
        eps: ε ≥ 0.
        gather: take the rows (n, d) of all processes as one set; every process gets the value.

    Returns:
        (...), from 1 to min(n, d), in float32 or float64; 0 for a zero matrix or no real row, where ε alone would give
        min(n, d).

    >>> import torch
    >>> rankme(torch.eye(4))
    tensor(4.)
    """
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}.")
    sigma, scale = _spectrum(x, mask, center, gather)
    rows = all_ranks.total(numerics.real_count(x.double(), mask), gather)[..., None]
    exists = torch.arange(sigma.shape[-1], device=x.device) < rows
    shifted = (sigma * scale[..., None] + eps) * exists
    empty = (sigma == 0).all(-1)
    return rank_from_singular_values(shifted).masked_fill(empty, 0).to(numerics.full_dtype(x))


def rank_from_singular_values(sigma: Tensor) -> Tensor:
    """Return exp of the entropy of σ/Σσ over the last axis, (..., k) -> (...); 0 where all σ are 0.

    0·log 0 is 0, with a gradient of 0.
    """
    total = sigma.sum(-1, keepdim=True)
    p = sigma / torch.where(total > 0, total, 1)
    entropy = -(p * torch.where(p > 0, p, 1).log()).sum(-1)
    return entropy.exp().clamp(max=sigma.shape[-1]).masked_fill(total.squeeze(-1) <= 0, 0)


def gram_spectrum(matrix: Tensor, gather: bool = False) -> Tensor:
    """Return the singular values (..., min(n, d)) of a float64 matrix (..., n, d), largest first; rounding is set to 0.

    With `gather` the rows (n, d) of all processes are one matrix.
    """
    squared: Tensor = torch.linalg.eigvalsh(_gram(matrix, gather)).flip(-1)
    if gather:
        squared = squared[: all_ranks.total_rows(matrix)]
    present = squared > NOISE * squared[..., :1]
    return torch.where(present, squared, 1).sqrt() * present


def _matrix(x: Tensor, mask: Tensor | None, center: bool, gather: bool) -> Tensor:
    """Check x and return it in float64, with zeros in masked rows, which do not change the singular values."""
    all_ranks.check_one_set(x, gather)
    x = numerics.prepare_tokens(x, mask).double()
    return all_ranks.center(x, mask, gather) if center else x


def _rescale(x: Tensor, mask: Tensor | None, center: bool, gather: bool) -> tuple[Tensor, Tensor]:
    """Return `_matrix` divided by a scale (...), so that squares of float64 inputs do not under- or overflow."""
    matrix = _matrix(x, mask, center, gather)
    if x.dtype != torch.float64 or (x.numel() == 0 and not gather):
        return matrix, matrix.new_ones(matrix.shape[:-2])
    peak = matrix.detach().abs().amax((-2, -1)) if x.numel() else matrix.new_zeros(())
    peak = all_ranks.maximum(peak, gather)
    scale = torch.where(peak > 0, peak, 1)
    return matrix / scale[..., None, None], scale


def _spectrum(x: Tensor, mask: Tensor | None, center: bool, gather: bool) -> tuple[Tensor, Tensor]:
    """Return the singular values (..., min(n, d)) of the scaled matrix, largest first, and the scale (...)."""
    matrix, scale = _rescale(x, mask, center, gather)
    return gram_spectrum(matrix, gather), scale


def _gram(x: Tensor, gather: bool) -> Tensor:
    """Return the smaller of XXᵀ and XᵀX; XᵀX if the rows of all processes are gathered."""
    if gather:
        return all_ranks.total(x.mT @ x)
    return x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return above/below, and 0 where below is 0."""
    present = below > 0
    return above / torch.where(present, below, 1) * present
