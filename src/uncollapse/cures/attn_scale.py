"""AttnScale: amplify the part of attention that is not a plain average (Wang et al., ICLR 2022, arXiv 2203.05962)."""

import torch
from torch import Tensor, nn

from uncollapse.cures.groups import scale_per_head, visible_mean
from uncollapse.pairwise import numerics
from uncollapse.registry import cure


def attn_scale(
    context: Tensor, v: Tensor, scale: float | Tensor, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Scale the high-pass part of an attention map A, given only its output Av.

        A' = 1/n + (1 + λ)(A − 1/n)      A'v = (1 + λ)·Av − λ·mean(v)

    AttnScale (arXiv 2203.05962). A itself is not needed, so fused attention stays fused.

    Args:
        context: Av (..., heads, n, d).
        v: values (..., heads, m, d).
        scale: λ, a number or one per head (heads,).
        mask: (..., m) bool, True = real key; without the dimension of the heads.
        causal: average over the tokens up to each one; needs n = m.

    Returns:
        A'v, with the shape and dtype of context.

    >>> v = torch.tensor([[[1.0], [3.0]]])  # one head, two tokens
    >>> attn_scale(v, v, 1.0)
    tensor([[[0.],
             [4.]]])
    """
    mean = visible_mean(context, v, mask, causal)
    scale = scale_per_head(scale, context)
    full = numerics.to_full(context)
    return (full + scale * (full - mean)).to(context.dtype)


@cure(
    attn_scale,
    acts_on="attention",
    paper="Anti-Oversmoothing in Deep Vision Transformers, ICLR 2022, arXiv 2203.05962",
    cost="O(nd), fused attention stays",
    use="deep vision Transformers whose patches grow alike",
)
class AttnScale(nn.Module):
    """`attn_scale` with one learned λ per head, initialized to 0. AttnScale (arXiv 2203.05962).

    Args:
        heads: number of heads.

    Shape: context (..., heads, n, d), v (..., heads, m, d) -> context's.

    >>> AttnScale(4)(torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)).shape
    torch.Size([2, 4, 5, 8])
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(heads))

    def reset_parameters(self) -> None:
        """Set all λ to 0, which is plain attention."""
        nn.init.zeros_(self.scale)

    def forward(self, context: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Scale the context of each head."""
        return attn_scale(context, v, self.scale, mask=mask, causal=causal)

    def extra_repr(self) -> str:
        """Return the number of heads."""
        return f"heads={self.scale.numel()}"
