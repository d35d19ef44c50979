"""The small AlexNet that Wang & Isola (arXiv 2005.10242) train on STL-10, in any width and for any side."""

from collections.abc import Iterator

import torch
from torch import nn

from uncollapse.errors import UsageError
from uncollapse.lab.models.layered import LayeredEncoder

CONVOLUTIONS, HIDDEN = (96, 192, 384, 384, 192), 4096  # channels and features at full width
POOLED = (1, 2, 5)  # convolutions that a pool of 3×3 at every second pixel follows
ALEXNET_LAYERS = (*(f"conv{number}" for number in range(1, 6)), "fc6", "fc7", "output")
LEAST_SIDE = 15  # pixels: a smaller picture is gone after three pools


class SmallAlexNet(LayeredEncoder):
    """Five convolutions of 3×3, two layers of features and a linear output, each but the last with BatchNorm and ReLU.

    Its parts are named as in `LAYERS`.

    Args:
        dim: features of the output.
        side: of the pictures, in pixels.
        width: factor of all channels and features but the output's.
        channels: of the pictures.
    """

    names = ALEXNET_LAYERS

    def __init__(self, dim: int = 128, side: int = 64, width: float = 1.0, channels: int = 3) -> None:
        super().__init__()
        if side < LEAST_SIDE:
            raise UsageError(f"A small AlexNet takes pictures of at least {LEAST_SIDE} pixels, got {side}.")
        self.dim, self.side, self.width = dim, side, width
        sizes = [channels, *(scale_size(size, width) for size in CONVOLUTIONS)]
        for number in range(1, 6):
            self.add_module(f"conv{number}", _convolution(sizes[number - 1], sizes[number], number in POOLED))
            side = (side - 3) // 2 + 1 if number in POOLED else side
        hidden = scale_size(HIDDEN, width)
        self.fc6 = nn.Sequential(nn.Flatten(), *_features(sizes[-1] * side * side, hidden))
        self.fc7 = nn.Sequential(*_features(hidden, hidden))
        self.output = nn.Linear(hidden, dim)
        self.penultimate = hidden
        _begin(self)


def scale_size(size: int, width: float) -> int:
    """A size at another width, at least 1."""
    return max(1, round(size * width))


def _convolution(inputs: int, outputs: int, pooled: bool) -> nn.Sequential:
    pool = [nn.MaxPool2d(3, 2)] if pooled else []
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), *pool)


def _features(inputs: int, outputs: int) -> Iterator[nn.Module]:
    yield nn.Linear(inputs, outputs, bias=False)
    yield nn.BatchNorm1d(outputs)
    yield nn.ReLU(inplace=True)


@torch.no_grad()
def _begin(model: nn.Module) -> None:
    """Weights by Kaiming, which keeps the spread of what passes through ReLUs."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
