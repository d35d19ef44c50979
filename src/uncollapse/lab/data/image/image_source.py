"""Images with their classes from any source, decoded on access; splits of them, and lists of classes."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io.images import UnreadableError
from uncollapse.lab.runs.results import fingerprint

__all__ = ["ImageSet", "ImageSource", "Images", "UnreadableError", "split_images"]


class ImageSource(Protocol):
    """Where images are stored. It can be passed to another process."""

    def __len__(self) -> int: ...

    def image(self, number: int) -> Any:
        """Return an RGB image of Pillow, or raise UnreadableError."""
        ...

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change when the images do."""
        ...


@dataclass(frozen=True)
class Images:
    """Some images of a source. numbers (n,): their indices in it. labels (n,): their class indices."""

    source: ImageSource
    numbers: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    @classmethod
    def all_of(cls, source: ImageSource, labels: Tensor, classes: tuple[str, ...]) -> "Images":
        """Return all images of a source, in their order."""
        return cls(source, torch.arange(len(source)), labels.long(), classes)

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, which: Tensor) -> "Images":
        """Return the images at some indices, in their order."""
        return Images(self.source, self.numbers[which], self.labels[which], self.classes)

    def image(self, at: int) -> Any:
        """Return the image at an index, or raise UnreadableError."""
        return self.source.image(int(self.numbers[at]))

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change when the images, their classes or their order do."""
        own = fingerprint((self.numbers, self.labels))
        return hashlib.sha256(f"{self.source.fingerprint()} {own} {self.classes}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ImageSet:
    """Training and test images of the same classes. facts: what a record says of them."""

    name: str
    train: Images
    test: Images
    facts: dict[str, Any]


def split_images(images: Images, examples: int, holdout: float, seed: int) -> dict[str, Images]:
    """Draw the training images, and images held out to choose settings on.

    Args:
        images: All of them.
        examples: Number of training images; 0: all that are not held out.
        holdout: Share of the examples (of all images, where examples is 0) that is held out; 0: none.
        seed: Seed of the draw.

    Returns:
        The split "train", and "validation" if any images are held out.
    """
    count = len(images)
    held = round(holdout * (examples or count))
    most = count - held
    if examples > most:
        raise UsageError(f"There are {count} training images, too few for examples {examples} and {held} held out.")
    if most < 1 or (holdout and not held):
        raise UsageError(f"holdout {holdout} of {count} images leaves a split empty; use another share, or 0.")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = {"train": images.select(order[held : held + (examples or most)])}
    return parts | ({"validation": images.select(order[:held])} if held else {})


SHOWN = 5  # names in an error message


@dataclass(frozen=True)
class ClassList:
    """List of the classes to use, such as ImageNet-100: the lines of a file without empty ones and comments."""

    path: Path
    lines: tuple[str, ...]

    def classes(self, known: Sequence[str]) -> tuple[str, ...]:
        """Return the classes in the order of the list; an image set must have all of them.

        A line is the name of a class, or starts with it: `n01443537 goldfish`.
        """
        names = set(known)
        found = [line if line in names else line.split()[0] for line in self.lines]
        repeated = [name for name, times in Counter(found).items() if times > 1]
        if repeated:
            raise UsageError(f"{self.path} must name each class once, got {quote_names(repeated)} repeatedly.")
        missing = [name for name in found if name not in names]
        if missing:
            hint = did_you_mean(missing[0], known) or f" There are {quote_names(known)}."
            raise UsageError(f"{self.path} names classes that the images do not have: {quote_names(missing)}.{hint}")
        return tuple(found)

    def facts(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return what a record says of the list. sha256: the first digits of `sha256sum` of the bare names."""
        digest = hashlib.sha256("".join(f"{name}\n" for name in classes).encode()).hexdigest()
        return {"name": self.path.name, "sha256": digest[:16], "classes": len(classes)}


def read_class_list(path: Path) -> ClassList:
    """Read a list from a file. Empty lines and lines that start with # are left out."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"The list of classes {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a list of classes: expected UTF-8 text with one class per line.") from error
    lines = tuple(line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#"))
    if len(lines) < 2:
        raise UsageError(f"{path} must name two or more classes, one per line, got {len(lines)}.")
    return ClassList(path, lines)


def select_classes(images: Images, classes: tuple[str, ...]) -> Images:
    """Return the images of some classes, which are then numbered in this order."""
    numbers = torch.full((len(images.classes),), -1)
    for number, name in enumerate(classes):
        numbers[images.classes.index(name)] = number
    labels = numbers[images.labels]
    kept = labels >= 0
    return Images(images.source, images.numbers[kept], labels[kept], classes)


def quote_names(names: Sequence[str]) -> str:
    """Return some names for a message.

    >>> quote_names(["cat"]), quote_names(list("abcdefg"))
    ("'cat'", "'a', 'b', 'c', 'd', 'e' and 2 more")
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
