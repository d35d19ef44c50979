"""Residual connection: add the input of a layer to its output (He et al., CVPR 2016, arXiv 1512.03385)."""

from torch import Tensor, nn

from uncollapse.registry import cure


def residual(x: Tensor, inputs: Tensor, scale: float = 1.0) -> Tensor:
    """Add the input of a layer to its output.

        y = f(x) + s·x

    Residual connection (arXiv 1512.03385); for graph convolutions as in GCN (arXiv 1609.02907, appendix B) and DeepGCNs
    (arXiv 1904.03751).

    Args:
        x: output of the layer, f(x).
        inputs: input of the layer, of the same shape.
        scale: s.

    Returns:
        y, with the shape and dtype of x.

    >>> import torch
    >>> residual(torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]]))
    tensor([[11., 22.]])
    """
    if x.shape != inputs.shape:
        raise ValueError(f"x and inputs must have the same shape, got {tuple(x.shape)} and {tuple(inputs.shape)}.")
    return (x + scale * inputs).to(x.dtype)


@cure(
    residual,
    acts_on="tokens",
    paper="Deep Residual Learning for Image Recognition, CVPR 2016, arXiv 1512.03385",
    place=("conv.output",),
    elsewhere=(),
    mixes=False,
    cost="O(nd)",
    use="deep stacks without residual connections, such as a plain GCN",
)
class Residual(nn.Module):
    """`residual` as a layer without parameters. Residual connection (arXiv 1512.03385).

    `attach` puts it where the output of a layer has as many features as its input.

    Args:
        scale: as for `residual`.

    Shape: x (..., n, d), inputs (..., n, d) -> the same.

    >>> import torch
    >>> Residual()(torch.randn(4, 3), torch.randn(4, 3)).shape
    torch.Size([4, 3])
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Add the input of a layer to its output."""
        return residual(x, inputs, self.scale)

    def extra_repr(self) -> str:
        """Return the option."""
        return f"scale={self.scale}"
