"""Encoders made of parts that are called one after the other, what each of them gives being asked for by name."""

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn

from uncollapse.errors import UsageError, did_you_mean


class LayeredEncoder(nn.Module):
    """An encoder of images.

    names: of its parts, in the order in which they are called; the last is the output, and the one before it has the
    features that are judged.
    """

    names: ClassVar[tuple[str, ...]]

    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, h, w) -> (b, dim), not of length one yet."""
        output = self.names[-1]
        return self.layers(images, (output,))[output]

    def layers(self, images: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """What some of the parts give, by name: maps (b, c, h, w), or features (b, d). Later ones are not called."""
        wanted = set(names)
        if unknown := wanted - set(self.names):
            hint = did_you_mean(min(unknown), self.names)
            raise UsageError(f"The encoder has no layer {min(unknown)!r}.{hint} There are: {', '.join(self.names)}.")
        found, x = {}, images
        for name in self.names[: 1 + max(map(self.names.index, wanted), default=-1)]:
            x = self.get_submodule(name)(x)
            if name in wanted:
                found[name] = x
        return found
