"""Arrays of an .npz file, numbers only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from uncollapse.loading.errors import UsageError


def read_npz(path: Path, wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The wanted arrays of a file, which are numbers or truth values. Nothing in it can run."""
    try:
        with numpy.load(path, allow_pickle=False) as file:
            there = ", ".join(file)
            arrays = {key: file[key] for key in wanted if key in file}
    except Exception as error:  # a torn file makes zipfile, zlib and numpy raise a dozen kinds
        raise UsageError(f"{path} is no intact .npz file of numbers.") from error
    missing = [key for key in wanted if key not in arrays]
    if missing:
        raise UsageError(f"{path} must have {' and '.join(wanted)}. There are: {there}.")
    for key, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise UsageError(f"{path} must have numbers in {key}, got {array.dtype}.")
    return arrays
