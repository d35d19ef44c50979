"""Centered attention: remove the plain average from attention (Ali et al. 2023; Nait Saada et al., ICML 2025)."""

from torch import Tensor, nn

from uncollapse.cures.groups import visible_mean
from uncollapse.pairwise import numerics
from uncollapse.registry import cure


def centered_attention(
    context: Tensor, v: Tensor, scale: float = 1.0, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Subtract the mean of the values from the output of attention.

        (A − s·11ᵀ/n)v = Av − s·mean(v)

    With s = 1, "Mind the Gap" (arXiv 2410.07799), which removes the outlier in the spectrum of A that causes rank
    collapse. Centered Self-Attention (arXiv 2306.01610) proposed a correction of this kind before. A itself is not
    needed, so fused attention stays fused.

    Args:
        context: Av (..., heads, n, d).
        v: values (..., heads, m, d).
        scale: s; 0 is plain attention.
        mask: (..., m) bool, True = real key; without the dimension of the heads.
        causal: average over the tokens up to each one, so that the rows of A still sum to 1 − s; needs n = m.

    Returns:
        The context of each head, with the shape and dtype of context.

    >>> import torch
    >>> v = torch.tensor([[[1.0], [3.0]]])  # one head, two tokens
    >>> centered_attention(v, v)
    tensor([[[-1.],
             [ 1.]]])
    """
    mean = visible_mean(context, v, mask, causal)
    return (numerics.to_full(context) - scale * mean).to(context.dtype)


@cure(
    centered_attention,
    acts_on="attention",
    paper="Mind the Gap, ICML 2025, arXiv 2410.07799; Centered Self-Attention Layers, 2023, arXiv 2306.01610",
    cost="O(nd), fused attention stays",
    use="deep or long-context Transformers whose attention is close to uniform, trained from scratch",
)
class CenteredAttention(nn.Module):
    """`centered_attention` as a layer without parameters. Centered attention (arXiv 2410.07799, 2306.01610).

    Args:
        scale: as for `centered_attention`.

    Shape: context (..., heads, n, d), v (..., heads, m, d) -> context's.

    >>> import torch
    >>> CenteredAttention()(torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)).shape
    torch.Size([2, 4, 5, 8])
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, context: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Center the context of each head."""
        return centered_attention(context, v, self.scale, mask=mask, causal=causal)

    def extra_repr(self) -> str:
        """Return the option."""
        return f"scale={self.scale}"
