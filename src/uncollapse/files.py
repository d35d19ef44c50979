"""Files that are there as a whole or not at all, whoever else writes and whenever the power goes."""

import os
import uuid
from pathlib import Path


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, and its folder if there is none. Another process sees the old content or the new, never a part.

    The content is on the disk before it gets its name, so that a crash leaves the old file. Several processes may write
    the same file: the last one wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{uuid.uuid4().hex}.part")  # a name of its own, and short: the file's own may be long
    try:
        with part.open("xb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # Ctrl-C too leaves no litter
        part.unlink(missing_ok=True)
        raise
    keep_names(path.parent)
    return path


def user_cache() -> Path:
    """Where what can be made or fetched again is kept: UNCOLLAPSE_CACHE, or the user's folder for such files."""
    return Path(os.environ.get("UNCOLLAPSE_CACHE") or "~/.cache/uncollapse").expanduser()


def keep_names(folder: Path) -> None:
    """Bring the names in a folder to the disk: a rename is there once its folder is."""
    if os.name == "posix":  # elsewhere folders cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
