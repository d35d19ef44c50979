"""Bootstrap intervals: how much a value would vary with other rows from the same source."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from uncollapse.metrics.hypersphere import alignment, uniformity
from uncollapse.pairwise import numerics
from uncollapse.pairwise.numerics import check_positive

BLOCK = 1 << 22  # row indices that are drawn at once
TILE = 1024  # rows on each side of a tile of pairs


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its confidence interval.

    level: how often such intervals contain the true value. draws: number of resamples. rows: number of rows or pairs.
    """

    value: float
    low: float
    high: float
    level: float
    draws: int
    rows: int


@dataclass(frozen=True)
class Bootstrap:
    """Settings of the studentized bootstrap: rows are resampled with replacement, `draws` times.

    The deviation of each draw is divided by its own standard error. Plain quantiles of the draws are too narrow for few
    pairs and far too wide for embeddings that are almost uniform.
    """

    level: float = 0.95
    draws: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise ValueError(f"level must be between 0 and 1, such as 0.95, got {self.level}.")
        check_positive(self.draws, "draws")
        least = math.ceil(2 / (1 - self.level) - 1e-6)  # one draw in each tail; with fewer, intervals are too short
        if self.draws < least:
            raise ValueError(f"draws must be at least {least:,} for intervals of level {self.level}, got {self.draws}.")

    def draw_rows(self, n: int) -> Iterator[Tensor]:
        """Yield blocks (b, n) of row indices, one line per draw; the b add up to `draws`."""
        generator = torch.Generator().manual_seed(self.seed)  # the caller's random state stays as it is
        size = max(1, BLOCK // n)
        for start in range(0, self.draws, size):
            yield torch.randint(n, (min(size, self.draws - start), n), generator=generator)

    def ends(self, value: float, error: float, ratios: Tensor, bounds: tuple[float, float]) -> tuple[float, float]:
        """Return the ends of the interval around a value.

        Args:
            value: the value of all rows.
            error: its standard error.
            ratios: deviation over standard error of each draw. NaN is ignored; infinite ratios, which come from too few
                different rows, lead to the bounds.
            bounds: smallest and largest possible value.
        """
        ratios = ratios[~ratios.isnan()]
        if error == 0 or len(ratios) == 0:
            return (value, value) if error == 0 else bounds
        tail = (1 - self.level) / 2
        most = float(torch.quantile(ratios, 1 - tail, interpolation="higher"))
        least = float(torch.quantile(ratios, tail, interpolation="lower"))
        low, high = max(bounds[0], value - error * most), min(bounds[1], value - error * least)
        return min(low, value), max(high, value)


def mean_interval(
    sample: Tensor, mean: float, deviation: float, count: int, most: float, bootstrap: Bootstrap
) -> Interval:
    """Return the interval of a mean over `count` numbers from 0 to `most`.

    `sample` (m,) holds all or some of the numbers, and shows how far from normal they are; `mean` and `deviation` are
    those of all numbers.
    """
    if count < 2:
        return Interval(mean, 0.0, most, bootstrap.level, bootstrap.draws, count)
    around = numerics.center(sample.double()[:, None], None)[:, 0]  # exactly 0 if all numbers are equal
    ratios = []
    for rows in bootstrap.draw_rows(len(around)):
        drawn = around[rows]
        ratios.append(drawn.mean(-1) / drawn.std(-1, correction=0) * math.sqrt(len(around)))
    error = deviation / math.sqrt(count) if bool(around.any()) else 0.0
    ends = bootstrap.ends(mean, error, torch.cat(ratios), (0.0, most))
    return Interval(mean, *ends, bootstrap.level, bootstrap.draws, count)


def alignment_interval(
    x: Tensor, y: Tensor, alpha: float = 2.0, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> Interval:
    """Return the `alignment` of unit rows with its interval; pairs are resampled as pairs.

    Wang & Isola, arXiv 2005.10242; the studentized bootstrap is Efron's. It keeps its level for skewed distances too,
    unless there are so few pairs that the rare distant ones are missing.

    Args:
        x: rows (n, d), without padding: there is no mask.
        y: their partners (n, d).
        alpha: the exponent, positive.
        level: confidence level, between 0 and 1.
        draws: number of resamples, at least 2/(1 − level).
        seed: seed of the resampling; torch's global random state is not used.

    Returns:
        An Interval of floats. With fewer than two pairs its ends are 0 and 2^alpha, the smallest and largest possible
        value. If all distances are equal, the interval has no width.

    >>> import torch
    >>> x = torch.eye(4).repeat(25, 1)
    >>> y = x + 0.5 * torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    >>> found = alignment_interval(x, y)
    >>> f"{found.value:.2f} from {found.low:.2f} to {found.high:.2f}"
    '0.57 from 0.48 to 0.68'
    """
    bootstrap = Bootstrap(level, draws, seed)
    check_exponent(alpha)
    _check_rows(x, "x")
    value = float(alignment(x, y, alpha))
    unit = numerics.unit_rows(x.detach().double()) - numerics.unit_rows(y.detach().double())
    distances = torch.linalg.vector_norm(unit, dim=-1).pow(alpha).cpu()
    deviation = float(distances.std(correction=0)) if len(x) else 0.0
    return mean_interval(distances, value, deviation, len(x), 2.0**alpha, bootstrap)


def uniformity_interval(
    x: Tensor, t: float = 2.0, *, level: float = 0.95, draws: int = 1000, seed: int = 0
) -> Interval:
    """Return the `uniformity` of unit rows with its interval; rows are resampled, and not paired with their own copies.

        log Σ_{i≠j} w_i w_j exp(−t‖x_i − x_j‖²) / Σ_{i≠j} w_i w_j,   w_i = how often row i is drawn

    Wang & Isola, arXiv 2005.10242. Copies of one row would count as pairs at distance 0 and move every draw towards
    collapse. The standard error is that of a U-statistic (Hoeffding 1948) with its second term. Near the optimum the
    first term vanishes, and intervals are slightly wider than necessary. Time grows with n²·(d + draws), memory with
    n·(d + draws).

    Args:
        x: rows (n, d), without padding: there is no mask.
        t: sharpness of the potential, positive.
        level, draws, seed: as for `alignment_interval`.

    Returns:
        An Interval of floats. With fewer than three rows its ends are −4t and 0, the smallest and largest possible
        value. Identical rows give 0 with no width.

    >>> import torch
    >>> found = uniformity_interval(torch.randn(200, 8, generator=torch.Generator().manual_seed(0)))
    >>> f"{found.value:.2f} from {found.low:.2f} to {found.high:.2f}"
    '-3.05 from -3.09 to -3.02'
    """
    bootstrap = Bootstrap(level, draws, seed)
    numerics.check_positive_number(t, "t")
    _check_rows(x, "x")
    value, n, bounds = float(uniformity(x.detach(), t)), len(x), (-4.0 * t, 0.0)
    if n < 3:
        return Interval(value, *bounds, level, draws, n)
    weights = torch.cat([torch.ones(1, n, dtype=torch.float64), *map(_counts, bootstrap.draw_rows(n))]).to(x.device)
    sums, squares, second = _weighted_sums(numerics.unit_rows(x.detach().double()), t, value, weights)
    logs = (sums / (n * n - weights.square().sum(-1))).log()  # relative to the value; NaN for copies of one row
    first = (n * squares / sums.square() - 1).clamp(min=0)
    errors = (4 / n * first + 2 / n**2 * second).sqrt()
    ratios = (logs[1:] - logs[0]) / errors[1:]
    return Interval(value, *bootstrap.ends(value, float(errors[0]), ratios.cpu(), bounds), level, draws, n)


def check_exponent(alpha: float) -> None:
    """Raise unless alpha is positive and below 100."""
    if not 0 < alpha < 100:
        raise ValueError(f"alpha, the exponent of a distance, must be positive and below 100, got {alpha}.")


def _check_rows(x: Tensor, name: str) -> None:
    numerics.check_float(x, name)
    if x.dim() != 2:
        raise ValueError(f"{name} must have shape (n, d), got {tuple(x.shape)}; compute one interval per set of rows.")


def _counts(chosen: Tensor) -> Tensor:
    """Return how often each of n rows occurs in each draw (b, n), for the rows of each draw (b, n)."""
    places = chosen + torch.arange(len(chosen))[:, None] * chosen.shape[1]
    return torch.bincount(places.flatten(), minlength=chosen.numel()).view(chosen.shape).double()


def _weighted_sums(unit: Tensor, t: float, value: float, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ_i w_i R_i and Σ_i w_i R_i² (b,) with R_i = Σ_{j≠i} w_j G_ij, for weights (b, n), and var G / mean².

    G is divided by its mean, exp(value), so that nothing underflows. Pairs are computed one tile at a time.
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
