"""Random transforms of whole batches with parameters per image, as transforms of torchvision v2.

torchvision's own transforms draw one set of parameters for all images of a batch. These draw one per image, on the
device of the images, so that a large batch costs a few operations. With the same parameters the results are those of
torchvision's functional transforms. Images are (b, 3, height, width) of floats from 0 to 1.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import import_optional

RATIO = (3 / 4, 4 / 3)  # of a crop's sides
GREY = (0.2989, 0.587, 0.114)  # share of each color in the brightness
SPREAD = (0.1, 2.0)  # of a blur, in pixels, as in SimCLR and MoCo v2
KERNEL = 0.1  # of a blur, as a share of the side

Step = Callable[[Tensor], Tensor]


def compose(steps: Sequence[torch.nn.Module]) -> Step:
    """Return several transforms in a row, these and torchvision's own."""
    torchvision_ops.declare()
    v2: Any = import_optional("torchvision.transforms.v2", "timm")
    made: Step = v2.Compose(list(steps))
    return made


class RandomResizedCrop(torch.nn.Module):
    """Crop a random part of each image, of random area and aspect ratio, and resize it to (side, side).

    Like `v2.RandomResizedCrop(antialias=False)`, except that a part which would exceed the image is cut, where
    torchvision draws again.

    Args:
        side: Side of the crops in pixels.
        least_area: Smallest share of the image that a crop shows.
    """

    def __init__(self, side: int, least_area: float = 0.08) -> None:
        super().__init__()
        self.side, self.least_area = side, least_area

    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, height, width) -> (b, 3, side, side)."""
        boxes = self.boxes(len(images), images.shape[-2], images.shape[-1], images.device)
        return resized_crop(images, boxes, self.side)

    def boxes(self, count: int, height: int, width: int, device: torch.device) -> Tensor:
        """Return random boxes (count, 4): top, left, height and width, in whole pixels."""
        draw = torch.rand(4, count, device=device)
        area = height * width * (self.least_area + (1 - self.least_area) * draw[0])
        low, high = (math.log(ratio) for ratio in RATIO)
        ratio = (low + (high - low) * draw[1]).exp()
        tall = (area / ratio).sqrt().round().clamp(1, height)
        wide = (area * ratio).sqrt().round().clamp(1, width)
        top = (draw[2] * (height - tall + 1)).floor()
        left = (draw[3] * (width - wide + 1)).floor()
        return torch.stack([top, left, tall, wide], 1)


def resized_crop(images: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Crop images to boxes (b, 4) of top, left, height and width, and resize them bilinearly to (side, side)."""
    height, width = images.shape[-2:]
    top, left, tall, wide = boxes.to(images.dtype).unbind(1)
    step = (torch.arange(side, device=images.device, dtype=images.dtype) + 0.5) / side
    # clamped, so that pixels are interpolated within the crop and not with its surroundings
    rows = (top[:, None] + (tall[:, None] * step).clamp(min=0.5).minimum(tall[:, None] - 0.5)) * (2 / height) - 1
    columns = (left[:, None] + (wide[:, None] * step).clamp(min=0.5).minimum(wide[:, None] - 0.5)) * (2 / width) - 1
    grid = torch.stack(
        [columns[:, None, :].expand(-1, side, -1), rows[:, :, None].expand(-1, -1, side)], -1
    )  # grid_sample has x first
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


