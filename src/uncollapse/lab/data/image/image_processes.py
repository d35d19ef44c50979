"""Batches that are made in processes of their own, by torch's DataLoader."""

import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from uncollapse.errors import UsageError

AHEAD = 4  # batches that each process has ready
GRACE = 10  # seconds that a process goes on when it is told to end


def read_ahead(reader: Dataset[Any], keys: Sequence[Any], workers: int) -> Iterator[Any]:
    """What a reader gives for each key, in their order. A UsageError that it gives is raised here.

    Args:
        reader: key -> what is wanted. It gives an error back rather than raising it: on its way from another process a
            raised one loses its own words.
        keys: of what is wanted.
        workers: processes that read; 0 reads in this one, when something is asked for.
    """
    several: dict[str, Any] = {"prefetch_factor": AHEAD, "worker_init_fn": _begin} if workers else {}
    if workers and sys.platform == "linux":
        several["multiprocessing_context"] = "fork"  # pictures in memory are shared then, not copied
    generator = torch.Generator().manual_seed(0)  # else torch's own would be drawn from
    started = _started(
        DataLoader(reader, batch_size=None, sampler=keys, num_workers=workers, generator=generator, **several)
    )
    try:
        for found in _surviving(started, workers) if workers else started:
            if isinstance(found, UsageError):
                raise found
            yield found
    finally:
        if workers:  # an error keeps what raised it, and without this its processes, until the garbage is collected
            getattr(started, "_shutdown_workers", lambda: None)()


def _begin(_: int) -> None:
    """In a process that begins: Ctrl-C and the word to end, which often come to all, are for the one that trains.

    That one may want another batch before it stops, and it ends the others then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    can_wait = hasattr(signal, "alarm")  # not on Windows
    signal.signal(signal.SIGTERM, (lambda *_: signal.alarm(GRACE)) if can_wait else signal.SIG_DFL)


def _started(loader: "DataLoader[Any]") -> Iterator[Any]:
    """Start the processes. When one dies, whoever asks for a batch is told.

    torch would catch the signal that tells of it, and raise wherever the training happens to be: that is taken back.
    """
    child = getattr(signal, "SIGCHLD", None)  # not on Windows
    before = None if child is None else signal.getsignal(child)
    started = iter(loader)
    if child is not None and signal.getsignal(child) is not before:
        signal.signal(child, before)
    return started


def _surviving(started: Iterator[Any], workers: int) -> Iterator[Any]:
    """All that the processes make, or an error that says that one of them has died."""
    try:
        yield from started
    except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
            raise
        raise UsageError(
            f"One of the {workers} processes that read pictures came to a sudden end. Mostly memory ran out, or in a "
            "container the shared memory in /dev/shm: fewer workers need less, and with 0 there are no such processes."
        ) from error
