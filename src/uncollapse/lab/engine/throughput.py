"""Throughput of a training, and the share of its time spent waiting for data."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")
RECENT = 20  # steps that count for the current speed


class Throughput:
    """Times the steps of a training since it started or resumed.

    Time between a step and the next fetch, such as an evaluation or a checkpoint, does not count.

    Args:
        unit: What `len` of a batch counts, such as "images"; None counts nothing.
        clock: Returns seconds.
    """

    def __init__(self, unit: str | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.unit, self._clock = unit, clock
        self._steps: deque[tuple[float, int]] = deque(
            maxlen=RECENT
        )  # seconds of a step including its waiting, and its size
        self._begun, self._count, self._waited, self._worked = False, 0, 0.0, 0.0
        self._last, self._mark = 0.0, clock()  # duration and end of the last fetch

    def time_fetch(self, fetch: Callable[[], Value]) -> Value:
        """Return what `fetch` returns; its time counts as waiting for data."""
        began = self._clock()
        fetched = fetch()
        self._mark = self._clock()
        self._last = self._mark - began
        self._waited += self._last
        return fetched

    def end_step(self, group: list[Any]) -> None:
        """Record the end of a step with the batches that were fetched last."""
        worked = self._clock() - self._mark
        size = 0 if self.unit is None else sum(len(batch) for batch in group)
        self._worked, self._count = self._worked + worked, self._count + size
        if self._begun:  # the first step is a warm-up
            self._steps.append((self._last + worked, size))
        self._begun = True

    def current(self) -> dict[str, float]:
        """Return the speed of the last steps, for a progress bar."""
        if self.unit is None or not self._steps:
            return {}
        seconds, size = (sum(values) for values in zip(*self._steps, strict=True))
        return {f"{self.unit}/s": size / max(seconds, 1e-9)}

    def summary(self) -> dict[str, float]:
        """Return the overall speed, and the share of the time spent waiting."""
        seconds = self._waited + self._worked
        if self.unit is None or not self._count or not seconds:
            return {}
        return {f"{self.unit}_per_second": self._count / seconds, "waiting": self._waited / seconds}
