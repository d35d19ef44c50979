"""How sure alignment and uniformity are: bootstrap intervals over rows, and the distance to the optimum in percent."""

import torch
from torch import Tensor

from uncollapse.metrics.bootstrap import Bootstrap, Interval, mean_interval
from uncollapse.metrics.hypersphere import alignment, check_sharpness, uniformity, uniformity_optimum
from uncollapse.pairwise import numerics

TILE = 1024  # rows on a side of the part of all pairs that is there at a time
ROUNDING = 1e-5  # what float32 may leave of 0 in a uniformity, for each unit of t


def alignment_interval(
    x: Tensor, y: Tensor, alpha: float = 2.0, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> Interval:
    """`alignment` of unit rows with its interval: pairs are resampled as pairs.

    Wang & Isola, arXiv 2005.10242; the studentised bootstrap is Efron's. It keeps the level for skewed distances, too,
    unless there are so few pairs that the rare distant ones are missing.

    Args:
        x: rows (n, d). Leave out padding: there is no mask.
        y: their partners (n, d).
        alpha: the exponent, positive.
        level: between 0 and 1.
        draws: how many resamples, at least 1.
        seed: of the resampling; torch's own random state is not touched.

    Returns:
        An Interval of floats. Fewer than two pairs say nothing: its ends are then 0 and 2^alpha, the least and the
        largest value there is. All distances equal give an interval of no width.

    >>> import torch
    >>> x = torch.eye(4).repeat(25, 1)
    >>> y = x + 0.5 * torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    >>> found = alignment_interval(x, y)
    >>> f"{found.value:.2f} from {found.low:.2f} to {found.high:.2f}"
    '0.57 from 0.48 to 0.68'
    """
    asked = Bootstrap(level, draws, seed)
    check_exponent(alpha)
    _check_rows(x, "x")
    value = float(alignment(x, y, alpha))
    unit = numerics.unit_rows(x.detach().double()) - numerics.unit_rows(y.detach().double())
    distances = torch.linalg.vector_norm(unit, dim=-1).pow(alpha).cpu()
    deviation = float(distances.std(correction=0)) if len(x) else 0.0
    return mean_interval(distances, value, deviation, len(x), 2.0**alpha, asked)


def uniformity_interval(
    x: Tensor, t: float = 2.0, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> Interval:
    """`uniformity` of unit rows with its interval: rows are resampled, and never paired with their own copies.

        log Σ_{i≠j} w_i w_j exp(−t‖x_i − x_j‖²) / Σ_{i≠j} w_i w_j,   w_i = how often row i is drawn

    Wang & Isola, arXiv 2005.10242. Copies of one row would count as pairs at distance 0 and move every draw towards
    collapse. The standard error is that of a U-statistic (Hoeffding 1948), with its second term: near the optimum the
    first one vanishes, and there intervals are a little wider than they need be. Time grows with n²·(d + draws), memory
    with n·(d + draws).

    Args:
        x: rows (n, d). Leave out padding: there is no mask.
        t: sharpness of the potential, positive.
        level, draws, seed: as for `alignment_interval`.

    Returns:
        An Interval of floats. Fewer than three rows say nothing: its ends are then −4t and 0, the least and the largest
        value there is. Identical rows give 0 with no width.

    >>> import torch
    >>> found = uniformity_interval(torch.randn(200, 8, generator=torch.Generator().manual_seed(0)))
    >>> f"{found.value:.2f} from {found.low:.2f} to {found.high:.2f}"
    '-3.05 from -3.09 to -3.02'
    """
    asked = Bootstrap(level, draws, seed)
    check_sharpness(t)
    _check_rows(x, "x")
    value, n, bounds = float(uniformity(x.detach(), t)), len(x), (-4.0 * t, 0.0)
    if n < 3:
        return Interval(value, *bounds, level, draws, n)
    weights = torch.cat([torch.ones(1, n, dtype=torch.float64), *map(_counts, asked.chosen(n))]).to(x.device)
    sums, squares, second = _weighted_sums(numerics.unit_rows(x.detach().double()), t, value, weights)
    logs = (sums / (n * n - weights.square().sum(-1))).log()  # relative to the value; NaN for copies of one row
    first = (n * squares / sums.square() - 1).clamp(min=0)
    errors = (4 / n * first + 2 / n**2 * second).sqrt()
    ratios = (logs[1:] - logs[0]) / errors[1:]
    return Interval(value, *asked.ends(value, float(errors[0]), ratios.cpu(), bounds), level, draws, n)


def uniformity_gap(value: float | Tensor, d: int, t: float = 2.0) -> float:
    """How far a uniformity is from the optimum, in percent: 0 = as even as the uniform distribution, 100 = one point.

        100·(u − u*) / (0 − u*),   u* = uniformity_optimum(d, t)

    The optimum depends on the dimension, and so do uniformities; this is how models of different widths are compared.
    Small samples may lie a little below the optimum, so that it is negative.

    Args:
        value: a `uniformity`, at most 0; what rounding leaves above it counts as 0.
        d: dimension of the space, at least 1.
        t: the sharpness that the value was taken with.

    >>> round(uniformity_gap(-3.41, 128), 1)
    13.4
    """
    found, optimum = float(value), uniformity_optimum(d, t)
    if not found <= ROUNDING * (1 + t):
        raise ValueError(f"value is a uniformity, which is at most 0, got {found}.")
    return 100 * (1 - min(found, 0.0) / optimum)


def check_exponent(alpha: float) -> None:
    """Raise unless alpha is a positive number that distances can be raised to."""
    if not 0 < alpha < 100:
        raise ValueError(f"alpha is the exponent of a distance, positive and below 100, got {alpha}.")


def _check_rows(x: Tensor, name: str) -> None:
    if x.dim() != 2:
        raise ValueError(
            f"{name} must have shape (n, d), got {tuple(x.shape)}; make one interval for each set of rows."
        )


def _counts(chosen: Tensor) -> Tensor:
    """How often each of n rows is in a draw (b, n), for the rows of each draw (b, n)."""
    places = chosen + torch.arange(len(chosen))[:, None] * chosen.shape[1]
    return torch.bincount(places.flatten(), minlength=chosen.numel()).view(chosen.shape).double()


def _weighted_sums(unit: Tensor, t: float, value: float, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_i w_i R_i and Σ_i w_i R_i² (b,) with R_i = Σ_{j≠i} w_j G_ij, for weights (b, n); var G / mean².

    G is divided by its mean, exp(value), so that nothing underflows. Pairs are there a tile at a time.
    """
    n, fall = len(unit), -t * unit.square().sum(-1)
    sums, squares, total = weights.new_zeros(len(weights)), weights.new_zeros(len(weights)), weights.new_zeros(2)
    spans = [slice(start, start + TILE) for start in range(0, n, TILE)]
    for rows in spans:
        around = torch.zeros_like(weights[:, rows])
        for others in spans:
            tile = torch.exp(2 * t * unit[others] @ unit[rows].mT + fall[others, None] + fall[rows] - value)
            if rows == others:
                tile.fill_diagonal_(0)
            around.addmm_(weights[:, others], tile)
            total += torch.stack([tile.sum(), tile.square().sum()])
        own = weights[:, rows] * around
        sums += own.sum(-1)
        squares += (own * around).sum(-1)
    mean, square = total / (n * (n - 1))
    return sums, squares, (square / mean.square() - 1).clamp(min=0)
