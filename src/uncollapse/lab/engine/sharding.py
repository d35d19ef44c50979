"""Shard batches over processes.

A batch belongs to all processes together: each takes an equal share of its rows, in order. Losses are means over rows,
and DistributedDataParallel takes the mean over processes; a loss is therefore weighted by its number of rows.
"""

from collections.abc import Iterable, Mapping, Sized
from typing import Any, NamedTuple

from torch import Tensor, distributed, nn

from uncollapse import distributed as processes
from uncollapse.errors import UsageError
from uncollapse.lab.engine.task import Shareable, Task


class Shard(NamedTuple):
    """This rank's part of a batch: its rows, the weight of their loss, and the rows of all ranks."""

    batch: Any
    weight: float
    whole: Sized


def shard_slice(size: int, number: int, count: int) -> slice:
    """Return the rows of a batch that rank `number` of `count` takes.

    >>> [shard_slice(5, number, 2) for number in range(2)]
    [slice(0, 2, None), slice(2, 5, None)]
    """
    return slice(size * number // count, size * (number + 1) // count)


def shard_batches(batches: Iterable[Any]) -> Iterable[Any]:
    """Return this rank's part of each batch; built directly where batches support it, else cut out of whole ones."""
    if processes.world_size() == 1:
        return batches
    if isinstance(batches, Shareable):
        return batches.share(processes.rank(), processes.world_size())
    return (_cut(batch) for batch in batches)


def weigh_shards(group: list[Any], task: Task) -> list[Shard]:
    """Return the batches of a step that are not empty, with the weight of each.

    A rank without rows of a batch computes another rank's rows with a weight of 0: gradients are averaged by all ranks
    or by none.
    """
    if processes.world_size() == 1:
        return [Shard(batch, 1.0, batch) for batch in group if not _is_empty(batch)]
    count, rank = processes.world_size(), processes.rank()
    own = [float(count_rows(batch)) for batch in group]
    numbers = processes.sum_over_ranks([n if process == rank else 0.0 for n in own for process in range(count)])
    portions = []
    for batch, start in zip(group, range(0, len(numbers), count), strict=True):
        sizes = numbers[start : start + count]
        if whole := int(sum(sizes)):
            rows = _rows_for(batch, sizes, task) if not all(sizes) else batch
            weight = 1.0 if task.sharding == "gathered" else count * sizes[rank] / whole
            portions.append(Shard(rows, weight, range(whole)))
    return portions


def sync_buffers(model: nn.Module) -> None:
    """Copy rank zero's buffers to all ranks: each has its own batch norm statistics. Weights are already the same."""
    if processes.world_size() > 1:
        for buffer in model.buffers():
            distributed.broadcast(buffer, src=0)


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch: a tensor, a collection of tensors, or an object with a length."""
    if isinstance(batch, Mapping):
        return count_rows(next(iter(batch.values())))
    return count_rows(batch[0]) if isinstance(batch, tuple | list) else len(batch)


def _cut(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: _cut(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_cut(value) for value in batch)
    if not isinstance(batch, Tensor) or not batch.dim():
        raise UsageError(
            f"Processes can share tensors with rows, and mappings and tuples of them, got {type(batch).__name__}. "
            "Give the batches a method share(number, count), or start one process."
        )
    return batch[shard_slice(len(batch), processes.rank(), processes.world_size())]


def _rows_for(batch: Any, sizes: list[float], task: Task) -> Any:
    """Return the batch; a rank without rows gets that of the rank with the most rows."""
    if task.sharding == "gathered":
        raise UsageError(
            f"A batch of {sum(sizes):.0f} rows is too small for {len(sizes)} processes: each needs a row. Use "
            "larger batches or fewer processes."
        )
    most = sizes.index(max(sizes))
    objects = [batch]
    distributed.broadcast_object_list(objects, src=most)
    return batch if sizes[processes.rank()] else objects[0]


def _is_empty(batch: Any) -> bool:
    """Return whether a batch is empty, such as one of images that cannot be read."""
    return isinstance(batch, Sized) and not isinstance(batch, Tensor) and not len(batch)
