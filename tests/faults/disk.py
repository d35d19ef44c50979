"""Operations on files below a folder, counted, with a fault in place of one of them.

Counted are what names do (open to write, mkdir, rename, remove), what contents do (write), what brings them to the disk
(fsync), and what SQLite commits. A kill in a write comes when half of it is done. Patches stay for the life of the
process, which is a child that does nothing else.
"""

import errno
import io
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from typing import Any

NAMES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
ONCE = ("kill", "vanish", "swap")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
AS_SQLITE_SAYS = {
    errno.ENOSPC: "database or disk is full",
    errno.EDQUOT: "database or disk is full",
    errno.EROFS: "attempt to write a readonly database",
    errno.EACCES: "unable to open database file",
    errno.EIO: "disk I/O error",
}


class Disk:
    """What is done below a folder. fault: "kill", "vanish" (the folder is gone), "swap" (the folder `data`
    beside it becomes what `other` is), or the name of an errno.

    at: the number of the operation that meets the fault, from 1; errors go on from there, as a full disk stays full.
    """

    def __init__(self, folder: str, fault: str | None = None, at: int = 0) -> None:
        self.folder, self.fault, self.at, self.count = os.path.realpath(folder), fault, at, 0
        self._within = False

    def watch(self) -> None:
        """Begin to count."""
        sys.addaudithook(self._heard)
        io.open = _opener(self, io.open)  # what pathlib calls
        sys.modules["builtins"].open = io.open  # type: ignore[attr-defined]
        sqlite3.dbapi2.connect = _connector(self, sqlite3.dbapi2.connect)
        for name in ("fsync", "write"):
            setattr(os, name, self._counted(getattr(os, name)))

    def happens(self, where: Any, half: Callable[[], object] | None = None) -> None:
        """An operation is about to be done. where: a path or the number of an open file. half: does half of it."""
        if self._within or not self._below(where):
            return
        self.count += 1
        if self.fault is None or self.count < self.at or (self.fault in ONCE and self.count > self.at):
            return
        self._within = True
        try:
            if half is not None:
                half()
            self._strike(where)
        finally:
            self._within = False

    def _strike(self, where: Any) -> None:
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "vanish":
            shutil.rmtree(self.folder)
            return
        if self.fault == "swap":
            shutil.copytree("other", "data", dirs_exist_ok=True)
            return
        number = getattr(errno, str(self.fault))
        named = (os.fspath(where),) if isinstance(where, str | os.PathLike) else ()  # a write knows no name
        raise OSError(number, os.strerror(number), *named)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in NAMES:
            return
        if event == "open" and not (arguments[2] or 0) & WRITING:
            return
        path = arguments[0]
        if event in ("os.remove", "os.rmdir") and arguments[1] != -1:  # a name within an open folder
            path = os.path.join(_path_of(arguments[1]), os.fsdecode(path))
        self.happens(path)

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(handle: Any, *rest: Any) -> Any:
            self.happens(handle)
            return real(handle, *rest)

        return counted

    def _below(self, where: Any) -> bool:
        try:
            path = _path_of(where) if isinstance(where, int) else os.path.realpath(os.fsdecode(where))
        except (OSError, TypeError):
            return False
        return path == self.folder or path.startswith(self.folder + os.sep)


def _path_of(handle: int) -> str:
    return os.readlink(f"/proc/self/fd/{handle}")


def _opener(disk: Disk, real: Callable[..., Any]) -> Callable[..., Any]:
    """`open` whose files count what is written to them."""

    class Raw(io.FileIO):
        def write(self, content: Any) -> int:
            data = bytes(content)
            disk.happens(self.fileno(), lambda: io.FileIO.write(self, data[: len(data) // 2]))
            return super().write(data)

    def opened(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
        kind = mode.replace("b", "").replace("t", "")
        if isinstance(file, int) or kind not in ("w", "x", "a") or not disk._below(file):
            return real(file, mode, buffering, *rest, **more)
        raw = Raw(file, kind)
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **more)

    return opened


def _connector(disk: Disk, real: Callable[..., Any]) -> Callable[..., Any]:
    """`connect` whose connections count what they commit."""

    class Connection(sqlite3.Connection):
        def __init__(self, database: Any, *rest: Any, **more: Any) -> None:
            super().__init__(database, *rest, **more)
            self.database = database

        def commit(self) -> None:
            try:
                disk.happens(self.database)
            except OSError as error:
                raise sqlite3.OperationalError(AS_SQLITE_SAYS[error.errno or 0]) from None
            super().commit()

    def connected(database: Any, *rest: Any, **more: Any) -> Any:
        return real(database, *rest, **{"factory": Connection, **more})

    return connected
