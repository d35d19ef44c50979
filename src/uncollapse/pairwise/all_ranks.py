"""Rows that are spread over processes: sums over all of them, and over all their pairs.

Each process holds some rows of one set. Pairs within a process go through `pairwise`; for the others, keys travel
around the ring of processes, a chunk at a time, so that no process ever holds all rows, nor all similarities. What
belongs to a chunk and is summed on its way, such as its gradient, travels with it and comes home in the end.

All processes compute the same value from sums over all. The gradient that a process gets for its rows is the true one
times the number of processes: the mean over processes, which DistributedDataParallel takes, is then the gradient that
one process with all rows would have. With one process everything here is the identity, or nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from uncollapse import distributed as processes
from uncollapse.distributed import gather_objects as gather_objects
from uncollapse.pairwise import apply_temperature, both_ways, numerics, walk
from uncollapse.pairwise.grid import PLAIN, Pairs

CHUNK = 4096  # rows that travel together
FIXED, CARRIED = 0, 16  # tags from which the two kinds of messages count: both may be under way at a time


def spans_ranks(gather: bool = True) -> bool:
    """Return whether rows are gathered, and from more than one process."""
    return gather and processes.world_size() > 1


def check_one_set(x: Tensor, gather: bool, name: str = "x") -> None:
    """Raise if rows are to be gathered that are not those of one set."""
    if gather and x.dim() != 2:
        raise ValueError(
            f"gather=True joins the rows of one set that is spread over processes: {name} must have shape (n, d), got "
            f"{tuple(x.shape)}."
        )


def total(x: Tensor, gather: bool = True) -> Tensor:
    """The sum of x over processes, of one shape in all. Its gradient is as the module says. Not `gather`: x itself."""
    if not spans_ranks(gather):
        return x
    summed: Tensor = _Total.apply(x)  # type: ignore[no-untyped-call]
    return summed


def maximum(x: Tensor, gather: bool = True) -> Tensor:
    """The largest of each entry of x over processes, without a gradient."""
    x = x.detach()
    if spans_ranks(gather):
        x = x.clone()
        distributed.all_reduce(x, distributed.ReduceOp.MAX)
    return x


def mean(each: Tensor, gather: bool = True) -> Tensor:
    """The mean of numbers (...), those of all processes if they are gathered; one process may have none."""
    if not spans_ranks(gather):
        return each.mean()
    summed = total(torch.stack([each.sum(), each.new_tensor(float(each.numel()))]))
    return summed[0] / summed[1].detach().clamp(min=1)


def center(x: Tensor, mask: Tensor | None, gather: bool = True) -> Tensor:
    """`inputs.centred`: x (n, d) minus the mean of all real rows, those of other processes too if they are gathered."""
    if not spans_ranks(gather):
        return numerics.center(x, mask)
    summed, count = total(x.sum(-2, dtype=torch.float64)), total(numerics.real_count(x, mask).double())
    return numerics.subtract_mean(x, (summed / count.clamp(min=1)).to(x.dtype), mask)


def log_total(each: Tensor, gather: bool = True) -> Tensor:
    """log Σ exp of numbers (n,), those of all processes if they are gathered; −inf, without a gradient, for none."""
    if not spans_ranks(gather):
        return torch.logsumexp(each, -1)
    here = each.detach().amax() if each.numel() else each.new_full((), -torch.inf)
    peak = maximum(here).clamp(min=torch.finfo(each.dtype).min)  # finite, also where nothing is there
    summed = total((each - peak).exp().sum())
    return torch.where(summed > 0, summed, 1).log().masked_fill(summed == 0, -torch.inf) + peak


def row_counts(rows: int, device: torch.device) -> list[int]:
    """How many rows each process has."""
    found = torch.zeros(processes.world_size(), dtype=torch.int64, device=device)
    found[processes.rank()] = rows
    distributed.all_reduce(found)
    return list(map(int, found.tolist()))


def total_rows(x: Tensor, gather: bool = True) -> int:
    """How many rows x (..., n, d) has, with those of all processes if they are gathered: this waits for a GPU."""
    rows = x.shape[-2]
    return rows if not spans_ranks(gather) else sum(row_counts(rows, x.device))


def log_add(own: Tensor, others: Tensor) -> Tensor:
    """log(e^own + e^others), where both may be −inf."""
    nothing = torch.isneginf(own) & torch.isneginf(others)
    both = torch.logaddexp(own.masked_fill(nothing, 0), others.masked_fill(nothing, 0))
    return both.masked_fill(nothing, -torch.inf)


def log_sum(q: Tensor, k: Tensor, temperature: float | Tensor, bias: Tensor | None = None) -> Tensor:
    """(n,): log Σ_j exp(q_i·k_j/τ + bias_j) over the keys of the other processes, for q (n, d), k (m, d), bias (m,)."""
    q, k, tau = apply_temperature(q, k, temperature)
    found: Tensor = _OthersLogSum.apply(q, k, bias, tau)  # type: ignore[no-untyped-call]
    return found


def log_sums(q: Tensor, k: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """(n,) and (m,): q over the keys of the other processes, and k over the queries of the other processes."""
    q, k, tau = apply_temperature(q, k, temperature)
    found: tuple[Tensor, Tensor] = _OthersLogSums.apply(q, k, tau)  # type: ignore[no-untyped-call]
    return found


def peer_chunks(fixed: Sequence[Tensor], carried: Sequence[Tensor] = ()) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The rows of the other processes, a chunk at a time, with what is carried along for them.

    fixed, carried: what this process has for its rows, tensors (rows, ...). The one who gets a chunk changes the
    carried tensors in place; in the end `carried` holds what all others made of it. All processes walk together.
    """
    count, me = processes.world_size(), processes.rank()
    sizes = row_counts(len(fixed[0]), fixed[0].device)
    for start in range(0, max(sizes), CHUNK):
        rows = [min(CHUNK, max(0, size - start)) for size in sizes]
        here = slice(start, start + rows[me])
        load = [tensor[here] for tensor in carried]
        coming = _Transit([tensor[here] for tensor in fixed], rows[(me - 1) % count], FIXED)
        for hop in range(1, count):
            owner = (me - hop) % count
            held = coming.wait()
            if hop < count - 1:  # they go on while they are worked on here
                coming = _Transit(held, rows[(owner - 1) % count], FIXED)
            load = _Transit(load, rows[owner], CARRIED).wait()
            if rows[owner]:
                yield held, load
        for tensor, came in zip(carried, _Transit(load, rows[me], CARRIED).wait(), strict=True):
            tensor[here] = came


