"""PairNorm: keep the mean distance between all pairs of nodes constant (Zhao & Akoglu, ICLR 2020, arXiv 1909.12223)."""

from typing import Literal

import torch
from torch import Tensor, nn

from uncollapse.cures.groups import token_mean
from uncollapse.pairwise import numerics
from uncollapse.registry import cure

Mode = Literal["PN", "SI", "SCS"]


def pair_norm(
    x: Tensor,
    scale: float = 1.0,
    *,
    mode: Mode = "PN",
    mask: Tensor | None = None,
    batch: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Center the rows and scale them to a common norm.

        PN:   s·c_i/√(ε + mean_j|c_j|²)      SI:  s·c_i/√(ε + |c_i|²)      c = x − mean(x)
        SCS:  s·x_i/√(ε + |x_i|²) − mean(x)

    PairNorm (arXiv 1909.12223). SI scales each node individually; SCS scales and centers at the same time.

    Args:
        x: nodes or tokens (..., n, d).
        scale: s.
        mode: "PN", "SI" or "SCS".
        mask: (..., n) bool, True = real. Masked rows have no influence and do not change.
        batch: (n,) graph of each node, for x (n, d): means are taken within graphs.
        eps: ε.

    Returns:
        The normalized rows, with the shape and dtype of x.

    >>> pair_norm(torch.tensor([[0.0, 2.0], [0.0, 0.0]]))
    tensor([[ 0.0000,  1.0000],
            [ 0.0000, -1.0000]])
    """
    if mode not in ("PN", "SI", "SCS"):
        raise ValueError(f"mode must be 'PN', 'SI' or 'SCS', got {mode!r}.")
    numerics.check_tokens(x, mask)
    given, x = x, numerics.prepare(x, mask)
    mean = token_mean(x, mask, batch)
    centred = x - mean
    if mode == "SCS":
        out = scale * x / (eps + x.square().sum(-1, keepdim=True)).sqrt() - mean
    else:
        square = centred.square().sum(-1, keepdim=True)
        if mode == "PN":
            real = square if mask is None else square.masked_fill(~mask.unsqueeze(-1), 0)
            square = token_mean(real, mask, batch)
        out = scale * centred / (eps + square).sqrt()
    out = out.to(given.dtype)
    return out if mask is None else torch.where(mask.unsqueeze(-1), out, given)


@cure(
    pair_norm,
    acts_on="tokens",
    paper="PairNorm, ICLR 2020, arXiv 1909.12223",
    cost="O(nd)",
    use="deep graph networks whose nodes grow alike",
)
class PairNorm(nn.Module):
    """`pair_norm` as a layer without parameters. PairNorm (arXiv 1909.12223).

    Args:
        scale, mode, eps: as for `pair_norm`.

    Shape: x (..., n, d) -> the same.

    >>> PairNorm(mode="SI")(torch.randn(4, 3)).shape
    torch.Size([4, 3])
    """

    def __init__(self, scale: float = 1.0, *, mode: Mode = "PN", eps: float = 1e-6) -> None:
        super().__init__()
        self.scale, self.mode, self.eps = scale, mode, eps

    def forward(self, x: Tensor, mask: Tensor | None = None, *, batch: Tensor | None = None) -> Tensor:
        """Normalize x (..., n, d)."""
        return pair_norm(x, self.scale, mode=self.mode, mask=mask, batch=batch, eps=self.eps)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"scale={self.scale}, mode={self.mode}"
