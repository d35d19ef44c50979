"""Simple rooms with the true distance of every pixel: a floor, a wall and a few boxes, seen by a camera.

They stand in for NYU-Depth-V2 where its 2.8 GB are not at hand, to see that all of a recipe works. Colours and sizes of
things say nothing about their distance; where things stand on the floor, how they hide each other and how they grow
dimmer far from the camera's lamp does.
"""

import torch
from torch import Tensor

from uncollapse.lab.data.image.depth_maps import Scenes, resized

SEED = 0  # the scenes are the same in every run
EYE, FIELD = 1.4, 0.7  # metres of the camera above the floor, and half of the width that it sees at one metre
WALL, BOXES = (4.0, 9.0), 4  # metres to the wall, and the most boxes
LAMP, NOISE = 6.0, 0.02  # metres at which the light is half as strong, and the camera's noise


def rendered(count: int, side: int, map_side: int) -> Scenes:
    """So many scenes. The first ones are the same however many there are."""
    found = [_scene(number, side) for number in range(count)]
    images, depths = (torch.stack(parts) for parts in zip(*found, strict=True))
    return Scenes(images, resized(depths[:, None], map_side)[:, 0])


def _scene(number: int, side: int) -> tuple[Tensor, Tensor]:
    """A picture (3, side, side) of bytes, and the distance along the camera's axis (side, side) in metres."""
    draw = torch.Generator().manual_seed(1_000_003 * SEED + number)
    rays = _rays(side)
    wall = _between(*WALL, draw)
    surfaces = [(_plane(rays[1], -EYE), 0.8), (_plane(rays[2], float(wall)), 1.0)]  # depths, and how light falls on it
    boxes = int(torch.randint(1, BOXES + 1, (), generator=draw))
    surfaces += [(_box(rays, *_place(float(wall), draw)), 0.6) for _ in range(boxes)]
    colours = 0.25 + 0.75 * torch.rand(len(surfaces), 3, generator=draw)
    depth, nearest = torch.stack([surface for surface, _ in surfaces]).min(0)
    light = torch.tensor([share for _, share in surfaces])[nearest] / (1 + (depth / LAMP).square())
    picture = colours[nearest].permute(2, 0, 1) * light
    picture = picture + NOISE * torch.randn(picture.shape, generator=draw)
    return (255 * picture.clamp(0, 1)).round().to(torch.uint8), depth


def _rays(side: int) -> Tensor:
    """(3, side, side): right, up and ahead by 1, where each pixel looks."""
    at = FIELD * ((2 * torch.arange(side) + 1) / side - 1)
    up, right = torch.meshgrid(-at, at, indexing="ij")
    return torch.stack([right, up, torch.ones_like(up)])


def _plane(towards: Tensor, distance: float) -> Tensor:
    """Depths at which rays reach a plane; infinite where they never do."""
    depth = distance / towards
    return torch.where(depth > 0, depth, torch.inf)


def _box(rays: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Depths at which rays enter a box with these corners (3,); infinite where they miss it."""
    ends = torch.stack([corner[:, None, None] / rays for corner in (low, high)])
    enter, leave = ends.amin(0).amax(0), ends.amax(0).amin(0)
    return torch.where((enter <= leave) & (enter > 0), enter, torch.inf)


def _place(wall: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """The corners of a box that stands on the floor, between the camera and the wall."""
    size = 0.3 + 1.2 * torch.rand(3, generator=draw)
    ahead = float(_between(1.5, max(1.6, wall - float(size[2])), draw))
    aside = float(_between(-0.9, 0.9, draw)) * FIELD * ahead - float(size[0]) / 2
    low = torch.tensor([aside, -EYE, ahead])
    return low, low + size


def _between(low: float, high: float, draw: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand((), generator=draw)
