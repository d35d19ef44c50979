"""Rows that several processes share: sums over all of them, and over all their pairs.

Each process holds some rows of one set. Pairs within a process go through `pairwise`; for the other pairs, a process
gathers the keys of the others, with a gradient, and makes the sums of its own rows. The logits are never held at once.

All processes compute the same value from sums over all rows. The gradient that a process gets for its rows is the true
one times the number of processes: the mean over processes, which DistributedDataParallel takes, is then the gradient
that one process with all rows would have. With one process everything here is the identity, or does nothing.

Passing the keys around a ring of processes in chunks instead was measured with 16,384 rows of 128 features in two
processes: it was 1.01 times as fast and needed 0.96 of the memory, so keys are simply gathered.
"""

from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from uncollapse import distributed, pairwise
from uncollapse.distributed import check_alike as check_alike
from uncollapse.distributed import gather_objects as gather_objects
from uncollapse.pairwise import numerics
from uncollapse.pairwise.grid import Pairs

T = TypeVar("T")


def spans_ranks(gather: bool = True) -> bool:
    """Return whether rows are gathered, and from more than one process."""
    return gather and distributed.world_size() > 1


def check_one_set(x: Tensor, gather: bool, name: str = "x") -> None:
    """Raise if x has batch dimensions and its rows are to be gathered, or if those of other processes differ."""
    if gather:
        check_alike(x)
    if gather and x.dim() != 2:
        raise ValueError(
            f"gather=True joins the rows of one set over all processes, so {name} must have shape (n, d), got "
            f"{tuple(x.shape)}."
        )


def total(x: Tensor, gather: bool = True) -> Tensor:
    """Return the sum over processes of x, which has the same shape in all; x itself if not `gather`."""
    if not spans_ranks(gather):
        return x
    summed: Tensor = _Total.apply(x)  # type: ignore[no-untyped-call]
    return summed


def maximum(x: Tensor, gather: bool = True) -> Tensor:
    """Return the largest value of each entry of x over processes, without a gradient."""
    x = x.detach()
    if spans_ranks(gather):
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def mean(each: Tensor, gather: bool = True) -> Tensor:
    """Return the mean of numbers (...), of all processes if gathered; a process may have none."""
    if not spans_ranks(gather):
        return each.mean()
    summed = total(torch.stack([each.sum(), each.new_tensor(float(each.numel()))]))
    return summed[0] / summed[1].detach().clamp(min=1)


def mean_of_sets(each: Tensor, counts: Tensor, gather: bool = True) -> Tensor:
    """Return the mean of one number per set (...) over the sets that count, those of all processes if gathered.

    counts: (...) bool. Without any set that counts, the mean is 0.
    """
    summed = torch.stack([each.masked_fill(~counts, 0).sum(), counts.sum().to(each.dtype)])
    summed = total(summed, gather)
    return summed[0] / summed[1].detach().clamp(min=1)


def from_first(x: Tensor, gather: bool = True) -> Tensor:
    """Return x of the first process in all of them, which has the same shape there, without a gradient."""
    if spans_ranks(gather):
        x = x.detach().clone()
        dist.broadcast(x, src=0)
    return x


def center(x: Tensor, mask: Tensor | None, gather: bool = True) -> Tensor:
    """Return x (n, d) minus the mean of all real rows, with those of other processes if gathered."""
    if not spans_ranks(gather):
        return numerics.center(x, mask)
    summed, count = total(x.sum(-2, dtype=torch.float64)), total(numerics.real_count(x, mask).double())
    return numerics.subtract_mean(x, (summed / count.clamp(min=1)).to(x.dtype), mask)


def log_total(each: Tensor, gather: bool = True) -> Tensor:
    """Return log Σ exp of numbers (n,), of all processes if gathered; −inf, without a gradient, for none."""
    if not spans_ranks(gather):
        return torch.logsumexp(each, -1)
    here = each.detach().amax() if each.numel() else each.new_full((), -torch.inf)
    peak = maximum(here).clamp(min=torch.finfo(each.dtype).min)  # finite, also if there are no numbers
    summed = total((each - peak).exp().sum())
    return torch.where(summed > 0, summed, 1).log().masked_fill(summed == 0, -torch.inf) + peak


