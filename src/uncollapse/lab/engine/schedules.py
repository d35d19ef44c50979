"""How the learning rate goes up and down: functions from a step, counted from 0, to the factor of the learning rate.

Those with a warm-up rise in a line from nothing to 1. Step 0 is the end of the first step on that line, not its start,
so that no step is lost; and the last step is the end of the way down.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence

from uncollapse.errors import UsageError, did_you_mean

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """1 at every step."""
    return lambda step: 1.0


def cosine(total: int, warmup: float = 0.0, floor: float = 0.0) -> Schedule:
    """A line upwards, then half a cosine down to `floor`, where it stays (https://arxiv.org/abs/1608.03983).

    Args:
        total: number of steps.
        warmup: share of the steps in which it rises, from 0 to less than 1.
        floor: the last factor, between 0 and 1.

    Example:
        >>> [round(factor, 3) for factor in map(cosine(8, warmup=0.25), range(8))]
        [0.5, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067, 0.0]
    """
    _check(total, warmup)
    if not 0 <= floor <= 1:
        raise UsageError(f"floor is a factor between 0 and 1, got {floor}.")

    def factor(step: int) -> float:
        share = (step + 1) / total
        if share < warmup:
            return share / warmup
        return floor + (1 - floor) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, (share - warmup) / (1 - warmup))))

    return factor


def linear(total: int, warmup: float = 0.0) -> Schedule:
    """A line upwards, then a line down to 0.

    Args:
        total: number of steps.
        warmup: share of the steps in which it rises, from 0 to less than 1.

    Example:
        >>> [round(factor, 3) for factor in map(linear(8, warmup=0.25), range(8))]
        [0.5, 1.0, 0.833, 0.667, 0.5, 0.333, 0.167, 0.0]
    """
    _check(total, warmup)

    def factor(step: int) -> float:
        share = (step + 1) / total
        return share / warmup if share < warmup else max(0.0, 1 - share) / (1 - warmup)

    return factor


def steps(milestones: Sequence[int], factor: float) -> Schedule:
    """1, multiplied by `factor` when each of the milestones is reached.

    Example:
        >>> list(map(steps((2, 4), 0.5), range(6)))
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    if not 0 <= factor < math.inf:
        raise UsageError(f"factor is a number from 0 upwards, got {factor}.")
    ordered = sorted(milestones)
    return lambda step: float(factor ** bisect.bisect_right(ordered, step))


def inverse_sqrt(warmup: int) -> Schedule:
    """A line upwards over `warmup` steps, then √(warmup / t) at the t-th step (https://arxiv.org/abs/1706.03762).

    Example:
        >>> [round(factor, 3) for factor in map(inverse_sqrt(2), range(8))]
        [0.5, 1.0, 0.816, 0.707, 0.632, 0.577, 0.535, 0.5]
    """
    if warmup < 1:
        raise UsageError(f"warmup is a number of steps, 1 or more, got {warmup}.")
    return lambda step: min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def schedule(name: str, total: int, warmup: float = 0.0) -> Schedule:
    """A schedule by name, for a number of steps.

    Args:
        name: of `SCHEDULES`. "steps" divides by ten after half and after three quarters of the steps.
        total: number of steps.
        warmup: share of the steps in which it rises, from 0 to less than 1. "constant" and "steps" have none.
    """
    if name not in SCHEDULES:
        hint = did_you_mean(name, SCHEDULES)
        raise UsageError(f"No schedule is named {name!r}.{hint} There are: {', '.join(SCHEDULES)}.")
    _check(total, warmup)
    return SCHEDULES[name](total, warmup)


def _check(total: int, warmup: float) -> None:
    if total < 1:
        raise UsageError(f"A schedule has 1 step or more, got {total}.")
    if not 0 <= warmup < 1:
        raise UsageError(f"warmup is a share of the steps, from 0 to less than 1, got {warmup}.")


def _constant(total: int, warmup: float) -> Schedule:
    _check_none("constant", warmup)
    return constant()


def _steps(total: int, warmup: float) -> Schedule:
    _check_none("steps", warmup)
    return steps((math.ceil(total / 2), math.ceil(total * 3 / 4)), 0.1)


def _check_none(name: str, warmup: float) -> None:
    if warmup:
        raise UsageError(f"The schedule {name!r} has no warm-up, got a share of {warmup}: leave it at 0.")


def _inverse_sqrt(total: int, warmup: float) -> Schedule:
    return inverse_sqrt(max(1, round(warmup * total)))


SCHEDULES: Mapping[str, Callable[[int, float], Schedule]] = {
    "constant": _constant,
    "cosine": cosine,
    "linear": linear,
    "steps": _steps,
    "inverse_sqrt": _inverse_sqrt,
}
