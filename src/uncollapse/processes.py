"""Several processes of `torch.distributed`: who they are, and what one of them does for all."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


class ElsewhereError(RuntimeError):
    """Another process failed, and this one stops with it. The message names that process and its error."""


def count() -> int:
    """How many processes there are; 1 without a launcher."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if count() > 1 else 0


def is_first() -> bool:
    """Whether this process is the one that measures and writes: the first, or the only one."""
    return rank() == 0


def together(work: Callable[[], T], what: str = "The work for all") -> T:
    """What `work` gives in the first process, in all of them; all must call this. An error is raised in all, too."""
    if count() == 1:
        return work()
    told: list[Any] = [None, None]
    problem: Exception | None = None
    if is_first():
        try:
            told[0] = work()
        except Exception as error:  # the others wait: they are told before it goes on
            problem, told[1] = error, f"{type(error).__name__}: {error}"
    distributed.broadcast_object_list(told, src=0)
    if problem is not None:
        raise problem
    if told[1] is not None:
        raise ElsewhereError(f"{what} failed in the first process: {told[1]}")
    result: T = told[0]
    return result


def everywhere(value: T) -> list[T]:
    """What each process gives, in the order of the processes; anything that can be pickled, so small things only."""
    found: list[Any] = [None] * count()
    if len(found) == 1:
        return [value]
    distributed.all_gather_object(found, value)
    return found
