"""Write files atomically, and lock them against other processes."""

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no such locks: what a kill left stays there
    fcntl = None

PATIENCE = 0.1  # seconds until a lock counts as held: its holder may be removing the file just now
CURE_FILE = "uncollapse.json"  # describes the cures that were saved with a model
PART = re.compile(r"\.[0-9a-f]{32}\.part")  # a file before it gets its name
ROOM = "Make room on that disk, or name a folder on another one."
OTHER = "Name a folder that can be written to."
ADVICE = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EROFS: OTHER,
    errno.EACCES: OTHER,
    errno.EPERM: OTHER,
    errno.ENAMETOOLONG: "Give it a shorter name.",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or name a folder on another disk.",
}


class NotWrittenError(OSError):
    """A file that cannot be written. Its sentence names the file, says why and what to do."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}. {ADVICE.get(self.errno or 0, 'Name another one.')}"


@contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """Within, what the system refuses is told as the fate of this file: its own words may name another one, or none."""
    try:
        yield
    except NotWrittenError:
        raise  # told already, of a file within
    except OSError as error:
        raise NotWrittenError(error.errno, error.strerror or str(error), str(path)) from error


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, and its folder if there is none. Another process sees the old content or the new, never a part.

    The content is on the disk before it gets its name, so that a crash leaves the old file. Several processes may write
    the same file: the last one wins. What a killed one has half written in this folder is removed. What is no letter,
    as names of files may have, becomes a question mark.
    """
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        part, file = _new_part(path.parent)
        try:
            with file:
                file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
                if fcntl is not None:  # while it is locked: nobody takes it for something that was left behind
                    os.replace(part, path)
            if fcntl is None:  # where an open file cannot be renamed
                os.replace(part, path)
        except BaseException:  # Ctrl-C too leaves no litter
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    return path


def expand_user(path: str | Path) -> Path:
    """A path whose ~ at the beginning is the user's folder; where there is no such user, it is the path itself."""
    return Path(os.path.expanduser(path))


def user_cache() -> Path:
    """Where what can be made or fetched again is kept: UNCOLLAPSE_CACHE, or the user's folder for such files."""
    return expand_user(os.environ.get("UNCOLLAPSE_CACHE") or "~/.cache/uncollapse")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk: a rename is there once its folder is."""
    if os.name == "posix":  # elsewhere folders cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_folder(new: Path, target: Path, old: Path) -> None:
    """Rename a complete folder to `target`.

    A folder cannot be replaced atomically: an existing target is first renamed to `old`, and back if the second rename
    fails. The caller removes `old` afterwards.
    """
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        if old.exists():
            os.rename(old, target)
        raise
    sync_folder(target.parent)


def _new_part(folder: Path) -> tuple[Path, IO[bytes]]:
    """A new file, locked while it is open: it is in use. Its name is short, whatever that of the file is."""
    while True:
        part = folder / f".{uuid.uuid4().hex}.part"
        file = part.open("xb")
        if fcntl is None:
            return part, file
        with suppress(OSError):  # a disk without locks: then nothing is swept there either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return part, file
        file.close()  # somebody swept it between the two calls


def _sweep(folder: Path) -> None:
    """Remove what killed processes were writing: parts that nobody holds."""
    if fcntl is None:
        return
    for name in os.listdir(folder):
        if PART.fullmatch(name):
            with suppress(OSError), (folder / name).open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Lock a file for this process and yield True, or yield False if another process holds it.

    The lock file is removed afterwards. The system releases the lock of a process that dies, however it dies, so a file
    that was left behind can be locked again. The id of the process is written into it for people who wonder.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=PATIENCE, poll_interval=PATIENCE / 5)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout):
            lock.acquire()
    if not lock.is_locked:
        yield False
        return
    try:
        with suppress(OSError):  # a full disk: the lock holds all the same
            path.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield True
    finally:
        with suppress(OSError):  # a file that stays can be locked again
            path.unlink()  # while it is still locked: a file of another process is never removed
        lock.release()
