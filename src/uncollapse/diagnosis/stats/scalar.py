"""Gather the mean, standard deviation and quantiles of a stream of numbers."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from uncollapse.diagnosis.result import Summary
from uncollapse.diagnosis.stats.moments import Moments
from uncollapse.diagnosis.stats.reservoir import Reservoir
from uncollapse.diagnosis.stats.streaming import named_state, nested_state
from uncollapse.metrics.bootstrap import Bootstrap, Interval, mean_interval

VALUES = 4096  # numbers sampled for quantiles
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class ScalarStats:
    """Mean, standard deviation and quantiles of a stream of numbers; quantiles are those of a sample of 4,096."""

    def __init__(self, seed: int) -> None:
        self._moments, self._sample = Moments(1), Reservoir(VALUES, 1, seed)
        self._waiting: list[Tensor] = []  # values are added many at a time, which is faster

    def update(self, values: Tensor) -> None:
        """Add values (...)."""
        self._waiting.append(values.detach().reshape(-1, 1))
        if sum(map(len, self._waiting)) >= VALUES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            rows = torch.cat(self._waiting).double().cpu()
            self._moments.update(rows)
            self._sample.update(rows.float())  # tiny numbers may become 0, which would matter for the direction of rows
            self._waiting.clear()

    @property
    def count(self) -> int:
        """The number of values seen."""
        self._flush()
        return self._moments.count

    def merge(self, other: "ScalarStats") -> "ScalarStats":
        """Return the statistics of both streams, as a new object; the seeds must differ, as in `Reservoir`."""
        self._flush()
        other._flush()
        return self._of(self._moments.merge(other._moments), self._sample.merge(other._sample))

    @classmethod
    def _of(cls, moments: Moments, sample: Reservoir) -> Self:
        stats = cls(0)
        stats._moments, stats._sample = moments, sample
        return stats

    def sample(self) -> Tensor:
        """Return the sample (m,) of at most 4,096 values."""
        self._flush()
        return self._sample.rows[:, 0]

    def summary(self) -> Summary:
        """Return the summary that a diagnosis stores."""
        self._flush()
        mean, deviation = float(self._moments.mean()), float(self._moments.variance().sqrt())
        wanted = torch.tensor(QUANTILES, dtype=torch.float64)
        quantiles = torch.quantile(self._sample.rows[:, 0].double(), wanted).tolist()
        return Summary(mean, deviation, tuple(quantiles), self._moments.count)

    def interval(self, most: float, bootstrap: Bootstrap) -> Interval:
        """Return the interval of the mean of numbers from 0 to `most`; the sample gives their distribution."""
        found = self.summary()
        return mean_interval(self._sample.rows[:, 0], found.mean, found.std, found.count, most, bootstrap)

    def state(self) -> dict[str, Tensor | int]:
        """Return a copy of everything, for storage."""
        self._flush()
        return named_state({"moments": self._moments.state(), "sample": self._sample.state()})

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor | int]) -> Self:
        """Return the statistics that `state()` described. ValueError if it is invalid."""
        found = cls._of(
            Moments.from_state(nested_state(state, "moments")), Reservoir.from_state(nested_state(state, "sample"))
        )
        if (found._moments.dim, found._sample.dim) != (1, 1) or found._moments.count != found._sample.count:
            raise ValueError(
                "The moments and the sample must be of the same numbers: this is not a state of ScalarStats."
            )
        return found
