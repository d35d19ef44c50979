"""Pictures packed into one .npz file: `data` (the bytes of all image files), `offsets`, `labels`, `classes`."""

import hashlib
import io
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from uncollapse.errors import UsageError, file_errors
from uncollapse.io.images import decode_image
from uncollapse.io.tensor_files import check_growth, read_member, read_npz
from uncollapse.lab.data.image.image_source import Pictures

ARRAYS = ("data", "offsets", "labels")
SPARE = 2**26  # bytes that a small file may unpack to: image files do not shrink when they are packed


class Packed:
    """The pictures of a file: number i has the bytes offsets[i] to offsets[i + 1] of `data`."""

    def __init__(self, name: str, data: NDArray[Any], offsets: NDArray[Any]) -> None:
        self.name, self.data, self.offsets = name, data, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def picture(self, number: int) -> Any:
        """A picture in colour."""
        content = self.data[self.offsets[number] : self.offsets[number + 1]].tobytes()
        return decode_image(io.BytesIO(content), f"picture {number} of {self.name}")

    def fingerprint(self) -> str:
        """Of all bytes."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(numpy.ascontiguousarray(self.data).data)
        digest.update(numpy.ascontiguousarray(self.offsets).data)
        return digest.hexdigest()[:16]


def read(path: Path) -> Pictures:
    """All pictures of a file, which is checked. They are decoded later, so one may yet turn out to be unreadable."""
    check_growth(path, SPARE)
    data, offsets, labels = read_npz(path, ARRAYS).values()
    classes = _classes(path)
    _check_pictures(path, data, offsets)
    count = len(offsets) - 1
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise UsageError(f"{path} must have in labels {count} whole numbers, got {labels.dtype} of {labels.shape}.")
    if not 0 <= labels.min() <= labels.max() < len(classes):
        raise UsageError(f"{path} has {len(classes)} classes, and labels {labels.min()} … {labels.max()}.")
    source = Packed(path.name, data, offsets)
    return Pictures.all_of(source, torch.from_numpy(labels.astype("int64")), classes)


def _classes(path: Path) -> tuple[str, ...]:
    with file_errors(path, "file of packed pictures"), zipfile.ZipFile(path) as file:
        found = read_member(file, "classes") if "classes.npy" in file.namelist() else None
    if found is None or found.dtype.kind != "U" or found.ndim != 1:
        got = "none" if found is None else f"{found.dtype} of {found.shape}"
        raise UsageError(f"{path} must have in classes their names, texts (classes,), got {got}.")
    classes = tuple(map(str, found))
    if len(set(classes)) != len(classes):
        raise UsageError(f"{path} must have in classes each name once.")
    return classes


def _check_pictures(path: Path, data: NDArray[Any], offsets: NDArray[Any]) -> None:
    if data.ndim != 1 or data.dtype != numpy.uint8:
        raise UsageError(f"{path} must have in data bytes, uint8 (bytes,), got {data.dtype} of {data.shape}.")
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
        raise UsageError(
            f"{path} must have in offsets whole numbers (pictures + 1,), got {offsets.dtype} of {offsets.shape}."
        )
    if offsets[0] < 0 or offsets[-1] > len(data) or (offsets[1:] < offsets[:-1]).any():
        raise UsageError(f"{path} must have in offsets numbers that never fall, from 0 to at most {len(data)}.")
