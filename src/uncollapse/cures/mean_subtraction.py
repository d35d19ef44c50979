"""Mean subtraction: remove the mean of all nodes (Yang et al. 2020, arXiv 2003.13663)."""

import torch
from torch import Tensor, nn

from uncollapse.cures.groups import token_mean
from uncollapse.pairwise import numerics
from uncollapse.registry import cure


def mean_subtraction(
    x: Tensor,
    scale: float = 1.0,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    batch: Tensor | None = None,
) -> Tensor:
    """Subtract the mean of the tokens or nodes.

        y = x − s·mean(x)

    Mean subtraction (arXiv 2003.13663), with s = 1; the same as PyG's `MeanSubtractionNorm`.

    Args:
        x: tokens or nodes (..., n, d).
        scale: s; 0 is the identity.
        mask: (..., n) bool, True = real. Masked rows have no influence and do not change.
        causal: take the mean over the tokens up to each one.
        batch: (n,) graph of each node, for x (n, d): means are taken within graphs.

    Returns:
        y, with the shape and dtype of x.

    >>> mean_subtraction(torch.tensor([[0.0, 2.0], [2.0, 0.0]]))
    tensor([[-1.,  1.],
            [ 1., -1.]])
    """
    numerics.check_tokens(x, mask)
    given, x = x, numerics.prepare(x, mask)
    out = (x - scale * token_mean(x, mask, batch, causal)).to(given.dtype)
    return out if mask is None else torch.where(mask.unsqueeze(-1), out, given)


@cure(
    mean_subtraction,
    acts_on="tokens",
    paper="Revisiting Over-smoothing in Deep GCNs, 2020, arXiv 2003.13663",
    cost="O(nd)",
    use="deep graph networks whose nodes share one direction",
)
class MeanSubtraction(nn.Module):
    """`mean_subtraction` as a layer without parameters. Mean subtraction (arXiv 2003.13663).

    Args:
        scale: as for `mean_subtraction`.

    Shape: x (..., n, d) -> the same.

    >>> MeanSubtraction()(torch.randn(4, 3)).mean(0).abs().max().item() < 1e-6
    True
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, causal: bool = False, batch: Tensor | None = None
    ) -> Tensor:
        """Subtract the mean."""
        return mean_subtraction(x, self.scale, mask=mask, causal=causal, batch=batch)

    def extra_repr(self) -> str:
        """Return the option."""
        return f"scale={self.scale}"