class RandomHorizontalFlip(torch.nn.Module):
    """Flip each image with a probability, like `v2.RandomHorizontalFlip`."""

    def __init__(self, chance: float = 0.5) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same shape."""
        drawn = torch.rand(len(images), device=images.device) < self.chance
        return torch.where(drawn[:, None, None, None], images.flip(-1), images)


class ColorJitter(torch.nn.Module):
    """Jitter brightness, contrast, saturation and hue of each image, in a random order per batch.

    Like `v2.ColorJitter`. Factors are drawn from 1 − strength to 1 + strength, and shifts of the hue from −hue to hue.

    Args:
        strength: Strength for brightness, contrast and saturation.
        hue: Largest shift, as a share of the color circle, at most 0.5.
        chance: Probability that an image is changed at all.
    """

    def __init__(self, strength: float = 0.4, hue: float = 0.4, chance: float = 1.0) -> None:
        super().__init__()
        self.strength, self.hue, self.chance = strength, hue, chance

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same shape."""
        count, device = len(images), images.device
        low = max(0.0, 1 - self.strength)
        factors = low + (1 + self.strength - low) * torch.rand(3, count, device=device)
        turns = (2 * torch.rand(count, device=device) - 1) * self.hue
        changed = torch.rand(count, device=device) < self.chance
        factors, turns = torch.where(changed, factors, 1.0), torch.where(changed, turns, 0.0)
        steps: list[Step] = [
            lambda x: adjust_brightness(x, factors[0]),
            lambda x: adjust_contrast(x, factors[1]),
            lambda x: adjust_saturation(x, factors[2]),
            lambda x: adjust_hue(x, turns),
        ]
        for at in torch.randperm(4).tolist():
            if self.strength if at < 3 else self.hue:
                images = steps[at](images)
        return images


class RandomGrayscale(torch.nn.Module):
    """Turn each image to grayscale with a probability, like `v2.RandomGrayscale`."""

    def __init__(self, chance: float = 0.2) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same shape."""
        drawn = torch.rand(len(images), device=images.device) < self.chance
        return torch.where(drawn[:, None, None, None], rgb_to_grayscale(images).expand_as(images), images)


class RandomGaussianBlur(torch.nn.Module):
    """Blur each image with a probability, by a Gaussian of its own width, like `v2.GaussianBlur`."""

    def __init__(self, side: int, chance: float = 0.5) -> None:
        super().__init__()
        self.reach, self.chance = max(1, round(KERNEL * side / 2)), chance

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same shape."""
        drawn = torch.rand(len(images), device=images.device) < self.chance
        low, high = SPREAD
        spread = low + (high - low) * torch.rand(len(images), device=images.device)
        return torch.where(drawn[:, None, None, None], gaussian_blur(images, spread, self.reach), images)


def rgb_to_grayscale(images: Tensor) -> Tensor:
    """Return grayscale images (b, 1, h, w)."""
    red, green, blue = images.unbind(-3)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue).unsqueeze(-3)


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply each image by its factor."""
    return (images * factors[:, None, None, None]).clamp(0, 1)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend each image with the mean brightness of its pixels."""
    return _blend(images, rgb_to_grayscale(images).mean((-3, -2, -1), keepdim=True), factors)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Blend each image with its grayscale version."""
    return _blend(images, rgb_to_grayscale(images), factors)


def _blend(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    return torch.lerp(other.expand_as(images), images, factors[:, None, None, None]).clamp(0, 1)


def adjust_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Shift the hue of each image by a share of the color circle."""
    red, green, blue = images.unbind(-3)
    top, low = images.amax(-3), images.amin(-3)
    span = top - low
    safe = torch.where(span > 0, span, 1.0)
    hue = torch.where(
        top == red, (green - blue) / safe, torch.where(top == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    )
    hue = hue + 6 * turns[:, None, None]  # in sixths of the circle, of any sign
    # a channel is the maximum minus the span times the distance of the hue from its own, clamped to 0 … 1
    sixth = torch.stack([(hue + shift) % 6 for shift in (5.0, 3.0, 1.0)], -3)
    return top.unsqueeze(-3) - span.unsqueeze(-3) * torch.minimum(sixth, 4 - sixth).clamp(0, 1)


def gaussian_blur(images: Tensor, spread: Tensor, reach: int) -> Tensor:
    """Blur each image with a Gaussian of its own width in pixels; the border is reflected."""
    count, channels = images.shape[:2]
    at = torch.arange(-reach, reach + 1, device=images.device, dtype=images.dtype)
    kernel = torch.softmax(-0.5 * (at / spread[:, None]).square(), -1).repeat_interleave(channels, 0)[:, None]
    x = F.pad(images, (reach,) * 4, mode="reflect").reshape(
        1, count * channels, *(s + 2 * reach for s in images.shape[-2:])
    )
    x = F.conv2d(x, kernel[:, :, :, None], groups=count * channels)
    x = F.conv2d(x, kernel[:, :, None, :], groups=count * channels)
    return x.reshape(images.shape)
