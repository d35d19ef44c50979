"""FeatScale: reweight the mean of the tokens and their deviation from it (Wang et al., ICLR 2022, arXiv 2203.05962)."""

import torch
from torch import Tensor, nn

from uncollapse.cures.groups import token_mean
from uncollapse.pairwise import numerics
from uncollapse.registry import cure


def feat_scale(
    x: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Add to the tokens a weighted part of their mean and of their deviation from it.

        y = x + λ₁·mean(x) + λ₂·(x − mean(x))

    FeatScale (arXiv 2203.05962), for the output of attention before the residual.

    Args:
        x: tokens (..., n, d).
        low: λ₁, a number or one per feature (d,).
        high: λ₂, likewise.
        mask: (..., n) bool, True = real. Masked rows have no influence and do not change.
        causal: take the mean over the tokens up to each one.

    Returns:
        y, with the shape and dtype of x.

    >>> feat_scale(torch.tensor([[1.0], [3.0]]), 0.0, 1.0)
    tensor([[0.],
            [4.]])
    """
    numerics.check_tokens(x, mask)
    given, x = x, numerics.prepare(x, mask)
    mean = token_mean(x, mask, causal=causal)
    out = (x + low * mean + high * (x - mean)).to(given.dtype)
    return out if mask is None else torch.where(mask.unsqueeze(-1), out, given)


@cure(
    feat_scale,
    acts_on="tokens",
    paper="Anti-Oversmoothing in Deep Vision Transformers, ICLR 2022, arXiv 2203.05962",
    place=("attention.output",),
    cost="O(nd)",
    use="deep vision Transformers whose patches grow alike",
)
class FeatScale(nn.Module):
    """`feat_scale` with λ₁ and λ₂ learned per feature, initialized to 0. FeatScale (arXiv 2203.05962).

    Args:
        dim: number of features.

    Shape: x (..., n, d) -> the same.

    >>> FeatScale(8)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.zeros(dim))
        self.high = nn.Parameter(torch.zeros(dim))

    def reset_parameters(self) -> None:
        """Set λ₁ and λ₂ to 0, which leaves the tokens unchanged."""
        nn.init.zeros_(self.low)
        nn.init.zeros_(self.high)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Reweight the tokens."""
        return feat_scale(x, self.low, self.high, mask=mask, causal=causal)

    def extra_repr(self) -> str:
        """Return the number of features."""
        return f"{self.low.numel()}"
