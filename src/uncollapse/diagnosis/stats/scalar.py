"""Mean, deviation and quantiles of a stream of numbers."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from uncollapse.diagnosis.result import Summary
from uncollapse.diagnosis.stats.moments import Moments
from uncollapse.diagnosis.stats.reservoir import Reservoir
from uncollapse.diagnosis.stats.streaming import named_state, nested_state
from uncollapse.metrics.bootstrap import Bootstrap, Interval, mean_interval

VALUES = 4096  # numbers kept for quantiles
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class ScalarStats:
    """Mean, deviation and quantiles of a stream of numbers; quantiles come from a uniform sample of 4,096."""

    def __init__(self, seed: int) -> None:
        self._moments, self._sample = Moments(1), Reservoir(VALUES, 1, seed)
        self._waiting: list[Tensor] = []  # a few values at a time are not worth the work of adding them

    def update(self, values: Tensor) -> None:
        """Add values (...)."""
        self._waiting.append(values.detach().reshape(-1, 1))
        if sum(map(len, self._waiting)) >= VALUES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            rows = torch.cat(self._waiting).double().cpu()
            self._moments.update(rows)
            self._sample.update(rows)
            self._waiting.clear()

    @property
    def count(self) -> int:
        """How many numbers there were."""
        self._flush()
        return self._moments.count

    def merge(self, other: "ScalarStats") -> "ScalarStats":
        """Both streams together, as a new object; parts need different seeds, as those of `Reservoir` do."""
        self._flush()
        other._flush()
        return self._of(self._moments.merge(other._moments), self._sample.merge(other._sample))

    @classmethod
    def _of(cls, moments: Moments, sample: Reservoir) -> Self:
        spread = cls(0)
        spread._moments, spread._sample = moments, sample
        return spread

    def summary(self) -> Summary:
        """What a diagnosis stores."""
        self._flush()
        mean, deviation = float(self._moments.mean()), float(self._moments.variance().sqrt())
        wanted = torch.tensor(QUANTILES, dtype=torch.float64)
        quantiles = torch.quantile(self._sample.rows[:, 0].double(), wanted).tolist()
        return Summary(mean, deviation, tuple(quantiles), self._moments.count)

    def interval(self, most: float, asked: Bootstrap) -> Interval:
        """The interval of the mean of numbers from 0 to `most`; every number counts, the sample tells their shape."""
        found = self.summary()
        return mean_interval(self._sample.rows[:, 0], found.mean, found.std, found.count, most, asked)

    def state(self) -> dict[str, Tensor | int]:
        """A copy of everything, for storage."""
        self._flush()
        return named_state({"moments": self._moments.state(), "sample": self._sample.state()})

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor | int]) -> Self:
        """The spread that `state()` described. ValueError if it is invalid."""
        found = cls._of(
            Moments.from_state(nested_state(state, "moments")), Reservoir.from_state(nested_state(state, "sample"))
        )
        if (found._moments.dim, found._sample.dim) != (1, 1) or found._moments.count != found._sample.count:
            raise ValueError("The moments and the sample of a spread are of the same numbers: this is no state of one.")
        return found
