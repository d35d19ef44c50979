"""Pictures that are made when they are asked for: three classes, by the channel that is brightest."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from uncollapse.errors import import_optional
from uncollapse.lab.data.image.image_source import Images, UnreadableError

CLASSES = ("red", "green", "blue")


class Made:
    """Some noise in which a channel stands out. broken: numbers of those that cannot be read. asked: for, in order."""

    def __init__(self, count: int, broken: Sequence[int] = (), seed: int = 0) -> None:
        self.count, self.broken, self.seed = count, broken, seed
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def image(self, number: int) -> Any:
        self.asked.append(number)
        if number in self.broken:
            raise UnreadableError(f"picture {number}: torn")
        pixels = numpy.random.default_rng((self.seed, number)).uniform(0, 150, (12, 12, 3))
        pixels[..., number % 3] += 100
        return import_optional("PIL.Image", "data").fromarray(pixels.astype("uint8"))

    def fingerprint(self) -> str:
        return f"{self.count}-{self.broken}-{self.seed}"


def pictures(count: int, broken: Sequence[int] = (), seed: int = 0) -> Images:
    """So many of them."""
    return Images.all_of(Made(count, broken, seed), torch.arange(count) % 3, CLASSES)
