"""Write files atomically, and lock them against other processes."""

import errno
import json
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from uncollapse.errors import UsageError, file_errors

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no such locks: leftovers of killed processes stay
    fcntl = None

PATIENCE = 0.1  # seconds until a lock counts as held: its holder may be removing the file right now
LARGEST_CONFIG = 2**24  # bytes of a model's config.json
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
    """A file cannot be written; the message names the file, the reason and what to do."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written: {self.strerror}. {ADVICE.get(self.errno or 0, 'Name another one.')}"


@contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """Turn errors of the system into a NotWrittenError of this file: they may name another file, or none."""
    try:
        yield
    except NotWrittenError:
        raise  # already about a file inside
    except OSError as error:
        raise NotWrittenError(error.errno, error.strerror or str(error), str(path)) from error


def write(path: Path, content: str | bytes) -> Path:
    """Write a file atomically, and create its folder: other processes see the old content or the new one, never a part.

    The content is on the disk before the file gets its name, so that a crash leaves the old file. Several processes may
    write the same file: the last one wins. Partial files of killed processes in this folder are removed. Characters
    that UTF-8 cannot encode, which file names may have, become question marks.
    """
    with open_new(path) as file:
        file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
    return path


@contextmanager
def open_new(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write as `write` does, for content that comes in parts. It gets its name when all is written."""
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_parts(path.parent)
        part, file = _new_part(path.parent)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if fcntl is not None:  # while it is locked, so that no process takes it for a leftover
                    os.replace(part, path)
            if fcntl is None:  # where an open file cannot be renamed
                os.replace(part, path)
        except BaseException:  # also on Ctrl-C
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def read_config(path: Path) -> Any:
    """Read the config.json of a stranger's model. UsageError unless it is a regular file of bounded size and depth."""
    with file_errors(path, "config of a model"):
        facts = path.stat()  # a pipe would block, and a device may never end
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{path} is not a regular file; name the folder of a saved model.")
        if facts.st_size > LARGEST_CONFIG:
            raise UsageError(f"{path} has {facts.st_size:,} bytes; a config has at most {LARGEST_CONFIG:,}.")
        return json.loads(path.read_text(encoding="utf-8"))  # RecursionError if it is nested too deeply


def expand_user(path: str | Path) -> Path:
    """Return the path with a leading ~ replaced by the home folder, if that user exists."""
    return Path(os.path.expanduser(path))


def user_cache() -> Path:
    """Return the cache folder: UNCOLLAPSE_CACHE, or ~/.cache/uncollapse."""
    return expand_user(os.environ.get("UNCOLLAPSE_CACHE") or "~/.cache/uncollapse")


def sync_folder(folder: Path) -> None:
    """Sync a folder to the disk, so that its renames survive a crash."""
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
    """Create a temporary file with a short name; its lock shows that it is in use."""
    while True:
        part = folder / f".{uuid.uuid4().hex}.part"
        file = part.open("xb")
        if fcntl is None:
            return part, file
        with suppress(OSError):  # a disk without locks: then leftovers are not removed there either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return part, file
        file.close()  # another process removed it between the two calls


def _remove_parts(folder: Path) -> None:
    """Remove partial files of killed processes: those that no process has locked."""
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
    that was left behind can be locked again. The file contains the process id, for information.
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
