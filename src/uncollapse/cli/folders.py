"""The folders that a command is given, looked at before anything is run."""

import os
from pathlib import Path

from uncollapse.cli import output
from uncollapse.errors import UsageError
from uncollapse.io.files import expand_user


def check(results: Path, runs: Path, data_root: Path | None) -> None:
    """Raise if one of them is a file, and say so if the data sets would be looked for where nothing is."""
    named = {"--results": results, "--runs": runs, "--data-root": data_root}
    for flag, folder in named.items():
        places = () if folder is None else (folder, *folder.parents)
        for place in places:
            if os.path.exists(place) and not os.path.isdir(place):
                raise UsageError(f"{place} is a file; {flag} names a folder.")
    if data_root is not None and not os.path.isdir(expand_user(data_root)):
        output.note(f"The folder {data_root} of --data-root does not exist; data that is fetched goes there.")


def make(results: Path, runs: Path) -> None:
    """Make those that are written to, or raise: a run that took hours has to find them."""
    from uncollapse.lab.runs.run_one import check_writable

    check_writable(results)
    check_writable(runs, "Checkpoints")
