"""Pictures in files, a folder for each class, as ImageNet comes: `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import torch

from uncollapse.errors import UsageError
from uncollapse.io.images import IMAGE_SUFFIXES, decode_image
from uncollapse.lab.data.image.class_lists import ClassList, listed
from uncollapse.lab.data.image.image_source import Pictures, UnreadableError

PARTS = ("test", "val", "valid", "validation")  # the first one that is there judges
SIZES = 10_000  # files at most whose size is asked for: over a network that takes time
LAYOUT = (
    "train/CLASS/*.JPEG and val/CLASS/*.JPEG, a folder for each class (test, valid or validation may stand for val)"
)


class Files:
    """The pictures in some files below a folder. The names are kept end to end, for there may be millions."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        coded = [os.fsencode(name) for name in names]
        self.folder, self.names = os.fspath(folder), b"".join(coded)
        self.ends = numpy.fromiter(accumulate(map(len, coded), initial=0), "int64", len(coded) + 1)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def path(self, number: int) -> str:
        """Where a picture is."""
        return os.path.join(self.folder, os.fsdecode(self.names[self.ends[number] : self.ends[number + 1]]))

    def picture(self, number: int) -> Any:
        """A picture in colour."""
        path = self.path(number)
        try:
            with open(path, "rb") as file:
                return decode_image(file, path)
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror or error}") from error

    def fingerprint(self) -> str:
        """Of all names, and of the sizes of some files, in even steps."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        sizes = [_size(self.path(number)) for number in range(0, len(self), -(-len(self) // SIZES))]
        digest = hashlib.sha256(self.names)
        digest.update(f"{self.ends.tolist()} {sizes}".encode())
        return digest.hexdigest()[:16]


def read(folder: Path, wanted: ClassList | None = None) -> tuple[Pictures, Pictures, str]:
    """The pictures to learn from and those to be judged by, and the name of the folder that has the latter.

    Args:
        folder: has `train` and one of `PARTS`, with a folder for each class in both.
        wanted: classes to take, in this order; else all, in alphabetical order. Only their folders are looked into.
    """
    there = _folders(folder / "train")
    classes = tuple(there) if wanted is None else wanted.classes(there)
    if len(classes) < 2:
        raise UsageError(f"{folder / 'train'} must have a folder for each of two classes or more, got {len(classes)}.")
    part = next((part for part in PARTS if set(there) & set(_folders(folder / part))), None)
    if part is None:
        raise UsageError(f"{folder} has pictures to learn from, but none to be judged by: expected {LAYOUT}.")
    unknown = [name for name in _folders(folder / part) if name not in set(there)]
    if unknown:
        raise UsageError(f"{folder / part} has classes that train does not have: {listed(unknown)}.")
    return _pictures(folder / "train", classes), _pictures(folder / part, classes), part


def plain(folder: Path) -> Pictures | None:
    """All pictures in a folder and in those within, as one class; None if there are none."""
    there = folder.resolve()
    names = sorted(_files(there.parent, there.name))
    if not names:
        return None
    return Pictures.all_of(Files(there.parent, names), torch.zeros(len(names), dtype=torch.long), (there.name,))


def _pictures(folder: Path, classes: tuple[str, ...]) -> Pictures:
    files = [sorted(_files(folder, name)) for name in classes]
    empty = [name for name, found in zip(classes, files, strict=True) if not found]
    if empty:
        raise UsageError(
            f"{folder} has no pictures of the classes {listed(empty)}. Put some there, remove these folders, or leave "
            f"the classes out with --class-list. Pictures end in {', '.join(sorted(IMAGE_SUFFIXES))}."
        )
    labels = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor([len(found) for found in files]))
    return Pictures.all_of(Files(folder, [name for found in files for name in found]), labels, classes)


def _folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones; none if it is not there."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}.") from error


def _files(folder: Path, name: str) -> Iterator[str]:
    """The pictures of a class, also those in folders within, as names below the folder."""
    start = len(os.fspath(folder)) + 1
    for place, within, names in os.walk(folder / name, onerror=_refuse):
        within[:] = [one for one in within if not one.startswith(".")]
        for one in names:
            if not one.startswith(".") and os.path.splitext(one)[1].lower() in IMAGE_SUFFIXES:
                yield f"{place[start:]}/{one}"


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a class without a folder has no pictures, which is said elsewhere
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}.") from error


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
