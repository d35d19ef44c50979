"""Intervals by resampling: how far a value would have been off with other rows from the same source."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
    around = numerics.centred(sample.double()[:, None], None)[:, 0]  # exactly 0 if all numbers are the same
    ratios = []
    for chosen in asked.chosen(len(around)):
        drawn = around[chosen]
        ratios.append(drawn.mean(-1) / drawn.std(-1, correction=0) * math.sqrt(len(around)))
    error = deviation / math.sqrt(count) if bool(around.any()) else 0.0
    ends = asked.ends(mean, error, torch.cat(ratios), (0.0, most))
    return Interval(mean, *ends, asked.level, asked.draws, count)
