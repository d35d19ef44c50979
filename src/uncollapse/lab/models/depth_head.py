"""From a map of features to the distance of every pixel."""

from torch import Tensor, nn
from torch.nn import functional as F


class DepthHead(nn.Module):
    """Convolutions of 3×3 on a layer's map, which is then scaled bilinearly to the size of the depths.

    Args:
        channels: of the layer.
        side: of the depths, in pixels.
        width: channels in between.
    """

    def __init__(self, channels: int, side: int, width: int = 64) -> None:
        super().__init__()
        self.side = side
        self.before = nn.Sequential(_convolution(channels, width), _convolution(width, width))
        self.after = nn.Sequential(_convolution(width, width), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, features: Tensor) -> Tensor:
        """(b, channels, h, w) -> (b, side, side), in deviations from the mean depth."""
        x = F.interpolate(self.before(features), (self.side, self.side), mode="bilinear")
        depths: Tensor = self.after(x)[:, 0]
        return depths


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))
