"""Work in several threads: the chunks of a batch, the tiles of one large set, or independent tasks.

Threads that share every operation wait for each other at its end. Where another program uses a core, one of them is
late each time. Threads with work of their own wait for each other only once, and compute the same.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TypeVar

import torch

from uncollapse.pairwise.grid import Corners, Grid, Inputs, Tile

LEAST = 1 << 24  # multiplications of a product of the whole batch from which on this pays
S = TypeVar("S")
T = TypeVar("T")


def for_each_chunk(work: Callable[[slice], None], grid: Grid, inputs: Inputs) -> None:
    """Call `work` on each chunk of the batch; large batches of small sets are divided among threads."""
    batch, threads = len(inputs.q), torch.get_num_threads()
    if threads == 1 or not grid.single or batch < threads or not _is_large(inputs):
        for c in grid.chunks(batch):
            work(c)
    else:
        _in_threads(work, grid.chunks(batch, threads), threads)


def for_each_share(work: Callable[[Iterator[Tile]], T], grid: Grid, inputs: Inputs) -> list[T]:
    """Return what `work` returns for all tiles or, in several threads, for a share of them each, in a fixed order."""
    corners, threads = list(grid.corners()), torch.get_num_threads()
    if threads == 1 or len(corners) == 1 or not _is_large(inputs):
        return [work(grid.tiles(corners))]
    shares: list[list[Corners]] = [[] for _ in range(min(threads, len(corners)))]
    for tile in sorted(corners, key=lambda tile: -tile.area):
        min(shares, key=lambda share: sum(other.area for other in share)).append(tile)
    return _in_threads(work, [grid.tiles(share) for share in shares], threads)


def _in_threads(work: Callable[[S], T], parts: list[S], threads: int) -> list[T]:
    """Return what `work` returns for each part, each in one thread."""
    run = partial(_run, torch.is_inference_mode_enabled())
    return [done.result() for done in [_pool(threads).submit(run, partial(work, part)) for part in parts]]


def _is_large(inputs: Inputs) -> bool:
    q, k = inputs.q, inputs.k
    return type(q) is torch.Tensor and q.device.type == "cpu" and q.numel() * k.shape[1] >= LEAST


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return threads that do each operation alone; the number of threads of all others stays as it is."""
    started = threading.Barrier(threads + 1)
    pool = ThreadPoolExecutor(threads, "uncollapse", initializer=torch.set_num_threads, initargs=(1,))
    for _ in range(threads):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(threads)  # for threads that will be started: they take over what was set last
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def run_side_by_side(work: Iterable[Callable[[], T]]) -> list[T]:
    """Return the results of functions, which run in as many threads as torch uses for one operator.

    Meanwhile torch uses one thread for each operator, also for one function alone, whose sums would differ. If
    some raise, the error of the first of them is raised.
    """
    tasks, threads = list(work), torch.get_num_threads()
    if threads == 1 or not tasks or _uses_gpu():
        return [task() for task in tasks]
    count = min(threads, len(tasks))
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(partial(_run, torch.is_inference_mode_enabled()), tasks))
    finally:
        torch.set_num_threads(threads)


def _run(inference: bool, task: Callable[[], T]) -> T:
    """Run a task without gradients, in the mode of the caller's thread: each thread has its own modes."""
    with torch.inference_mode(inference), torch.no_grad():
        return task()


def _uses_gpu() -> bool:
    """Return whether this process uses a GPU, of which each thread would have a stream of its own."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
