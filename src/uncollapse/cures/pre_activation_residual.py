"""Pre-activation residual: add a layer's output to the next one's (He et al., ECCV 2016, arXiv 1603.05027)."""

from torch import Tensor, nn

from uncollapse.registry import cure


def pre_activation_residual(x: Tensor, previous: Tensor, scale: float = 1.0) -> Tensor:
    """Add the output of the layer before, as it was before its activation and dropout.

        h_ℓ = f_ℓ(h_ℓ₋₁) + s·h_ℓ₋₁,      f_ℓ: activation, dropout, then the layer

    Identity mappings (arXiv 1603.05027), Eq. 4 and 5; for graph networks DeeperGCN's Res+ (arXiv 2006.07739). The
    connection carries what dropout has not thinned. `residual` carries what enters the layer, so dropout of 0.6 in
    front of every layer grows it 2.5-fold or sets it to zero, and a deep stack does not train.

    Args:
        x: output of the layer, f_ℓ.
        previous: output of the layer before, h_ℓ₋₁, of the same shape.
        scale: s.

    Returns:
        h_ℓ, with the shape and dtype of x.

    >>> import torch
    >>> pre_activation_residual(torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]]))
    tensor([[11., 22.]])
    """
    if x.shape != previous.shape:
        raise ValueError(f"x and previous must have the same shape, got {tuple(x.shape)} and {tuple(previous.shape)}.")
    return (x + scale * previous).to(x.dtype)


@cure(
    pre_activation_residual,
    acts_on="tokens",
    paper="Identity Mappings in Deep Residual Networks, ECCV 2016, arXiv 1603.05027",
    place=("conv.output",),
    elsewhere=(),
    mixes=False,
    cost="O(nd)",
    use="deep stacks without residual connections and with dropout, such as a plain GCN",
)
class PreActivationResidual(nn.Module):
    """`pre_activation_residual` as a layer without parameters. Identity mappings (arXiv 1603.05027).

    `attach` takes h_ℓ₋₁ from the block before, at the same place, and acts from the second block on, where both have
    the same number of features.

    Args:
        scale: as for `pre_activation_residual`.

    Shape: x (..., n, d), previous (..., n, d) -> the same.

    >>> import torch
    >>> PreActivationResidual()(torch.randn(4, 3), torch.randn(4, 3)).shape
    torch.Size([4, 3])
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, previous: Tensor) -> Tensor:
        """Add the output of the layer before."""
        return pre_activation_residual(x, previous, self.scale)

    def extra_repr(self) -> str:
        """Return the option."""
        return f"scale={self.scale}"
