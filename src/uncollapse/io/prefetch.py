"""Reading files from the first byte to the last: ahead of whoever takes what is read, and how fast that is at best."""

import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

AHEAD = 3  # items that wait to be taken
SPAN = 1 << 30  # bytes that a plain read takes at most
PATIENCE = 2.0  # seconds that it takes at most
PIECE = 1 << 23  # bytes at a time
PROBES = 16  # places that are asked whether they are in memory


def ahead(items: Iterable[T], most: int = AHEAD) -> Iterator[T]:
    """The same items, made in a thread of its own while earlier ones are in use; at most so many wait.

    An error while they are made is raised where they are taken. Whoever stops taking them ends the thread.
    """
    waiting: queue.Queue[tuple[bool, Any]] = queue.Queue(most)
    over = threading.Event()

    def put(entry: tuple[bool, Any]) -> None:
        while not over.is_set():
            try:
                return waiting.put(entry, timeout=0.1)
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put((True, item))
                if over.is_set():
                    return
            put((False, None))
        except BaseException as error:  # also what is no Exception: the taker would wait for ever
            put((False, error))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while (entry := waiting.get())[0]:
            yield entry[1]
        if entry[1] is not None:
            raise entry[1]
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class PlainRead:
    """How a file is read by a program that does nothing else.

    size: bytes that were read. seconds: how long it took. held: share of them that was in memory before, because the
    system keeps what was read lately; None where that cannot be known.
    """

    size: int
    seconds: float
    held: float | None

    @property
    def words(self) -> str:
        """Where the bytes came from."""
        if self.held is None:
            return "from disk or memory"
        return "from memory, where the system keeps what was read lately" if self.held > 0.5 else "from disk"


def plain_read(paths: Sequence[Path], most: int = SPAN, patience: float = PATIENCE) -> PlainRead:
    """Read the end of some files, one after the other, and leave them in memory or not as they were.

    At most `most` bytes and `patience` seconds in all. Ask before the files are read for another purpose: afterwards
    they come from memory.
    """
    size, held, seconds = 0, [], 0.0
    for path in reversed(paths):
        with path.open("rb", buffering=0) as file:
            first = max(0, os.fstat(file.fileno()).st_size - (most - size))
            held += _held(file.fileno(), first)
            done, spent = _timed(file, first, patience - seconds)
            if os.name == "posix" and hasattr(os, "posix_fadvise") and held and sum(held) < len(held) / 2:
                os.posix_fadvise(file.fileno(), first, done, os.POSIX_FADV_DONTNEED)
        size, seconds = size + done, seconds + spent
        if size >= most or seconds >= patience:
            break
    return PlainRead(size, seconds, sum(held) / len(held) if held else None)


def _timed(file: Any, first: int, patience: float) -> tuple[int, float]:
    """Bytes from `first` on that were read within so many seconds, and how many seconds it took."""
    buffer, size = bytearray(PIECE), 0
    started = time.perf_counter()
    file.seek(first)
    while (got := file.readinto(buffer)) and time.perf_counter() - started < patience:
        size += got
    return size, time.perf_counter() - started


def _held(handle: int, first: int) -> list[bool]:
    """Whether pages from `first` on are in memory, at a few places; nothing where the system does not tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return []
    step = max(1, (os.fstat(handle).st_size - first) // PROBES)
    found = []
    for place in range(first, os.fstat(handle).st_size, step):
        try:
            found.append(os.preadv(handle, [bytearray(1)], place, os.RWF_NOWAIT) == 1)
        except BlockingIOError:  # it would have to wait for the disk
            found.append(False)
        except OSError:  # not on this kind of disk
            return []
    return found
