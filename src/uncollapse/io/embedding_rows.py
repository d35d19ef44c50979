"""Rows of embeddings, read in parts, with prefetching."""

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean

T = TypeVar("T")

AHEAD = 3  # items that are prefetched
PART = 4096  # rows that are read at a time, unless they are wide
NUMBERS = 1 << 22  # numbers that are read at a time
FEATURES = 2**17  # largest width of an embedding


def prefetch(items: Iterable[T], ahead: int = AHEAD) -> Iterator[T]:
    """Yield the same items, produced by another thread up to `ahead` items in advance.

    An error of the producer is raised here. The thread ends when the consumer stops.
    """
    waiting: queue.Queue[tuple[bool, Any]] = queue.Queue(ahead)
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
        except BaseException as error:  # any error, or the consumer would wait forever
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
class Rows:
    """The embeddings of one or several files.

    words: name of the file and the array, for messages. read: yields arrays (m, d), of any m, from one row to before
    another. paths: the files. first: the number of the first row. key: the array or column, None for a file of one
    array. dtype: of its numbers, as NumPy names it; float32 where they are not of a floating-point type of NumPy.
    """

    words: str
    count: int
    dim: int
    read: Callable[[int, int], Iterator[Any]]
    paths: tuple[Path, ...]
    first: int = 0
    key: str | None = None
    dtype: str = "float32"

    def parts(self, size: int | None = None) -> Iterator[Tensor]:
        """Yield tensors (size, d), the last one shorter, in float32, or float64 if the file has that."""
        size, pending, first, before = size or part_size(self.dim), [], self.first, self._stamps()
        for array in self.read(self.first, self.first + self.count):
            pending.append(_to_float(array))
            while (whole := sum(map(len, pending))) >= size:
                rows = pending[0] if len(pending) == 1 else torch.cat(pending)
                yield self._check_finite(rows[:size], first)
                pending, first = [rows[size:]] if whole > size else [], first + size
        if rest := [rows for rows in pending if len(rows)]:
            yield self._check_finite(torch.cat(rest), first)
        if before != self._stamps():
            raise UsageError(f"{self.words} changed while it was read. Try again when no process writes to it.")

    def part_count(self, size: int | None = None) -> int:
        """Return the number of parts."""
        return math.ceil(self.count / (size or part_size(self.dim)))

    def share(self, number: int, of: int) -> "Rows":
        """Return one of `of` consecutive shares of about the same size, by its number from 0; it may be empty."""
        start, end = (self.count * place // of for place in (number, number + 1))
        return replace(self, count=end - start, first=self.first + start)

    def _stamps(self) -> list[tuple[int, int, int]]:
        """Return what changes when files are written to or replaced."""
        facts = [path.stat() if path.exists() else None for path in self.paths]
        return [(0, 0, 0) if each is None else (each.st_ino, each.st_size, each.st_mtime_ns) for each in facts]

    def _check_finite(self, rows: Tensor, first: int) -> Tensor:
        if bool(rows.sum().isfinite()):  # one pass: a sum is finite only if all its terms are
            return rows
        bad = ~rows.isfinite().all(-1)
        if bool(bad.any()):  # otherwise only the sum overflowed
            number = first + int(bad.nonzero()[0])
            raise UsageError(f"{self.words}: row {number} has NaN or infinite numbers; remove such rows.")
        return rows


def part_size(dim: int) -> int:
    """Return how many rows are read at a time."""
    return max(1, min(PART, NUMBERS // dim))


class NamelessError(UsageError):
    """A name was given, but the arrays of this kind of file have none."""


def refuse_key(words: str, key: str | None) -> None:
    """Raise NamelessError if a key was given for a file that has one array without a name."""
    if key is not None:
        raise NamelessError(f"{words}, which has no name; leave out --key or --column.")


def choose_key(words: str, key: str | None, there: list[str]) -> str:
    """Return the name of the array to read: `key`, or the only one."""
    if key is None and len(there) == 1:
        return there[0]
    if key not in there:
        asked = f"has no {key!r}" if key is not None else "has several arrays"
        hint = "" if key is None else did_you_mean(key, there)
        names = ", ".join(there) or "there are none"
        raise UsageError(f"{words} {asked}; choose one with --key or --column, --pairs-key for --pairs: {names}.{hint}")
    return key


def _to_float(array: Any) -> Tensor:
    if not isinstance(array, Tensor):
        kind = array.dtype.newbyteorder("=") if array.dtype.itemsize <= 8 else numpy.float64  # torch has no wider types
        array = torch.from_numpy(numpy.ascontiguousarray(array, kind))
    tensor: Tensor = array
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