class _Transit:
    """Tensors on their way to the next process, and as many, with `rows` rows, from the one before."""

    def __init__(self, tensors: Sequence[Tensor], rows: int, tag: int) -> None:
        count, me = processes.world_size(), processes.rank()
        self.sent = [tensor.contiguous() for tensor in tensors]  # held until they have gone
        self.came = [tensor.new_empty(rows, *tensor.shape[1:]) for tensor in tensors]
        ops = []
        for number, (sent, came) in enumerate(zip(self.sent, self.came, strict=True)):
            if len(sent):
                ops.append(distributed.P2POp(distributed.isend, sent, (me + 1) % count, tag=tag + number))
            if rows:
                ops.append(distributed.P2POp(distributed.irecv, came, (me - 1) % count, tag=tag + number))
        self.works = distributed.batch_isend_irecv(ops) if ops else []

    def wait(self) -> list[Tensor]:
        """What came, when it is there."""
        for work in self.works:
            work.wait()
        return self.came


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()  # what all processes ask of this sum
        distributed.all_reduce(gradient)
        return gradient


class _OthersLogSum(torch.autograd.Function):
    """`walk` over the keys of each chunk: with the whole sum known, its backward pass gives a chunk's part."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
        found = q.new_full(q.shape[:1], -torch.inf)
        with torch.autocast(q.device.type, enabled=False):
            for held, _ in peer_chunks([k] if bias is None else [k, bias]):
                keys, weight = held[0][None], held[1][None] if bias is not None else None
                part = walk.forward(q[None], keys, keys[..., :0], weight, temperature, Pairs())[1][0]
                found = torch.logaddexp(found, part)
        ctx.temperature = temperature
        ctx.save_for_backward(q, k, bias, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_found: Tensor) -> tuple[Tensor | None, ...]:
        q, k, bias, found = ctx.saved_tensors
        log_sum = found[None]
        saved = q.new_empty(1, len(q), 0), log_sum, torch.full_like(log_sum, PLAIN, dtype=torch.uint8)
        nothing = q.new_empty(1, 0, 0)
        dq, given = torch.zeros_like(q), [k] if bias is None else [k, bias]
        carried = [torch.zeros_like(tensor) for tensor in given]
        with torch.autocast(q.device.type, enabled=False):
            for held, load in peer_chunks(given, carried):
                keys, weight = held[0][None], held[1][None] if bias is not None else None
                into = keys[..., :0], weight, ctx.temperature, Pairs(), (*saved, nothing), saved[0]
                part = walk.backward(q[None], keys, *into, d_found[None])
                dq += part[0][0]
                for tensor, more in zip(load, (part[1], part[3]), strict=False):
                    tensor += more[0]  # type: ignore[index]  # None only for k = q, and without a bias
        return dq, carried[0], None if bias is None else carried[1], None


class _OthersLogSums(torch.autograd.Function):
    """The same in both directions from one walk: the sums of a chunk's columns are carried along."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        row, column = q.new_full(q.shape[:1], -torch.inf), k.new_full(k.shape[:1], -torch.inf)
        for (keys,), (reached,) in peer_chunks([k], [column]):
            more_row, more_column = both_ways.log_sums_operator(q[None], keys[None], temperature, False)
            row = torch.logaddexp(row, more_row[0])
            reached.copy_(torch.logaddexp(reached, more_column[0]))
        ctx.temperature = temperature
        ctx.save_for_backward(q, k, row, column)
        return row, column

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_row: Tensor, d_column: Tensor) -> tuple[Tensor | None, ...]:
        q, k, row, column = ctx.saved_tensors
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
        for (keys, sums, d_sums), (reached,) in peer_chunks([k, column, d_column], [dk]):
            came = d_row[None], d_sums[None], row[None], sums[None], q[None], keys[None]
            more_dq, more_dk = both_ways.log_sums_backward(*came, ctx.temperature, False)
            dq += more_dq[0]
            reached += more_dk[0]
        return dq, dk, None
