"""Batches of images, decoded and augmented by worker processes ahead of the training.

The augmentation of an image depends only on the seed, the epoch and its index in it: not on the number of workers, and
not on where an interrupted run resumes.
"""

import copy
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.data.image.image_source import Images, UnreadableError
from uncollapse.lab.engine.seeding import preserve_random_state
from uncollapse.lab.engine.sharding import shard_slice

Transform = Callable[[Any], Tensor]


@dataclass(frozen=True)
class ImageBatch:
    """Images (b, 3, height, width) and labels (b,); b is 0 if no image can be read.

    skipped: number of unreadable images, which are left out. unread: the error of the last one.
    """

    images: Tensor
    labels: Tensor
    skipped: int = 0
    unread: str = ""

    def __len__(self) -> int:
        return len(self.labels)


def epoch_order(count: int, seed: int, repeats: int = 1) -> list[int]:
    """Return the order of the images in an epoch as indices, drawn with a seed.

    With repeats each image comes that many times in a row, with a new augmentation each time (DeiT has 3). The epoch
    keeps its length: it has that many times fewer of the images. Unlike timm's, it is not cut to a multiple of 256.

    >>> epoch_order(4, seed=0), epoch_order(4, seed=0, repeats=3)
    ([0, 1, 3, 2], [0, 0, 0, 1])
    """
    if repeats < 1:
        raise UsageError(f"repeats must be 1 or more, got {repeats}.")
    if repeats == 1:
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    torchvision_ops.declare()
    sampler: Any = import_optional("timm.data.distributed_sampler", "timm").RepeatAugSampler(
        range(count), num_replicas=1, rank=0, num_repeats=repeats, selected_round=0
    )
    sampler.set_epoch(seed)
    return list(sampler)


class ImageBatches:
    """The batches of an epoch, made on iteration.

    Args:
        source: Images to draw from.
        order: Indices of the images, in order; one may occur several times.
        size: Images per batch; the last batch may be smaller.
        transform: Turns an image into a tensor; it may draw random numbers.
        seed: Seed of these.
        workers: Processes that read ahead; 0 reads in this one, when a batch is needed.
        count: Called with the number of unreadable images of each batch.
        first: Index of the first batch.
        part: Rank of this process and number of processes; each makes its shard of every batch.
    """

    def __init__(
        self,
        source: Images,
        order: Sequence[int],
        size: int,
        transform: Transform,
        seed: int = 0,
        workers: int = 0,
        count: Callable[[int], None] | None = None,
        first: int = 0,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.source, self.order, self.size, self.transform = source, order, size, transform
        self.seed, self.workers, self.count, self.first, self.part = seed, workers, count, first, part

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def after(self, count: int) -> "ImageBatches":
        """Return the batches after the first few, without making those."""
        rest = copy.copy(self)
        rest.first = count
        return rest

    def share(self, number: int, count: int) -> "ImageBatches":
        """Return the shards of one of several processes, which reads no other images; they are as in one process."""
        own = copy.copy(self)
        own.part = number, count
        return own

    def __iter__(self) -> Iterator[ImageBatch]:
        starts = range(0, len(self.order), self.size)
        whole = [range(at, min(at + self.size, len(self.order))) for at in starts]
        places = [batch[shard_slice(len(batch), *self.part)] for batch in whole]
        reader = _Reader(self.source, self.order, self.transform, self.seed)
        for batch in read_ahead(reader, places[self.first :], self.workers):
            if self.count is not None:
                self.count(batch.skipped)
            yield batch


class _Reader(Dataset[ImageBatch | UsageError]):
    """Dataset from indices in the order to a batch, or to the error that explains what is wrong."""

    def __init__(self, source: Images, order: Sequence[int], transform: Transform, seed: int) -> None:
        self.source, self.order, self.transform, self.seed = source, order, transform, seed

    def __getitem__(self, places: Sequence[int]) -> ImageBatch | UsageError:
        is_apart = get_worker_info() is not None  # nothing else draws random numbers there, and CUDA must not be used
        with nullcontext() if is_apart else preserve_random_state():
            try:
                return self._batch(places)
            except UsageError as error:
                return error

    def _batch(self, places: Sequence[int]) -> ImageBatch:
        images, found, unread = [], [], ""
        for place in places:
            at = self.order[place]
            try:
                image = self.source.image(at)
            except UnreadableError as error:
                unread = str(error)
                continue
            _seed(_mix_seed(self.seed, place))
            images.append(self.transform(image))
            found.append(at)
        stacked = torch.stack(images) if images else torch.empty(0, 3, 0, 0)
        return ImageBatch(stacked, self.source.labels[found], len(places) - len(images), unread)


def _seed(seed: int) -> None:
    """Seed Python, NumPy and torch; not CUDA, which images do not need."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002 - what timm draws from
    torch.default_generator.manual_seed(seed)


def _mix_seed(seed: int, place: int) -> int:
    """Return a seed for each index, unrelated to that of the next one."""
    value = (seed * 0x9E3779B97F4A7C15 + place + 1) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1


AHEAD = 4  # batches that each worker prefetches
GRACE = 10  # seconds until a worker ends after SIGTERM


def read_ahead(reader: Dataset[Any], keys: Sequence[Any], workers: int) -> Iterator[Any]:
    """Yield what a reader returns for each key, in their order. A UsageError that it returns is raised here.

    Args:
        reader: Dataset by key. It returns an error instead of raising it, as a raised one loses its message on the way
            from another process.
        keys: Keys to read.
        workers: Processes that read; 0 reads in this one, when something is needed.
    """
    several: dict[str, Any] = {"prefetch_factor": AHEAD, "worker_init_fn": _init_worker} if workers else {}
    if workers and sys.platform == "linux":
        several["multiprocessing_context"] = "fork"  # then images in memory are shared, not copied
    generator = torch.Generator().manual_seed(0)  # else torch's own would be drawn from
    started = _start(
        DataLoader(reader, batch_size=None, sampler=keys, num_workers=workers, generator=generator, **several)
    )
    try:
        for found in _check_alive(started, workers) if workers else started:
            if isinstance(found, UsageError):
                raise found
            yield found
    finally:
        if workers:  # an error keeps the iterator, and without this its workers, alive until the garbage is collected
            getattr(started, "_shutdown_workers", lambda: None)()


def _init_worker(_: int) -> None:
    """Initialize a worker: Ctrl-C and SIGTERM, which often reach all processes, are for the one that trains.

    It may need another batch before it stops, and ends the workers then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    can_wait = hasattr(signal, "alarm")  # not on Windows
    signal.signal(signal.SIGTERM, (lambda *_: signal.alarm(GRACE)) if can_wait else signal.SIG_DFL)


def _start(loader: "DataLoader[Any]") -> Iterator[Any]:
    """Start the workers. If one dies, the next batch raises the error.

    torch would catch SIGCHLD and raise wherever the training happens to be; its handler is removed.
    """
    child = getattr(signal, "SIGCHLD", None)  # not on Windows
    before = None if child is None else signal.getsignal(child)
    started = iter(loader)
    if child is not None and signal.getsignal(child) is not before:
        signal.signal(child, before)
    return started


def _check_alive(started: Iterator[Any], workers: int) -> Iterator[Any]:
    """Yield what the workers make, or raise an error if one of them has died."""
    try:
        yield from started
    except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
            raise
        raise UsageError(
            f"One of the {workers} workers that read images died. Usually memory ran out or, in a container, shared "
            "memory in /dev/shm: fewer workers need less, and 0 needs none."
        ) from error
