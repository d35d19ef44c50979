"""DiffGroupNorm: normalize nodes within learned groups (Zhou et al., NeurIPS 2020, arXiv 2006.06972)."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from uncollapse.pairwise import numerics
from uncollapse.registry import cure


def diff_group_norm(
    x: Tensor,
    assign: Tensor,
    scale: float = 0.01,
    *,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    statistics: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Assign nodes to groups softly, normalize each feature within each group, and add the result to the nodes.

        S = softmax(xUᵀ)      z_g = S_g ⊙ x      y = x + λ Σ_g (γ_g ⊙ (z_g − μ_g)/√(ε + σ²_g) + β_g)

    DiffGroupNorm (arXiv 2006.06972), as in PyG. μ_g and σ²_g are the mean and the variance of z_g over all nodes.

    Args:
        x: nodes or tokens (..., n, d).
        assign: U (groups, d).
        scale: λ.
        gain: γ (groups, d); 1 if not given.
        bias: β (groups, d); 0 if not given.
        statistics: μ and σ² (groups, d) each; of x itself if not given.
        mask: (..., n) bool, True = real. Masked rows have no influence and do not change.
        eps: ε.

    Returns:
        y, with the shape and dtype of x.

    >>> x = torch.tensor([[1.0], [3.0]])
    >>> diff_group_norm(x, torch.zeros(1, 1), 1.0, eps=0.0)
    tensor([[0.],
            [4.]])
    """
    numerics.check_tokens(x, mask)
    full = numerics.prepare(x, mask)
    grouped = _assign_groups(full, assign)
    mean, variance = group_statistics(grouped, mask) if statistics is None else statistics
    normal = (grouped - mean) / (variance.to(full.dtype) + eps).sqrt()
    normal = normal if gain is None else normal * gain
    normal = normal if bias is None else normal + bias
    out = (full + scale * normal.sum(-2)).to(x.dtype)
    return out if mask is None else torch.where(mask.unsqueeze(-1), out, x)


def _assign_groups(x: Tensor, assign: Tensor) -> Tensor:
    """Return S_g ⊙ x (..., n, groups, d)."""
    shares = (x @ assign.to(x.dtype).mT).softmax(-1)
    return shares.unsqueeze(-1) * x.unsqueeze(-2)


def group_statistics(grouped: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return mean and variance (groups, d) of nodes (..., n, groups, d), over the real ones of all sets."""
    if mask is None and grouped.numel():
        rows = grouped.flatten(0, -3)
        return rows.mean(0), rows.var(0, correction=0)
    mask = grouped.new_ones(grouped.shape[:-2], dtype=torch.bool) if mask is None else mask
    real = mask.expand(grouped.shape[:-2])[..., None, None].to(grouped.dtype)
    dims = tuple(range(grouped.dim() - 2))
    number = real.sum().clamp(min=1)
    mean = (grouped * real).sum(dims) / number
    return mean, ((grouped - mean).square() * real).sum(dims) / number


@cure(
    diff_group_norm,
    acts_on="tokens",
    paper="DiffGroupNorm, NeurIPS 2020, arXiv 2006.06972",
    cost="O(ndg) time and memory for g groups",
    use="deep graph networks for node classification",
)
class DiffGroupNorm(nn.Module):
    """`diff_group_norm` with learned groups, gain and bias. DiffGroupNorm (arXiv 2006.06972).

    Statistics are those of the batch in training, and running averages in evaluation, as in BatchNorm.

    Args:
        dim: number of features.
        scale: λ. Published settings are mostly between 0.0005 and 0.03, larger in deeper networks.
        groups: number of groups. Published settings have 10, and 5 on PubMed (preset "pubmed").
        momentum: of the running averages.
        eps: as for `diff_group_norm`.

    Shape: x (..., n, d) -> the same.

    >>> DiffGroupNorm(8)(torch.randn(5, 8)).shape
    torch.Size([5, 8])
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"pubmed": {"groups": 5, "scale": 0.01}}
    mean: Tensor
    variance: Tensor

    def __init__(
        self, dim: int, scale: float = 0.01, *, groups: int = 10, momentum: float = 0.1, eps: float = 1e-5
    ) -> None:
        super().__init__()
        if groups < 1:
            raise ValueError(f"groups must be at least 1, got {groups}.")
        self.dim, self.scale, self.momentum, self.eps = dim, scale, momentum, eps
        self.assign, self.gain, self.bias = (nn.Parameter(torch.empty(groups, dim)) for _ in range(3))
        self.register_buffer("mean", torch.empty(groups, dim))
        self.register_buffer("variance", torch.empty(groups, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new groups; reset gain, bias and running averages."""
        nn.init.kaiming_uniform_(self.assign, a=math.sqrt(5))
        for ones in (self.gain, self.variance):
            nn.init.ones_(ones)
        for zeros in (self.bias, self.mean):
            nn.init.zeros_(zeros)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize x (..., n, d) within groups."""
        options: dict[str, Any] = {"gain": self.gain, "bias": self.bias, "mask": mask, "eps": self.eps}
        if not self.training:
            return diff_group_norm(x, self.assign, self.scale, statistics=(self.mean, self.variance), **options)
        statistics = group_statistics(_assign_groups(numerics.prepare(x, mask), self.assign), mask)
        self._average(*statistics, torch.tensor(x.shape[:-1].numel(), device=x.device) if mask is None else mask.sum())
        return diff_group_norm(x, self.assign, self.scale, statistics=statistics, **options)

    @torch.no_grad()
    def _average(self, mean: Tensor, variance: Tensor, number: Tensor) -> None:
        """Update the running averages, with the unbiased variance as in BatchNorm; without real nodes they stay."""
        weight = (self.momentum * (number > 0)).to(mean.dtype)
        unbiased = variance * (number / (number - 1).clamp(min=1))
        for average, new in ((self.mean, mean), (self.variance, unbiased)):
            average.copy_(average.to(new.dtype).lerp(new, weight))

    def extra_repr(self) -> str:
        """Return the options."""
        return f"{self.dim}, scale={self.scale}, groups={len(self.gain)}"
