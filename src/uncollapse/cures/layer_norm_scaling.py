"""LayerNorm scaling: divide the output of each pre-norm by √depth (Sun et al., NeurIPS 2025, arXiv 2502.05795)."""

import math

from torch import Tensor, nn

from uncollapse.registry import cure


def layer_norm_scaling(x: Tensor, depth: int, scale: float = 0.5) -> Tensor:
    """Divide the output of a norm by a power of the depth of its block.

        y = LayerNorm(x)/ℓ^s      s = ½: LayerNorm(x)/√ℓ

    LayerNorm Scaling (arXiv 2502.05795).

    Args:
        x: output of the norm (..., n, d).
        depth: ℓ, the number of the block, counted from 1.
        scale: s; 0 is the identity.

    Returns:
        y, with the shape and dtype of x.

    >>> import torch
    >>> layer_norm_scaling(torch.tensor([[2.0, -4.0]]), 4)
    tensor([[ 1., -2.]])
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}.")
    return x * math.pow(depth, -scale)


@cure(
    layer_norm_scaling,
    acts_on="tokens",
    paper="The Curse of Depth in Large Language Models, NeurIPS 2025, arXiv 2502.05795",
    place=("attention.norm", "cross.norm", "mlp.norm"),
    elsewhere=(),
    mixes=False,
    pre_norm=True,
    cost="O(nd)",
    use="deep pre-norm Transformers trained from scratch, whose late blocks contribute little",
)
class LayerNormScaling(nn.Module):
    """`layer_norm_scaling` as a layer without parameters. LayerNorm Scaling (arXiv 2502.05795).

    Args:
        depth: number of the block, counted from 1; `attach` knows it.
        scale: as for `layer_norm_scaling`.

    Shape: x (..., n, d) -> the same.

    >>> import torch
    >>> LayerNormScaling(4)(torch.ones(1, 2))
    tensor([[0.5000, 0.5000]])
    """

    def __init__(self, depth: int, scale: float = 0.5) -> None:
        super().__init__()
        self.depth, self.scale = depth, scale

    def forward(self, x: Tensor) -> Tensor:
        """Scale the output of a norm."""
        return layer_norm_scaling(x, self.depth, self.scale)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"depth={self.depth}, scale={self.scale}"