def row_counts(rows: int, device: torch.device) -> list[int]:
    """Return how many rows each process has."""
    found = torch.zeros(distributed.world_size(), dtype=torch.int64, device=device)
    found[distributed.rank()] = rows
    dist.all_reduce(found)
    return list(map(int, found.tolist()))


def total_rows(x: Tensor, gather: bool = True) -> int:
    """Return the number of rows of x (..., n, d), with those of all processes if gathered, which waits for a GPU."""
    rows = x.shape[-2]
    return sum(row_counts(rows, x.device)) if spans_ranks(gather) else rows


def log_add(own: Tensor, others: Tensor) -> Tensor:
    """Return log(e^own + e^others), where both may be −inf."""
    nothing = torch.isneginf(own) & torch.isneginf(others)
    both = torch.logaddexp(own.masked_fill(nothing, 0), others.masked_fill(nothing, 0))
    return both.masked_fill(nothing, -torch.inf)


def other_rows(x: Tensor) -> Tensor:
    """Return the rows of all other processes in rank order: x (n, ...) -> (N − n, ...), with a gradient."""
    found: Tensor = _OtherRows.apply(x, row_counts(len(x), x.device))  # type: ignore[no-untyped-call]
    return found


def log_sum(q: Tensor, k: Tensor, temperature: float | Tensor, bias: Tensor | None = None) -> Tensor:
    """Return log Σ_j exp(q_i·k_j/τ + bias_j) (n,) over the keys of the other processes.

    Args:
        q: queries (n, d) of this process.
        k: keys (m, d) of this process, which the others use.
        temperature: τ.
        bias: log-weights (m,) of the keys of this process.
    """
    weight = None if bias is None else other_rows(bias)
    return pairwise.all_pairs(q, other_rows(k), None, temperature, Pairs(), weight)[1]


def log_sums(q: Tensor, k: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of `log_sum` for q over the others' keys (n,) and for k over the others' queries (m,).

    Each pair of rows is computed once: a process sums the columns of the keys it gathered and returns the sums.
    """
    rows, columns = pairwise.log_sums(q, other_rows(k), temperature, exclude_self=False)
    return rows, reduce(log_add, _return_to_owners(columns, row_counts(len(k), k.device)))


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()  # the sum of what all processes need
        dist.all_reduce(gradient)
        return gradient


class _OtherRows(torch.autograd.Function):
    """Gather the rows of the other processes; backward, each process gets the sum of the gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int]) -> Tensor:
        ctx.counts, ctx.shape = counts, x.shape
        padded = torch.cat([x, x.new_zeros(max(counts) - len(x), *x.shape[1:])])  # all send as many rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        parts = [part[:count] for part, count in zip(parts, counts, strict=True)]
        return torch.cat(_without_own(parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = list(torch.split(gradient, _without_own(ctx.counts)))
        own = gradient.new_zeros(ctx.shape)
        for owner, count in enumerate(ctx.counts):
            part = own if owner == distributed.rank() else parts.pop(0).clone()  # which `reduce` may overwrite
            if count:
                dist.reduce(part, dst=owner)
        return own, None


class _AllToAll(torch.autograd.Function):
    """Row i of x goes to process i, row by row: x (processes, ...) -> what each process sent, of the same shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


def _return_to_owners(numbers: Tensor, counts: list[int]) -> list[Tensor]:
    """Send numbers (N − n,) about rows of other processes to their owners; return those (n,) from each of them."""
    parts = list(torch.split(numbers, _without_own(counts)))
    parts.insert(distributed.rank(), numbers.new_empty(0))
    rows = [pad(part, (0, max(counts) - len(part)), value=-torch.inf) for part in parts]
    received: Tensor = _AllToAll.apply(torch.stack(rows))  # type: ignore[no-untyped-call]
    return [row[: counts[distributed.rank()]] for row in _without_own(list(received))]


def _without_own(values: list[T]) -> list[T]:
    """Return the values of the other processes."""
    own = distributed.rank()
    return [value for rank, value in enumerate(values) if rank != own]
