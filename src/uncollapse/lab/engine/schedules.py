"""Learning rate schedules: functions from a step, counted from 0, to the factor of the learning rate.

A warm-up rises linearly from 0 to 1. Step 0 has the factor of the end of the first step, so that no step is lost; the
last step has the last factor of the decay.
"""

import bisect
import math
from collections.abc import Callable, Sequence

from uncollapse.errors import UsageError

Schedule = Callable[[int], float]


def cosine(total: int, warmup: float = 0.0, floor: float = 0.0) -> Schedule:
    """Return a linear warm-up, then half a cosine down to `floor`, where it stays (https://arxiv.org/abs/1608.03983).

    Args:
        total: Number of steps.
        warmup: Share of the steps in which it rises, from 0 to less than 1.
        floor: Last factor, between 0 and 1.

    Example:
        >>> [round(factor, 3) for factor in map(cosine(8, warmup=0.25), range(8))]
        [0.5, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067, 0.0]
    """
    _check(total, warmup)
    if not 0 <= floor <= 1:
        raise UsageError(f"floor must be a factor between 0 and 1, got {floor}.")

    def factor(step: int) -> float:
        share = (step + 1) / total
        if share < warmup:
            return share / warmup
        return floor + (1 - floor) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, (share - warmup) / (1 - warmup))))

    return factor


def epoch_cosine(epochs: int, steps: int) -> Schedule:
    """Return half a cosine that falls after each epoch, from 1 in the first one (MoCo, https://arxiv.org/abs/1911.05722).

    Args:
        epochs: Number of epochs; the factor of the last is that of (epochs − 1) / epochs, not 0.
        steps: Steps per epoch.

    Example:
        >>> [round(factor, 3) for factor in map(epoch_cosine(3, steps=2), range(6))]
        [1.0, 1.0, 0.75, 0.75, 0.25, 0.25]
    """
    _check(epochs * steps, 0.0)
    return lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step // steps / epochs))


def linear(total: int, warmup: float = 0.0, *, at_start: bool = False) -> Schedule:
    """Return a linear warm-up, then a linear decay to 0.

    Args:
        total: Number of steps.
        warmup: Share of the steps in which it rises, from 0 to less than 1.
        at_start: Whether a step has the factor of its start, as in transformers, instead of that of its end: without
            warm-up the first step has 1 and the last 1/total.

    Example:
        >>> [round(factor, 3) for factor in map(linear(8, warmup=0.25), range(8))]
        [0.5, 1.0, 0.833, 0.667, 0.5, 0.333, 0.167, 0.0]
        >>> list(map(linear(4, at_start=True), range(4)))
        [1.0, 0.75, 0.5, 0.25]
    """
    _check(total, warmup)

    def factor(step: int) -> float:
        share = (step if at_start else step + 1) / total
        return share / warmup if share < warmup else max(0.0, 1 - share) / (1 - warmup)

    return factor


def steps(milestones: Sequence[int], factor: float) -> Schedule:
    """Return 1, multiplied by `factor` at each of the milestones.

    Example:
        >>> list(map(steps((2, 4), 0.5), range(6)))
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    if not 0 <= factor < math.inf:
        raise UsageError(f"factor must be a finite number from 0 on, got {factor}.")
    ordered = sorted(milestones)
    return lambda step: float(factor ** bisect.bisect_right(ordered, step))


def _check(total: int, warmup: float) -> None:
    if total < 1:
        raise UsageError(f"A schedule needs at least 1 step, got {total}.")
    if not 0 <= warmup < 1:
        raise UsageError(f"warmup is a share of the steps, from 0 to less than 1, got {warmup}.")
