"""GFSA: attention as a graph filter with a high-order term (Choi et al., NeurIPS 2024, arXiv 2312.04234)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from uncollapse.cures.groups import scale_per_head
from uncollapse.registry import cure


def gfsa(
    context: Tensor, v: Tensor, second: Tensor, scale: float | Tensor, *, order: int = 4, low: float = 0.0
) -> Tensor:
    """Filter the values by a polynomial of the attention map A instead of A alone.

        H = w₀I + A + w_K(A + (K − 1)(A² − A))      Hv, where A + (K − 1)(A² − A) approximates A^K

    GFSA (arXiv 2312.04234), with w₁ = 1 as in the authors' code. A² itself is not needed: A²v = A(Av).

    Args:
        context: Av (..., heads, n, d).
        v: values (..., heads, n, d).
        second: A(Av), of the same shape.
        scale: w_K, a number or one per head (heads,).
        order: K.
        low: w₀.

    Returns:
        Hv, with the shape and dtype of context.

    >>> v = torch.tensor([[[1.0], [3.0]]])  # one head, two tokens; A swaps them
    >>> gfsa(v.flip(-2), v, v, 0.5, order=2)
    tensor([[[3.5000],
             [2.5000]]])
    """
    if not context.shape == v.shape == second.shape or context.dim() < 3:
        shapes = ", ".join(str(tuple(x.shape)) for x in (context, v, second))
        raise ValueError(f"context, v and second must have the same shape (..., heads, n, d), got {shapes}.")
    if order < 2:
        raise ValueError(f"order must be at least 2, got {order}.")
    scale = scale_per_head(scale, context)
    high = context + (order - 1) * (second - context)
    return (low * v + context + scale * high).to(context.dtype)


@cure(
    gfsa,
    acts_on="attention",
    paper="Graph Convolutions Enrich the Self-Attention in Transformers!, NeurIPS 2024, arXiv 2312.04234",
    mixes=False,
    cost="a second product with the attention map, O(n²d); fused attention stays in transformers, not in timm",
    use="Transformers whose tokens grow alike, vision, text or graph",
)
class GFSA(nn.Module):
    """`gfsa` with one learned w_K per head, initialized to 0. GFSA (arXiv 2312.04234).

    Args:
        heads: number of heads.
        scale: w_K at the start.
        order: K. The authors use 4 for DeiT and 2 to 7 elsewhere, see the presets.
        low: w₀, fixed.

    Shape: context, v, second (..., heads, n, d) -> the same.

    >>> GFSA(4)(*(torch.randn(2, 4, 5, 8) for _ in range(3))).shape
    torch.Size([2, 4, 5, 8])
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "deit": {"order": 4},
        "wikitext103": {"order": 3},
        "ptb": {"order": 7},
        "zinc": {"order": 2},
    }

    def __init__(self, heads: int, scale: float = 0.0, *, order: int = 4, low: float = 0.0) -> None:
        super().__init__()
        if order < 2:
            raise ValueError(f"order must be at least 2, got {order}.")
        self.start, self.order, self.low = float(scale), order, low
        self.scale = nn.Parameter(torch.full((heads,), self.start))

    def reset_parameters(self) -> None:
        """Set all w_K to their start; 0 is plain attention."""
        nn.init.constant_(self.scale, self.start)

    def forward(self, context: Tensor, v: Tensor, second: Tensor) -> Tensor:
        """Filter the values of each head."""
        return gfsa(context, v, second, self.scale, order=self.order, low=self.low)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"heads={self.scale.numel()}, order={self.order}, low={self.low}"
