"""Run independent work of several layers in several threads.

Operators on one layer are too small for all cores: their threads mostly wait for each other, and long if another
process needs a core. One layer per core scales, and computes the same.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")


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
    """Run a task without gradients, in the mode of the caller's thread."""
    with torch.inference_mode(inference), torch.no_grad():
        return task()


def _uses_gpu() -> bool:
    """Return whether this process uses a GPU, of which each thread would have a stream of its own."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
