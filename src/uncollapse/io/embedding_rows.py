"""Rows of embeddings, read in parts and ahead of their use."""

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

AHEAD = 3  # items that wait to be taken


def prefetch(items: Iterable[T], most: int = AHEAD) -> Iterator[T]:
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
class Rows:
    """The embeddings of one file or several: how many, how wide, what they are, and how to read them.

    words: the file and the array in it. read: gives arrays (m, d), of any m, from one row to before another. paths:
    the files. first: the number of the first row.
    """

    words: str
    count: int
    dim: int
    read: Callable[[int, int], Iterator[Any]]
    paths: tuple[Path, ...]
    first: int = 0

    def parts(self, size: int | None = None) -> Iterator[Tensor]:
        """Tensors (size, d), the last one shorter, in float32, or float64 if the file has that."""
        size, kept, first, before = size or part_size(self.dim), [], self.first, self._stamps()
        for array in self.read(self.first, self.first + self.count):
            kept.append(_floating(array))
            while (whole := sum(map(len, kept))) >= size:
                rows = kept[0] if len(kept) == 1 else torch.cat(kept)
                yield self._checked(rows[:size], first)
                kept, first = [rows[size:]] if whole > size else [], first + size
        if rest := [rows for rows in kept if len(rows)]:
            yield self._checked(torch.cat(rest), first)
        if before != self._stamps():
            raise UsageError(f"{self.words} was changed while it was read. Measure it again when nobody writes to it.")

    def part_count(self, size: int | None = None) -> int:
        """How many parts there are."""
        return math.ceil(self.count / (size or part_size(self.dim)))

    def share(self, number: int, of: int) -> "Rows":
        """One of `of` shares in a row that are about the same size, by its number from 0; it may be empty."""
        start, end = (self.count * place // of for place in (number, number + 1))
        return replace(self, count=end - start, first=self.first + start)

    def _stamps(self) -> list[tuple[int, int, int]]:
        """What changes when somebody writes to the files, or puts others in their place."""
        facts = [path.stat() if path.exists() else None for path in self.paths]
        return [(0, 0, 0) if each is None else (each.st_ino, each.st_size, each.st_mtime_ns) for each in facts]

    def _checked(self, rows: Tensor, first: int) -> Tensor:
        if bool(rows.sum().isfinite()):  # one pass: a sum is finite only if all its terms are
            return rows
        bad = ~rows.isfinite().all(-1)
        if bool(bad.any()):  # otherwise only the sum overflowed
            number = first + int(bad.nonzero()[0])
            raise UsageError(f"{self.words}: row {number} holds NaN or infinite numbers; leave such rows out.")
        return rows


def part_size(dim: int) -> int:
    """How many rows are read at a time."""
    return max(1, min(PART, NUMBERS // dim))


def choose_key(words: str, key: str | None, there: list[str]) -> str:
    """The array that is meant: the one that is named, or the only one."""
    if key is None and len(there) == 1:
        return there[0]
    if key not in there:
        asked = f"has no {key!r}" if key is not None else "holds several arrays"
        hint = "" if key is None else did_you_mean(key, there)
        raise UsageError(f"{words} {asked}; choose one with --key: {', '.join(there) or 'there are none'}.{hint}")
    return key


def _floating(array: Any) -> Tensor:
    if not isinstance(array, Tensor):
        kind = array.dtype.newbyteorder("=") if array.dtype.itemsize <= 8 else numpy.float64  # torch knows no others
        array = torch.from_numpy(numpy.ascontiguousarray(array, kind))
    tensor: Tensor = array
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


PART = 4096


NUMBERS = 1 << 22


FEATURES = 2**17
