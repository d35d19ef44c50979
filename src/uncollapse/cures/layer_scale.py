"""LayerScale: a learned scale per feature on each branch of a block (Touvron et al., ICCV 2021, arXiv 2103.17239)."""

import torch
from torch import Tensor, nn

from uncollapse.registry import cure


def layer_scale(x: Tensor, gamma: float | Tensor) -> Tensor:
    """Scale each feature of a branch before it joins the residual stream.

        x + γ ⊙ f(x): returns γ ⊙ f(x)

    LayerScale of CaiT (arXiv 2103.17239).

    Args:
        x: output of the branch, f(x) (..., n, d).
        gamma: γ, one number per feature (d,), or one for all.

    Returns:
        γ ⊙ f(x), with the shape and dtype of x.

    >>> layer_scale(torch.tensor([[1.0, 2.0]]), torch.tensor([0.5, 10.0]))
    tensor([[ 0.5000, 20.0000]])
    """
    return (x * gamma).to(x.dtype)


def initial_gamma(blocks: int) -> float:
    """Return the paper's γ at the start: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 in deeper models."""
    return 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6


@cure(
    layer_scale,
    acts_on="tokens",
    paper="CaiT, ICCV 2021, arXiv 2103.17239",
    place=("attention.output", "cross.output", "mlp.output"),
    elsewhere=(),
    mixes=False,
    cost="O(nd)",
    use="deep Transformers with residual connections, trained from scratch",
)
class LayerScale(nn.Module):
    """`layer_scale` with one learned γ per feature. LayerScale of CaiT (arXiv 2103.17239).

    Args:
        dim: number of features.
        scale: γ at the start; if None, the paper's for the number of blocks, see `initial_gamma`.
        blocks: number of blocks of the model.

    Shape: x (..., n, d) -> the same.

    >>> LayerScale(8, 1e-4)(torch.ones(1, 8)).max().item() < 2e-4
    True
    """

    def __init__(self, dim: int, scale: float | None = None, *, blocks: int = 12) -> None:
        super().__init__()
        self.start = initial_gamma(blocks) if scale is None else float(scale)
        self.gamma = nn.Parameter(torch.full((dim,), self.start))

    def reset_parameters(self) -> None:
        """Set γ to its start."""
        nn.init.constant_(self.gamma, self.start)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the output of a branch."""
        return layer_scale(x, self.gamma)

    def extra_repr(self) -> str:
        """Return the number of features and the start."""
        return f"{self.gamma.numel()}, scale={self.start}"
