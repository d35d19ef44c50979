"""What goes wrong when something is loaded, in a sentence that says what to do."""

import difflib
import errno
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

NOT_ITS_FAULT = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EIO)  # of a file that cannot be read


class UsageError(ValueError):
    """What was asked for cannot be had. The sentence says what to ask for instead; the command then exits with 2."""


def library(name: str, extra: str) -> ModuleType:
    """Import an optional library, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        raise UsageError(f'{name} is needed for this: pip install "uncollapse[{extra}]".') from error


@contextmanager
def intact(path: Path, kind: str) -> Iterator[None]:
    """Within, whatever a reader raises says that the file is damaged: libraries raise dozens of kinds then.

    Args:
        path: the file that is read.
        kind: what it should be, such as ".npz file".
    """
    try:
        yield
    except UsageError:
        raise
    except MemoryError as error:
        raise UsageError(f"{path} asks for more memory than there is. Is it an intact {kind}?") from error
    except Exception as error:
        if getattr(error, "errno", None) in NOT_ITS_FAULT:
            raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from error
        raise UsageError(f"{path} is no intact {kind}; get it again, or save it anew.") from error


SHORT = 3  # letters that a part of a name has at least, to stand for it


def did_you_mean(name: object, names: Iterable[object], most: int = 1) -> str:
    """A question with the names that are closest, to be put behind a sentence; nothing where none is close.

    Args:
        name: what was asked for.
        names: those there are.
        most: how many are named at most.

    >>> did_you_mean("contranorm", ["pair_norm", "contra_norm"])
    " Did you mean 'contra_norm'?"
    >>> did_you_mean("Rank", ["mean_cosine", "effective_rank"])
    " Did you mean 'effective_rank'?"
    >>> did_you_mean("xyzzy", ["pair_norm", "contra_norm"])
    ''
    """
    there = {_plain(known): str(known) for known in names}
    asked = _plain(name)
    close = difflib.get_close_matches(asked, there, n=most)
    if not close and len(asked) >= SHORT:
        close = [known for known in there if asked in known][:most]
    return f" Did you mean {' or '.join(repr(there[known]) for known in close)}?" if close else ""


def _plain(name: object) -> str:
    """Without what is easily mistaken: capitals, and dashes for underscores."""
    return str(name).lower().replace("-", "_")
