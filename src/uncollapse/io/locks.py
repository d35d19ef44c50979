"""A file that one process holds at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from uncollapse.io.files import telling


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Within, whether this process holds the file; another one has it otherwise. It is gone afterwards.

    The system gives up the lock of a process that dies, however it dies, so a file that one left behind can be taken.
    The number of the process is written into it for people who wonder.
    """
    with telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _taken(path)
    if handle is None:
        yield False
        return
    try:
        with suppress(OSError):  # on a full disk it holds all the same
            os.truncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        yield True
    finally:
        with suppress(OSError):  # one that stays can be taken all the same
            path.unlink()  # while it is still held: nobody else's is removed
        os.close(handle)


def _taken(path: Path) -> int | None:
    """The open file, locked; None if another process has it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        if _same(handle, path):
            return handle
        os.close(handle)  # its holder removed it between the two calls: what is locked is no longer in the folder


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
