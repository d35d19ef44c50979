"""Intervals by resampling: how far a value would have been off with other rows from the same source."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from uncollapse.metrics.hypersphere import alignment, check_sharpness, uniformity
from uncollapse.pairwise import numerics
from uncollapse.pairwise.numerics import check_positive

BLOCK = 1 << 22  # rows that are drawn at a time


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its interval.

    level: how often such intervals hold the true value. draws: resamples behind them. rows: rows or pairs behind the
    value.
    """

    value: float
    low: float
    high: float
    level: float
    draws: int
    rows: int


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made: by resampling rows with replacement, `draws` times.

    The ends come from the studentised bootstrap: each draw's deviation is divided by its own standard error. Plain
    quantiles of the draws are too narrow for few pairs and far too wide for embeddings that are near uniform.
    """

    level: float = 0.95
    draws: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise ValueError(f"level is a share between 0 and 1, such as 0.95, got {self.level}.")
        check_positive(self.draws, "draws")

    def chosen(self, n: int) -> Iterator[Tensor]:
        """Blocks (b, n) of the rows in each draw, out of n; b adds up to `draws`."""
        generator = torch.Generator().manual_seed(self.seed)  # the caller's random state stays as it is
        size = max(1, BLOCK // n)
        for start in range(0, self.draws, size):
            yield torch.randint(n, (min(size, self.draws - start), n), generator=generator)

    def ends(self, value: float, error: float, ratios: Tensor, bounds: tuple[float, float]) -> tuple[float, float]:
        """The interval around a value of this standard error; `ratios` are deviations over standard errors of draws.

        Draws without a ratio (NaN) are left out. Infinite ones, of too few different rows, lead to the bounds.
        """
        ratios = ratios[~ratios.isnan()]
        if error == 0 or len(ratios) == 0:
            return (value, value) if error == 0 else bounds
        tail = (1 - self.level) / 2
        most = float(torch.quantile(ratios, 1 - tail, interpolation="higher"))
        least = float(torch.quantile(ratios, tail, interpolation="lower"))
        low, high = max(bounds[0], value - error * most), min(bounds[1], value - error * least)
        return min(low, value), max(high, value)


def mean_interval(sample: Tensor, mean: float, deviation: float, count: int, most: float, asked: Bootstrap) -> Interval:
    """The interval of a mean over `count` numbers from 0 to `most`, of which `sample` (m,) holds all or some.

    Mean and deviation are those of all numbers; the sample says how far from normal they are.
    """
    if count < 2:
        return Interval(mean, 0.0, most, asked.level, asked.draws, count)
    around = numerics.center(sample.double()[:, None], None)[:, 0]  # exactly 0 if all numbers are the same
    ratios = []
    for chosen in asked.chosen(len(around)):
        drawn = around[chosen]
        ratios.append(drawn.mean(-1) / drawn.std(-1, correction=0) * math.sqrt(len(around)))
    error = deviation / math.sqrt(count) if bool(around.any()) else 0.0
    ends = asked.ends(mean, error, torch.cat(ratios), (0.0, most))
    return Interval(mean, *ends, asked.level, asked.draws, count)


TILE = 1024  # rows on a side of the part of all pairs that is there at a time
# what float32 may leave of 0 in a uniformity, for each unit of t


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
