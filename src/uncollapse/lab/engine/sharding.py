"""What each of several processes takes of a batch.

A batch is that of all processes together: each takes as many of its rows, in order. Losses are means over rows, and
DistributedDataParallel takes the mean over processes; a loss is therefore weighted by the number of rows behind it.
"""

from collections.abc import Iterable, Mapping, Sized
from typing import Any, NamedTuple

from torch import Tensor, distributed, nn

from uncollapse import distributed as processes
from uncollapse.errors import UsageError
from uncollapse.lab.engine.task import Shareable, Task


class Shard(NamedTuple):
    """What this process has of a batch: its rows, the weight of their loss, and how many rows all processes have."""

    batch: Any
    weight: float
    whole: Sized


def shard_slice(size: int, number: int, count: int) -> slice:
    """The rows of a batch that process `number` of `count` takes.

    >>> [slice_of(5, number, 2) for number in range(2)]
    [slice(0, 2, None), slice(2, 5, None)]
    """
    return slice(size * number // count, size * (number + 1) // count)


def shard_batches(batches: Iterable[Any]) -> Iterable[Any]:
    """This process's part of each batch; made alone where batches know how to, else cut out of whole ones."""
    if processes.world_size() == 1:
        return batches
    if isinstance(batches, Shareable):
        return batches.share(processes.rank(), processes.world_size())
    return (_cut(batch) for batch in batches)


def weigh_shards(group: list[Any], task: Task) -> list[Shard]:
    """The batches of a step that have something in them, with the weight of each.

    A process without a row of a batch looks at another's rows all the same, with a weight of 0: gradients are averaged
    by all processes or by none.
    """
    if processes.world_size() == 1:
        return [Shard(batch, 1.0, batch) for batch in group if not _is_empty(batch)]
    count, me = processes.world_size(), processes.rank()
    own = [float(count_rows(batch)) for batch in group]
    numbers = processes.sum_over_ranks([n if process == me else 0.0 for n in own for process in range(count)])
    portions = []
    for batch, start in zip(group, range(0, len(numbers), count), strict=True):
        sizes = numbers[start : start + count]
        if whole := int(sum(sizes)):
            shown = _shown(batch, sizes, task) if not all(sizes) else batch
            weight = 1.0 if task.sharding == "gathered" else count * sizes[me] / whole
            portions.append(Shard(shown, weight, range(whole)))
    return portions


def sync_buffers(model: nn.Module) -> None:
    """Give all processes the first one's buffers: each has its own statistics of batch norms. Weights are the same."""
    if processes.world_size() > 1:
        for buffer in model.buffers():
            distributed.broadcast(buffer, src=0)


def count_rows(batch: Any) -> int:
    """How many rows a batch has: a tensor, some tensors, or what says so itself."""
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
            f"Several processes share batches of tensors with rows, and mappings and tuples of them, got a "
            f"{type(batch).__name__}. Give the batches a method share(number, count), or start one process."
        )
    return batch[shard_slice(len(batch), processes.rank(), processes.world_size())]


def _shown(batch: Any, sizes: list[float], task: Task) -> Any:
    """The batch, or that of the process with the most rows for one that has none."""
    if task.sharding == "gathered":
        raise UsageError(
            f"A batch of {sum(sizes):.0f} rows is too small for {len(sizes)} processes: each needs a row of it. Take "
            "larger batches or fewer processes."
        )
    most = sizes.index(max(sizes))
    told = [batch]
    distributed.broadcast_object_list(told, src=most)
    return batch if sizes[processes.rank()] else told[0]


def _is_empty(batch: Any) -> bool:
    """Whether nothing is in a batch, such as one of pictures that cannot be read."""
    return isinstance(batch, Sized) and not isinstance(batch, Tensor) and not len(batch)
