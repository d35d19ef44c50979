"""Several processes of `torch.distributed`: who they are, and what one of them does for all."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")


class ElsewhereError(RuntimeError):
    """Another process failed, and this one stops with it. The message names that process and its error."""


def is_elsewhere(error: BaseException) -> bool:
    """Whether an error says that another process failed, or that it cannot be talked to any more."""
    if isinstance(error, ElsewhereError):
        return True
    of_talking = isinstance(error, RuntimeError) and "gloo" in str(error)  # gloo has no errors of its own
    return distributed.is_available() and count() > 1 and (of_talking or isinstance(error, distributed.DistError))


@contextmanager
def heeding() -> Iterator[None]:
    """Within, that another process cannot be talked to any more is an ElsewhereError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ElsewhereError) or not is_elsewhere(error):
            raise
        raise ElsewhereError("Another process of this run has stopped, so this one stops as well.") from error


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


def merged(part: Any) -> Any:
    """What `merge` makes of the parts of all processes, in the first one; the others are left with some of it.

    Pairs of processes merge, then pairs of pairs: each sends its part once, and none ever holds more than two.
    """
    step = 1
    while step < count():
        if rank() % (2 * step):
            distributed.send_object_list([part], dst=rank() - step)
            return part
        if rank() + step < count():
            found: list[Any] = [None]
            distributed.recv_object_list(found, src=rank() + step)
            part = part.merge(found[0])
        step *= 2
    return part


def summed(values: Sequence[float]) -> list[float]:
    """The sum of each of some numbers over processes, to the last digit the same in all."""
    if count() == 1:
        return [float(value) for value in values]
    on_gpu = distributed.get_backend() == "nccl"  # which knows no other place
    total = torch.tensor(values, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
    distributed.all_reduce(total)
    return [float(value) for value in total.tolist()]


def all_rows(x: Tensor) -> Tensor:
    """The rows (n, d) of all processes, in their order, without a gradient; the numbers of rows may differ."""
    if count() == 1:
        return x.detach()
    sizes = torch.zeros(count(), dtype=torch.int64, device=x.device)
    sizes[rank()] = len(x)
    distributed.all_reduce(sizes)
    most = int(sizes.max())
    filled = torch.cat([x.detach(), x.new_zeros(most - len(x), *x.shape[1:])])  # all send as many
    parts = [torch.empty_like(filled) for _ in range(count())]
    distributed.all_gather(parts, filled)
    return torch.cat([part[:size] for part, size in zip(parts, sizes.tolist(), strict=True)])
