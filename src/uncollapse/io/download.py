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

OFFLINE = (ConnectionError, TimeoutError, socket.gaierror)  # what lies behind the errors of libraries without network
LENGTH = 150  # letters of an error that are shown


def missing_files(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of the files that are not in the folder."""
    return [name for name in names if not (folder / name).is_file()]


def download_missing(dataset: Any, settings: Mapping[str, Any], folder: Path, page: str) -> None:
    """Fetch those raw files of a PyG data set that a folder does not have.

    Args:
        dataset: the class. It is not initialised, because it would read the files then: only its `download` runs.
        settings: what the class needs to know for that: name and so on.
        folder: gets the files; those that are there are left alone.
        page: where a person finds them.
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
        except Exception as error:  # the network, the proxy, the disk: what helps is the same
            raise UsageError(
                f"{folder} has no {', '.join(wanted)}, and fetching failed ({cause(error)}). Get what is "
                f"missing from {page} and put it there, or name with --data-root a folder that has it, in subfolders "
                "like these."
            ) from error


def cause(error: BaseException) -> str:
    """Why something was not fetched, in a few words.

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
    """The error and those that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
