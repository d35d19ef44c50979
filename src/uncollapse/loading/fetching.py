"""Raw files of data sets, fetched by PyG into a folder."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from uncollapse.files import write
from uncollapse.loading.errors import UsageError
from uncollapse.loading.quiet import quiet


def missing_files(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of the files that are not in the folder."""
    return [name for name in names if not (folder / name).is_file()]


def complete(dataset: Any, settings: Mapping[str, Any], folder: Path, page: str) -> None:
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
            with quiet():
                files.download()
            for name in wanted:
                write(folder / name, (Path(files.raw_dir) / name).read_bytes())
        except Exception as error:  # the network, the proxy, the disk: what helps is the same
            raise UsageError(
                f"{', '.join(wanted[:2])}{f' and {len(wanted) - 2} more' if len(wanted) > 2 else ''} cannot be fetched "
                f"now. Get the files from {page} and put them into {folder}, or name the folder that has them with "
                "--data-root."
            ) from error
