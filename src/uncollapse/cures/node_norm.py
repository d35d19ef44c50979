"""NodeNorm: divide each node by its own standard deviation (Zhou et al., CIKM 2021, arXiv 2006.07107)."""

from typing import Any, ClassVar

from torch import Tensor, nn

from uncollapse.pairwise import numerics
from uncollapse.registry import cure


def node_norm(x: Tensor, scale: float = 1.0, *, eps: float = 1e-5) -> Tensor:
    """Divide each node by a power of the standard deviation of its features.

        y_i = x_i/σ_i^s      σ_i = √(ε + var(x_i)),  s = 1/p

    NodeNorm (arXiv 2006.07107). The variance is over the features of one node, divided by d; the mean stays.

    Args:
        x: nodes or tokens (..., n, d).
        scale: s; 1 gives every node the same variance, 0 is the identity.
        eps: ε.

    Returns:
        y, with the shape and dtype of x.

    >>> import torch
    >>> node_norm(torch.tensor([[0.0, 4.0], [1.0, 2.0]]), eps=0.0)
    tensor([[0., 2.],
            [2., 4.]])
    """
    numerics.check_tokens(x, None)
    full = numerics.to_full(x)
    deviation = (full.var(-1, correction=0, keepdim=True) + eps).sqrt()
    return (full / deviation**scale).to(x.dtype)


@cure(
    node_norm,
    acts_on="tokens",
    paper="NodeNorm, CIKM 2021, arXiv 2006.07107",
    place=("conv.output",),
    elsewhere=(),  # LayerNorm undoes it
    mixes=False,
    cost="O(nd)",
    use="deep graph networks whose nodes differ in variance",
)
class NodeNorm(nn.Module):
    """`node_norm` as a layer without parameters. NodeNorm (arXiv 2006.07107).

    Args:
        scale, eps: as for `node_norm`. The presets "p2" and "p3" divide by the square and the cube root of σ.

    Shape: x (..., n, d) -> the same.

    >>> import torch
    >>> NodeNorm()(torch.randn(4, 3)).shape
    torch.Size([4, 3])
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"p2": {"scale": 1 / 2}, "p3": {"scale": 1 / 3}}

    def __init__(self, scale: float = 1.0, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.eps = scale, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., n, d)."""
        return node_norm(x, self.scale, eps=self.eps)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"scale={self.scale}, eps={self.eps}"
