"""Pictures with their classes, wherever they are kept; each is decoded when it is asked for."""

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
    """Where pictures are. It can be handed to another process."""

    def __len__(self) -> int: ...

    def image(self, number: int) -> Any:
        """A picture of Pillow in colour; UnreadableError where there is none."""
        ...

    def fingerprint(self) -> str:
        """Hexadecimal digits that change when the pictures do."""
        ...


@dataclass(frozen=True)
class Images:
    """Some pictures of a source. numbers (n,): theirs in it. labels (n,): the numbers of their classes."""

    source: ImageSource
    numbers: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    @classmethod
    def all_of(cls, source: ImageSource, labels: Tensor, classes: tuple[str, ...]) -> "Images":
        """All pictures of a source, in their order."""
        return cls(source, torch.arange(len(source)), labels.long(), classes)

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, which: Tensor) -> "Images":
        """Those at some places, in their order."""
        return Images(self.source, self.numbers[which], self.labels[which], self.classes)

    def image(self, at: int) -> Any:
        """The picture at a place; UnreadableError where it cannot be read."""
        return self.source.image(int(self.numbers[at]))

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the pictures, their classes or their order do."""
        own = fingerprint((self.numbers, self.labels))
        return hashlib.sha256(f"{self.source.fingerprint()} {own} {self.classes}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ImageSet:
    """Pictures to learn from and to be judged by, of the same classes. facts: what a result says of them."""

    name: str
    train: Images
    test: Images
    facts: dict[str, Any]


def split_images(pictures: Images, examples: int, holdout: float, seed: int) -> dict[str, Images]:
    """Draw the pictures to learn from, and those held back to choose settings on.

    Args:
        pictures: all of them.
        examples: how many to learn from; 0: all that are not held back.
        holdout: held back, as a share of the examples (of all pictures, where examples is 0); 0: none.
        seed: of the draw.

    Returns:
        "train", and "validation" if any are held back.
    """
    count = len(pictures)
    held = round(holdout * (examples or count))
    most = count - held
    if examples > most:
        raise UsageError(
            f"There are {count} pictures to learn from, too few for examples {examples} and {held} held back."
        )
    if most < 1 or (holdout and not held):
        raise UsageError(f"holdout {holdout} of {count} pictures leaves a part empty; take another share, or 0.")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = {"train": pictures.select(order[held : held + (examples or most)])}
    return parts | ({"validation": pictures.select(order[:held])} if held else {})


SHOWN = 5  # names in an error


@dataclass(frozen=True)
class ClassList:
    """The lines of a file, without empty ones and comments."""

    path: Path
    lines: tuple[str, ...]

    def classes(self, known: Sequence[str]) -> tuple[str, ...]:
        """The classes in the order of the list, all of which a set has.

        A line is the name of a class, or begins with it: `n01443537 goldfish`.
        """
        names = set(known)
        found = [line if line in names else line.split()[0] for line in self.lines]
        repeated = [name for name, times in Counter(found).items() if times > 1]
        if repeated:
            raise UsageError(f"{self.path} must name each class once, got {quote_names(repeated)} again.")
        missing = [name for name in found if name not in names]
        if missing:
            hint = did_you_mean(missing[0], known) or f" There are {quote_names(known)}."
            raise UsageError(f"{self.path} names classes that the pictures do not have: {quote_names(missing)}.{hint}")
        return tuple(found)

    def facts(self, classes: Sequence[str]) -> dict[str, Any]:
        """What a result says of the list. sha256: the first digits of what `sha256sum` gives for the bare names."""
        digest = hashlib.sha256("".join(f"{name}\n" for name in classes).encode()).hexdigest()
        return {"name": self.path.name, "sha256": digest[:16], "classes": len(classes)}


def read_class_list(path: Path) -> ClassList:
    """The list in a file. Empty lines are left out, and those that begin with #."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"The list of classes {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no list of classes, a text in UTF-8 with one class a line.") from error
    lines = tuple(line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#"))
    if len(lines) < 2:
        raise UsageError(f"{path} must name two classes or more, one a line, got {len(lines)}.")
    return ClassList(path, lines)


def select_classes(pictures: Images, classes: tuple[str, ...]) -> Images:
    """The pictures of some classes, which are then counted in this order."""
    numbers = torch.full((len(pictures.classes),), -1)
    for number, name in enumerate(classes):
        numbers[pictures.classes.index(name)] = number
    labels = numbers[pictures.labels]
    kept = labels >= 0
    return Images(pictures.source, pictures.numbers[kept], labels[kept], classes)


def quote_names(names: Sequence[str]) -> str:
    """Some names for a sentence.

    >>> listed(["cat"]), listed(list("abcdefg"))
    ("'cat'", "'a', 'b', 'c', 'd', 'e' and 2 more")
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
