"""Initial residual: bring back what entered the first layer (Chen et al., ICML 2020, arXiv 2007.02133)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from uncollapse.registry import cure


def initial_residual(
    x: Tensor, first: Tensor, scale: float | Tensor = 0.1, *, identity: float | Tensor | None = None
) -> Tensor:
    """Mix the first layer's tokens into those of a later layer.

        y = (1 − α)x + αx₀      or, with `identity`,      y = λx + μx₀

    GCNII (arXiv 2007.02133), Eq. 5, without its identity mapping of the weights; the second form, with λ and μ learned
    per layer, is that of nanochat and modded-nanogpt.

    Args:
        x: tokens or nodes (..., n, d).
        first: x₀, of the same shape.
        scale: α, or μ if `identity` is given.
        identity: λ.

    Returns:
        y, with the shape and dtype of x.

    >>> initial_residual(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]]), 0.5)
    tensor([[2., 1.]])
    """
    if x.shape != first.shape:
        raise ValueError(f"x and first must have the same shape, got {tuple(x.shape)} and {tuple(first.shape)}.")
    return ((1 - scale if identity is None else identity) * x + scale * first).to(x.dtype)


@cure(
    initial_residual,
    acts_on="tokens",
    paper="GCNII, ICML 2020, arXiv 2007.02133",
    place=("attention.input",),
    elsewhere=("conv.output", "block"),
    mixes=False,
    cost="O(nd)",
    use="deep graph networks; with preset x0, decoders trained from scratch",
)
class InitialResidual(nn.Module):
    """`initial_residual` with a fixed α, or with learned λ and μ. GCNII (arXiv 2007.02133).

    `attach` takes x₀ from the first block, at the same place, and acts from the second block on: x₀ is what enters the
    first block of a Transformer, and the output of the first convolution of a graph network.

    Args:
        scale: α; if learned, μ starts there, and λ at 1 − α.
        learnable: learn λ and μ. Preset "x0" starts at λ = 1, μ = 0.

    Shape: x (..., n, d), first (..., n, d) -> the same.

    >>> InitialResidual()(torch.randn(4, 3), torch.randn(4, 3)).shape
    torch.Size([4, 3])
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"gcnii": {"scale": 0.1}, "x0": {"scale": 0.0, "learnable": True}}

    def __init__(self, scale: float = 0.1, *, learnable: bool = False) -> None:
        super().__init__()
        self.fixed_scale, self.learnable = float(scale), learnable
        if learnable:
            self.scale_param = nn.Parameter(torch.full((), self.fixed_scale))
            self.identity_param = nn.Parameter(torch.full((), 1 - self.fixed_scale))

    def reset_parameters(self) -> None:
        """Set λ and μ to their start."""
        if self.learnable:
            nn.init.constant_(self.scale_param, self.fixed_scale)
            nn.init.constant_(self.identity_param, 1 - self.fixed_scale)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        """Mix x₀ into x."""
        if self.learnable:
            return initial_residual(x, first, self.scale_param, identity=self.identity_param)
        return initial_residual(x, first, self.fixed_scale)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"scale={self.fixed_scale}, learnable={self.learnable}"
