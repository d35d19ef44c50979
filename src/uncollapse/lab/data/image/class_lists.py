"""Lists of the classes that are taken from a set of pictures, such as ImageNet-100: a text file, one class a line."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.data.image.image_source import Pictures

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
            raise UsageError(f"{self.path} must name each class once, got {listed(repeated)} again.")
        missing = [name for name in found if name not in names]
        if missing:
            hint = did_you_mean(missing[0], known) or f" There are {listed(known)}."
            raise UsageError(f"{self.path} names classes that the pictures do not have: {listed(missing)}.{hint}")
        return tuple(found)

    def facts(self, classes: Sequence[str]) -> dict[str, Any]:
        """What a result says of the list. sha256: the first digits of what `sha256sum` gives for the bare names."""
        digest = hashlib.sha256("".join(f"{name}\n" for name in classes).encode()).hexdigest()
        return {"name": self.path.name, "sha256": digest[:16], "classes": len(classes)}


def read(path: Path) -> ClassList:
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


def of_classes(pictures: Pictures, classes: tuple[str, ...]) -> Pictures:
    """The pictures of some classes, which are then counted in this order."""
    numbers = torch.full((len(pictures.classes),), -1)
    for number, name in enumerate(classes):
        numbers[pictures.classes.index(name)] = number
    labels = numbers[pictures.labels]
    kept = labels >= 0
    return Pictures(pictures.source, pictures.numbers[kept], labels[kept], classes)


def listed(names: Sequence[str]) -> str:
    """Some names for a sentence.

    >>> listed(["cat"]), listed(list("abcdefg"))
    ("'cat'", "'a', 'b', 'c', 'd', 'e' and 2 more")
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
