"""What users have today: the published formulas with all pairs in a matrix. The benchmarks compare with these."""

import torch
import torch.nn.functional as F
from torch import Tensor


def contra_norm(x: Tensor, scale: float = 0.1) -> Tensor:
    """ContraNorm as published for ALBERT and ViT, without its LayerNorm."""
    unit = F.normalize(x, dim=-1)
    return x - scale * (unit @ unit.mT).softmax(-1) @ x


def graph_contra_norm(x: Tensor, adjacency: Tensor, scale: float = 0.5) -> Tensor:
    """ContraNorm as published for graphs: adjacency (n, n), sparse, with self-loops, made dense in each layer."""
    unit = F.normalize(x, dim=-1)
    logits = (unit @ unit.T).masked_fill(adjacency.to_dense() > 1e-5, -torch.inf)
    return (1 + scale) * x - scale * logits.softmax(-1) @ x


def effective_rank(x: Tensor) -> Tensor:
    """exp of the entropy of the L1-normalised singular values, by a full SVD."""
    _, s, _ = torch.linalg.svd(x, full_matrices=False)
    p = s / s.sum(-1, keepdim=True)
    return torch.exp(-(p * p.log()).sum(-1))


def mean_cosine(x: Tensor) -> Tensor:
    """Mean of the similarity matrix above its diagonal."""
    unit = F.normalize(x, dim=-1)
    similarity, n = unit @ unit.mT, x.shape[-2]
    return similarity.triu(1).sum((-2, -1)) / (n * (n - 1) / 2)


def uniform_loss(x: Tensor, t: float = 2.0) -> Tensor:
    """Wang & Isola's two lines; x is normalised here, theirs expects it so."""
    return torch.pdist(F.normalize(x, dim=-1)).pow(2).mul(-t).exp().mean().log()


def info_nce(x: Tensor, y: Tensor, temperature: float = 0.5) -> Tensor:
    """Softmax cross entropy over the matrix of similarities."""
    logits = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(x)))


def nt_xent(x: Tensor, y: Tensor, temperature: float = 0.5) -> Tensor:
    """SimCLR's loss: each of the 2B rows against the 2B − 2 that are neither itself nor its partner."""
    z = F.normalize(torch.cat([x, y]), dim=-1)
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(x)))
