"""How fast a training goes, and how much of its time it waits for data."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")
RECENT = 20  # steps that the speed of the moment is taken over


class Throughput:
    """A clock for the steps of a training, from when it begins or goes on.

    What comes between a step and the next fetch, such as an evaluation or a checkpoint, counts nowhere.

    Args:
        unit: what `len` of a batch counts, such as "images"; None counts nothing.
        clock: gives seconds.
    """

    def __init__(self, unit: str | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.unit, self._clock = unit, clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=RECENT)  # seconds of a step, its waiting too, and its size
        self._begun, self._count, self._waited, self._worked = False, 0, 0.0, 0.0
        self._last, self._mark = 0.0, clock()  # how long the last fetch took, and when it was over

    def waited(self, fetch: Callable[[], Value]) -> Value:
        """What `fetch` gives; the time that it takes is that of waiting for data."""
        began = self._clock()
        fetched = fetch()
        self._mark = self._clock()
        self._last = self._mark - began
        self._waited += self._last
        return fetched

    def did(self, group: list[Any]) -> None:
        """A step is done with the batches that were fetched last."""
        worked = self._clock() - self._mark
        size = 0 if self.unit is None else sum(len(batch) for batch in group)
        self._worked, self._count = self._worked + worked, self._count + size
        if self._begun:  # the first step warms up: it says nothing of those that follow
            self._steps.append((self._last + worked, size))
        self._begun = True

    def now(self) -> dict[str, float]:
        """The speed of the last steps, for a progress bar."""
        if self.unit is None or not self._steps:
            return {}
        seconds, size = (sum(values) for values in zip(*self._steps, strict=True))
        return {f"{self.unit}/s": size / max(seconds, 1e-9)}

    def figures(self) -> dict[str, float]:
        """Speed in all, and the share of the time that was spent waiting."""
        seconds = self._waited + self._worked
        if self.unit is None or not self._count or not seconds:
            return {}
        return {f"{self.unit}_per_second": self._count / seconds, "waiting": self._waited / seconds}
