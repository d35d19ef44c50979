"""The file of a study: whether it can be used, and what is wrong with it in a sentence."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError, import_optional

PATIENCE = 20.0  # seconds to wait for somebody else who reads or writes the file


def check(file: Path) -> None:
    """Raise now if a file is torn: later on, it might be found in the middle of a trial."""
    if not file.exists():
        return
    with telling(file):
        connection = sqlite3.connect(file, timeout=PATIENCE)
        try:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        finally:
            connection.close()
        if found != "ok":
            raise sqlite3.DatabaseError(found)


@contextmanager
def telling(file: Path | None) -> Iterator[None]:
    """What goes wrong with the file of a study, in a sentence."""
    if file is None:
        yield
        return
    broken: Any = import_optional("sqlalchemy.exc", "tune").SQLAlchemyError
    optuna: Any = import_optional("optuna", "tune")
    try:
        yield
    except (sqlite3.Error, broken, optuna.exceptions.StorageInternalError, OSError) as error:
        why = _root(error)
        raise UsageError(f"The study {file} cannot be used: {why}. {_remedy(why)}") from error
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # it is SQLite, and not what Optuna wrote
        why = str(error).partition("\n")[0]
        raise UsageError(f"{file} is no study that can be gone on with: {why}. Move it away to begin anew.") from error


def _root(error: BaseException) -> str:
    """What SQLite itself said, below what libraries made of it."""
    found: BaseException = error
    while found.__cause__ is not None and not isinstance(found, sqlite3.Error):
        found = found.__cause__
    return str(found).partition("\n")[0]


def _remedy(why: str) -> str:
    """What to do about it."""
    if "locked" in why:
        return "Another process writes to it; wait for that."
    if "full" in why or "I/O" in why:
        return "Make room on the disk; the same command goes on then."
    if "readonly" in why or "unable to open" in why:
        return "Name a folder that can be written to."
    return "If it is torn, move it away to begin anew."
