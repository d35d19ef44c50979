"""Value residual: bring back the values of the first attention (Zhou et al., ACL 2025, arXiv 2410.17897)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from uncollapse.registry import cure


def value_residual(
    v: Tensor, first: Tensor, scale: float | Tensor = 0.5, *, identity: float | Tensor | None = None
) -> Tensor:
    """Mix the values of the first block into those of a later block, before its attention averages them.

        v' = λ₁v₁ + λ₂v      λ₂ = 1 − λ₁ if not given

    ResFormer (arXiv 2410.17897), with λ₁ = λ₂ = ½.

    Args:
        v: values (..., n, d).
        first: v₁, values of the first block, of the same shape.
        scale: λ₁.
        identity: λ₂.

    Returns:
        v', with the shape and dtype of v.

    >>> value_residual(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]]))
    tensor([[2., 1.]])
    """
    if v.shape != first.shape:
        raise ValueError(f"v and first must have the same shape, got {tuple(v.shape)} and {tuple(first.shape)}.")
    return ((1 - scale if identity is None else identity) * v + scale * first).to(v.dtype)


@cure(
    value_residual,
    acts_on="values",
    paper="Value Residual Learning, ACL 2025, arXiv 2410.17897",
    mixes=False,
    cost="O(nd), fused attention stays",
    use="deep Transformers trained from scratch, above all decoders",
)
class ValueResidual(nn.Module):
    """`value_residual` with fixed or learned λ, from the second block on. ResFormer (arXiv 2410.17897).

    Args:
        scale: λ₁; if learned, its start, and λ₂ starts at 1 − λ₁. 1 is SVFormer: all blocks share the first values.
        learnable: learn λ₁ and λ₂ of each block.
        detach: send no gradient back to the first values.

    Shape: v (..., n, d), first (..., n, d) -> the same.

    >>> ValueResidual()(torch.randn(4, 3), torch.randn(4, 3)).shape
    torch.Size([4, 3])
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"resformer": {"scale": 0.5}, "svformer": {"scale": 1.0}}

    def __init__(self, scale: float = 0.5, *, learnable: bool = False, detach: bool = False) -> None:
        super().__init__()
        self.fixed_scale, self.learnable, self.detach = float(scale), learnable, detach
        if learnable:
            self.scale_param = nn.Parameter(torch.full((), self.fixed_scale))
            self.identity_param = nn.Parameter(torch.full((), 1 - self.fixed_scale))

    def reset_parameters(self) -> None:
        """Set λ₁ and λ₂ to their start."""
        if self.learnable:
            nn.init.constant_(self.scale_param, self.fixed_scale)
            nn.init.constant_(self.identity_param, 1 - self.fixed_scale)

    def forward(self, v: Tensor, first: Tensor) -> Tensor:
        """Mix the first values into v."""
        first = first.detach() if self.detach else first
        if self.learnable:
            return value_residual(v, first, self.scale_param, identity=self.identity_param)
        return value_residual(v, first, self.fixed_scale)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"scale={self.fixed_scale}, learnable={self.learnable}, detach={self.detach}"
