"""Errors that say what was expected, what came and what to do. This module never imports torch."""

import difflib
import errno
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

UNREADABLE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EIO)  # the file itself may be intact
SHORTEST_PART = 3  # letters that a part of a name needs to stand for the whole name


class UsageError(ValueError):
    """The request cannot be met. The message says what to ask for instead; the command line exits with status 2."""


class MissingLibraryError(UsageError):
    """An optional library is not installed. The message says how to install it."""


class NotFiniteError(ValueError):
    """The input holds NaN or infinite numbers."""


def import_optional(name: str, extra: str) -> ModuleType:
    """Import an optional library, or raise a MissingLibraryError that says how to install it.

    Args:
        name: the module to import, or one inside it.
        extra: the extra of this package that installs it.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        library = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise MissingLibraryError(f'{library} is required: pip install "uncollapse[{extra}]".') from error


@contextmanager
def file_errors(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a reader raises into a UsageError about the file: libraries raise dozens of kinds.

    Args:
        path: the file that is read.
        kind: what it should be, such as ".npz file".
    """
    try:
        yield
    except UsageError:
        raise
    except MemoryError as error:
        raise UsageError(f"{path} needs more memory than there is. Is it a valid {kind}?") from error
    except Exception as error:
        if getattr(error, "errno", None) in UNREADABLE:
            raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from error
        raise UsageError(f"{path} is not a valid {kind}; download or save it again.") from error


def did_you_mean(name: object, names: Iterable[object], most: int = 1) -> str:
    """Return a question with the closest names, to append to an error message; "" if none is close.

    Args:
        name: the name that was asked for.
        names: the names that exist.
        most: how many of them to suggest at most.

    >>> did_you_mean("contranorm", ["pair_norm", "contra_norm"])
    " Did you mean 'contra_norm'?"
    >>> did_you_mean("Rank", ["mean_cosine", "effective_rank"])
    " Did you mean 'effective_rank'?"
    >>> did_you_mean("xyzzy", ["pair_norm", "contra_norm"])
    ''
    """
    known = {_normalize(each): str(each) for each in names}
    asked = _normalize(name)
    close = difflib.get_close_matches(asked, known, n=most)
    if not close and len(asked) >= SHORTEST_PART:
        close = [each for each in known if asked in each][:most]
    return f" Did you mean {' or '.join(repr(known[each]) for each in close)}?" if close else ""


def similar_file(path: Path) -> str:
    """Return a question with the file of the same kind next to a missing one that has the closest name; "" if none."""
    with suppress(OSError):
        return did_you_mean(path.name, [each.name for each in path.parent.iterdir() if each.suffix == path.suffix])
    return ""


def _normalize(name: object) -> str:
    """Remove what is easily mistaken: capitals, and dashes for underscores."""
    return str(name).lower().replace("-", "_")
