"""Pictures with their classes, wherever they are kept; each is decoded when it is asked for."""

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.io.images import UnreadableError
from uncollapse.lab.runs.records import fingerprint

__all__ = ["ImageSet", "Pictures", "Source", "UnreadableError", "split"]


class Source(Protocol):
    """Where pictures are. It can be handed to another process."""

    def __len__(self) -> int: ...

    def picture(self, number: int) -> Any:
        """A picture of Pillow in colour; UnreadableError where there is none."""
        ...

    def fingerprint(self) -> str:
        """Hexadecimal digits that change when the pictures do."""
        ...


@dataclass(frozen=True)
class Pictures:
    """Some pictures of a source. numbers (n,): theirs in it. labels (n,): the numbers of their classes."""

    source: Source
    numbers: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    @classmethod
    def all_of(cls, source: Source, labels: Tensor, classes: tuple[str, ...]) -> "Pictures":
        """All pictures of a source, in their order."""
        return cls(source, torch.arange(len(source)), labels.long(), classes)

    def __len__(self) -> int:
        return len(self.numbers)

    def chosen(self, which: Tensor) -> "Pictures":
        """Those at some places, in their order."""
        return Pictures(self.source, self.numbers[which], self.labels[which], self.classes)

    def picture(self, at: int) -> Any:
        """The picture at a place; UnreadableError where it cannot be read."""
        return self.source.picture(int(self.numbers[at]))

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the pictures, their classes or their order do."""
        own = fingerprint((self.numbers, self.labels))
        return hashlib.sha256(f"{self.source.fingerprint()} {own} {self.classes}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ImageSet:
    """Pictures to learn from and to be judged by, of the same classes. facts: what a result says of them."""

    name: str
    train: Pictures
    test: Pictures
    facts: dict[str, Any]


def split(pictures: Pictures, examples: int, holdout: float, seed: int) -> dict[str, Pictures]:
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
    parts = {"train": pictures.chosen(order[held : held + (examples or most)])}
    return parts | ({"validation": pictures.chosen(order[:held])} if held else {})
