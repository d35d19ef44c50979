"""NeuTRENO: pull the output of attention towards the values of the first block (Nguyen et al., NeurIPS 2023)."""

from typing import Any, ClassVar

from torch import Tensor, nn

from uncollapse.registry import cure


def neutreno(context: Tensor, v: Tensor, first: Tensor, scale: float = 0.6) -> Tensor:
    """Add to the output of attention how far its values have moved from those of the first block.

        Av + λ(v₀ − v)

    NeuTRENO (arXiv 2312.00751). A itself is not needed, so fused attention stays fused.

    Args:
        context: Av (..., heads, n, d).
        v: values (..., heads, n, d).
        first: v₀, values of the first block, of the same shape.
        scale: λ.

    Returns:
        The context of each head, with the shape and dtype of context.

    >>> import torch
    >>> v = torch.tensor([[[1.0], [3.0]]])  # one head, two tokens
    >>> neutreno(torch.full_like(v, 2.0), v, torch.zeros_like(v), 0.5)
    tensor([[[1.5000],
             [0.5000]]])
    """
    if not context.shape == v.shape == first.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (context, v, first))
        raise ValueError(f"context, v and first must have the same shape, got {shapes}.")
    return (context + scale * (first - v)).to(context.dtype)


@cure(
    neutreno,
    acts_on="attention",
    paper="NeuTRENO, NeurIPS 2023, arXiv 2312.00751",
    mixes=False,
    cost="O(nd), fused attention stays",
    use="deep Transformers whose tokens grow alike, trained from scratch",
)
class NeuTRENO(nn.Module):
    """`neutreno` as a layer without parameters, from the second block on. NeuTRENO (arXiv 2312.00751).

    Args:
        scale: λ; the authors use 0.6 for DeiT and 0.4 for language models, which are the presets "deit" and "text".

    Shape: context, v, first (..., heads, n, d) -> the same.

    >>> import torch
    >>> NeuTRENO()(*(torch.randn(2, 4, 5, 8) for _ in range(3))).shape
    torch.Size([2, 4, 5, 8])
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"deit": {"scale": 0.6}, "text": {"scale": 0.4}}

    def __init__(self, scale: float = 0.6) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, context: Tensor, v: Tensor, first: Tensor) -> Tensor:
        """Pull the context of each head towards the first values."""
        return neutreno(context, v, first, self.scale)

    def extra_repr(self) -> str:
        """Return the option."""
        return f"scale={self.scale}"
