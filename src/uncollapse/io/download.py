"""Download raw files of datasets into a folder with PyG."""

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError
from uncollapse.io.files import write
from uncollapse.io.loading import silence_libraries

OFFLINE = (ConnectionError, TimeoutError, socket.gaierror)  # the causes of libraries' errors without a network
LENGTH = 150  # characters of an error that are shown


def missing_files(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the names of the files that are not in the folder."""
    return [name for name in names if not (folder / name).is_file()]


def download_missing(dataset: Any, settings: Mapping[str, Any], folder: Path, page: str) -> None:
    """Download the raw files of a PyG dataset that a folder lacks.

    Args:
        dataset: The class. It is not initialized, which would read the files; only its `download` runs.
        settings: Attributes that `download` needs, such as the name.
        folder: Where the files go; existing ones are not changed.
        page: Where a user finds the files, for the error.
    """
    files = dataset.__new__(dataset)
    with tempfile.TemporaryDirectory() as scratch:
        vars(files).update(settings, root=scratch)
        wanted = missing_files(folder, files.raw_file_names)
        if not wanted:
            return
        try:
            os.makedirs(files.raw_dir)
            with silence_libraries():
                files.download()
            for name in wanted:
                write(folder / name, (Path(files.raw_dir) / name).read_bytes())
        except Exception as error:  # network, proxy or disk: the advice is the same
            raise UsageError(
                f"{folder} has no {', '.join(wanted)}, and the download failed ({cause(error)}). Get the "
                f"missing files from {page} and put them there, or use --data-root with a folder that has them in the "
                "same subfolders."
            ) from error


def cause(error: BaseException) -> str:
    """Return why a download failed, in a few words.

    >>> cause(ConnectionRefusedError(111, "Connection refused")), cause(OSError(28, "No space left on device"))
    ('no network: Connection refused', 'No space left on device')
    """
    offline = next((one for one in _chain(error) if isinstance(one, OFFLINE)), None)
    if offline is not None:
        return f"no network: {_words(offline)}"
    return f"not found: {error}" if isinstance(error, FileNotFoundError) else _words(error)


def _words(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return " ".join(str(text).split()).rstrip(".")[:LENGTH] or type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
