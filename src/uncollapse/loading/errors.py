"""What goes wrong when something is loaded, in a sentence that says what to do."""

import errno
import importlib
from collections.abc import Iterator
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
