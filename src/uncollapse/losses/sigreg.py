"""SIGReg, the regularizer of LeJEPA: rows become an isotropic Gaussian (Balestriero & LeCun, arXiv 2511.08544)."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from uncollapse.pairwise import all_ranks
from uncollapse.pairwise.numerics import check_positive, check_rows, prepare, real_count
from uncollapse.registry import loss

PAPER = "LeJEPA: Provable and Scalable Self-Supervised Learning Without the Heuristics, arXiv 2511.08544"


@loss(needs=("tokens",), paper=PAPER)
def sigreg_loss(
    x: Tensor,
    *,
    slices: int = 1024,
    points: int = 17,
    t_max: float = 3.0,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    gather: bool = False,
) -> Tensor:
    """Test random projections of the rows for a standard Gaussian (sketched isotropic Gaussian regularization).

        mean over directions a of  n ∫ |φ(t) − e^{−t²/2}|² e^{−t²/2} dt,   φ(t) = (1/n) Σ_j e^{i t a·x_j}

    LeJEPA, arXiv 2511.08544: the Epps–Pulley statistic of each projection, with the trapezoidal rule. The authors' code
    integrates from 0 to 3 and doubles, the default here; `t_max=5, points=9` is the paper's rule of 17 points from −5
    to 5. It fixes mean, scale and shape; `variance_loss` and `covariance_loss` fix the second moments only. Its
    gradient vanishes for collapsed rows, that of `visreg_loss` does not. Time and memory are O(n·slices).

    Args:
        x: rows (..., n, d), not normalized; each set of n rows is tested alone.
        slices: number of random directions, drawn anew in every call.
        points: number of points t in [0, t_max].
        t_max: end of the integral, positive.
        mask: (..., n) bool, True = real. Masked rows may hold anything and have no influence.
        generator: where directions are drawn from, instead of torch's default generator.
        gather: take the rows of all processes as one batch, see `pairwise.all_ranks`. Every process gets the value of
            all rows, with the directions of the first; gradients are correct after DistributedDataParallel has averaged
            them over processes. Rows (n, d) of all processes are one set; each set of (..., n, d) stays in its process.

    Returns:
        A scalar, the mean over directions and sets with a real row, in float32 (float64 for float64 inputs); 0 if there
        are none. For n zero rows it is n times 0.402, with a gradient of zero.

    >>> import torch
    >>> sigreg_loss(torch.zeros(10, 4))
    tensor(4.0205)
    """
    check_positive(slices, "slices")
    if not (points > 1 and t_max > 0):
        raise ValueError(f"points must be at least 2 and t_max positive, got {points} and {t_max}.")
    check_rows(x, mask, gather=gather)
    h = prepare(x, mask)
    across = h.dim() == 2 and all_ranks.spans_ranks(gather)
    count = all_ranks.total(real_count(h, mask), across)
    with torch.autocast(x.device.type, enabled=False):
        projected = h @ random_directions(h, slices, generator, gather)  # (..., n, slices)
    real = None if mask is None else mask.expand(h.shape[:-1])[..., None]
    t = torch.linspace(0, t_max, points, dtype=h.dtype, device=h.device)
    waves = torch.stack([_wave_sums(projected, each, real) for each in t])  # (points, 2, ..., slices)
    cosine, sine = (all_ranks.total(waves, across) / count.clamp(min=1)[..., None]).unbind(1)
    gaussian = (-t.square() / 2).exp().view(-1, *[1] * (cosine.dim() - 1))
    distance = ((cosine - gaussian).square() + sine.square()) * gaussian
    each = 2 * torch.trapezoid(distance, t, dim=0).mean(-1) * count
    return all_ranks.mean_of_sets(each, count > 0, gather and not across)


def random_directions(x: Tensor, slices: int, generator: torch.Generator | None, gather: bool) -> Tensor:
    """Return random unit columns (d, slices) for rows (..., n, d), those of the first process if gathered."""
    device = x.device if generator is None else generator.device
    drawn = torch.randn(x.shape[-1], slices, device=device, generator=generator).to(x)
    drawn = all_ranks.from_first(drawn, gather)
    unit: Tensor = drawn / torch.linalg.vector_norm(drawn, dim=0)
    return unit


def _wave_sums(projected: Tensor, t: Tensor, real: Tensor | None) -> Tensor:
    """Return Σ_j cos(t p_j) and Σ_j sin(t p_j) (2, ..., slices); backward recomputes the waves."""

    def sums() -> Tensor:
        angle = projected * t
        waves = torch.stack([angle.cos(), angle.sin()])
        return (waves if real is None else waves.masked_fill(~real, 0)).sum(-2)

    summed: Tensor = checkpoint(sums, use_reentrant=False, preserve_rng_state=False)
    return summed
