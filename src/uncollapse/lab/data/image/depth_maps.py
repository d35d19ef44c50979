"""Images with depth maps: the labeled part of NYU-Depth-V2, as its authors publish it, and rendered rooms.

nyu_depth_v2_labeled.mat is an HDF5 file: "images" (n, 3, width, height) of bytes and "depths" (n, width, height) in
metres. Everything that the file declares is checked before anything is read; then a few images are read at a time, cut
to squares and downsized. They are never all in memory at full size.

Rendered rooms have a floor, a wall and a few boxes, seen by a camera. They replace NYU-Depth-V2 where its 2.8 GB are
not available, to check that a recipe works. Colors and sizes of things are unrelated to their distance; where they
stand on the floor, how they occlude each other and how light falls off with distance are not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from uncollapse.errors import UsageError, file_errors, import_optional
from uncollapse.io.tensor_files import check_unpacked
from uncollapse.lab.runs.results import fingerprint

PAGE = "cs.nyu.edu/~silberman/datasets/nyu_depth_v2.html"
AT_ONCE, PIXELS = 16, 2**24  # images that are read together, and their pixels
LARGEST, MOST = 4096, 100_000  # pixels of a side, and images
HELD, CHUNK = 4 * 2**30, 2**28  # largest bytes of all scenes, and of a chunk of the file


class Scenes(NamedTuple):
    """Images (n, 3, side, side) of bytes, and depths (n, map_side, map_side) in metres."""

    images: Tensor
    depths: Tensor


def read_scenes(path: Path, side: int, map_side: int, count: int = 0) -> Scenes:
    """Read images and depths of a labeled .mat file: the centre square of each, downsized.

    count: read only the first ones; 0: all.
    """
    with _open_arrays(path) as (images, depths):
        there = images.shape[0]
        if count > there:
            raise UsageError(f"{path} has {there} images, too few for {count}.")
        count = count or there
        if count * (3 * side**2 + 4 * map_side**2) > HELD:
            raise UsageError(f"{count} images of {side} pixels do not fit into memory; use a smaller side.")
        step = max(1, min(AT_ONCE, PIXELS // (images.shape[2] * images.shape[3])))
        groups = (slice(at, min(at + step, count)) for at in range(0, count, step))
        parts = [_read_group(path, images, depths, group, side, map_side) for group in groups]
    return Scenes(torch.cat([part.images for part in parts]), torch.cat([part.depths for part in parts]))


def file_digest(path: Path) -> str:
    """Return 16 hexadecimal digits of a labeled .mat file's shape, its first image and its last."""
    with _open_arrays(path) as (images, depths):
        ends = [torch.from_numpy(array[at]) for array in (images, depths) for at in (0, -1)]
        return fingerprint([torch.tensor(images.shape), *ends])


@contextmanager
def _open_arrays(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the arrays of images and depths; errors of HDF5 about a damaged file become UsageErrors."""
    h5py: Any = import_optional("h5py", "data")
    if not path.is_file():
        raise UsageError(f"There is no {path}. Get nyu_depth_v2_labeled.mat from {PAGE}, or use --data rendered.")
    with file_errors(path, "HDF5 file, as MATLAB writes with -v7.3"), h5py.File(path, "r") as file:
        images, depths = (_dataset(path, file, name) for name in ("images", "depths"))
        _check(path, images, depths)
        yield images, depths


def _dataset(path: Path, file: Any, name: str) -> Any:
    """Return an array of this file itself, not of one that it links to."""
    h5py: Any = import_optional("h5py", "data")
    link = file.get(name, getlink=True)
    if link is None:
        raise UsageError(f"{path} has no array {name!r}; expected images and depths, as nyu_depth_v2_labeled.mat has.")
    found = file[name] if isinstance(link, h5py.HardLink) else None
    if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
        raise UsageError(f"{name} in {path} must be an array in the file itself, not a link or another object.")
    chunk = numpy.prod(found.chunks or (1,), dtype=float) * found.dtype.itemsize
    if chunk > CHUNK or found.compression not in (None, "gzip", "lzf"):
        raise UsageError(f"{name} in {path} has chunks that are too large, or an unknown compression.")
    return found


def _check(path: Path, images: Any, depths: Any) -> None:
    """Raise unless shapes and types are those of images with depths, of acceptable sizes, and the data exists."""
    shape = images.shape
    fits = len(shape) == 4 and shape[1] == 3 and depths.shape == (shape[0], *shape[2:])
    kinds = images.dtype == numpy.uint8 and depths.dtype.kind == "f"
    if not fits or not kinds:
        raise UsageError(
            f"{path} must have images (n, 3, width, height) of uint8 and depths (n, width, height) of floats, got "
            f"{images.dtype} {shape} and {depths.dtype} {depths.shape}."
        )
    if not 0 < shape[0] <= MOST or not all(0 < size <= LARGEST for size in shape[2:]):
        raise UsageError(f"{path} must have 1 to {MOST} images of up to {LARGEST} pixels per side, got {shape}.")
    if not images.id.get_storage_size() or not depths.id.get_storage_size():
        raise UsageError(f"{path} declares images and depths of {shape}, but has no data for them.")
    check_unpacked(path, images.nbytes + depths.nbytes)


def _read_group(path: Path, images: Any, depths: Any, group: slice, side: int, map_side: int) -> Scenes:
    """Read a few scenes: transposed from MATLAB's order, cut to the centre square, and downsized."""
    pixels = torch.from_numpy(images[group]).transpose(-1, -2)
    metres = torch.from_numpy(depths[group].astype("float32")).transpose(-1, -2)
    good = (metres.isfinite() & (metres > 0)).flatten(1).all(1)
    if not bool(good.all()):
        wrong = group.start + int((~good).nonzero()[0])
        raise UsageError(
            f"depths in {path} must be metres above 0 at every pixel; those of image {wrong} are not. "
            "NYU's `depths` are filled in, its `rawDepths` are not."
        )
    small = resize_maps(center_square(pixels.float()), side).round().clamp(0, 255).to(torch.uint8)
    return Scenes(small, resize_maps(center_square(metres)[:, None], map_side)[:, 0])


def center_square(maps: Tensor) -> Tensor:
    """Return the centre square (..., s, s) of maps (..., h, w)."""
    height, width = maps.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return maps[..., top : top + side, left : left + side]


def resize_maps(maps: Tensor, side: int) -> Tensor:
    """Resize maps (n, c, s, s); when downsizing, each pixel is the mean of those that it covers."""
    return F.interpolate(maps, (side, side), mode="bilinear", antialias=True)


SEED = 0  # the scenes are the same in every run
EYE, FIELD = 1.4, 0.7  # height of the camera in metres, and half of the width that it sees at one metre
WALL, BOXES = (4.0, 9.0), 4  # metres to the wall, and the largest number of boxes
LAMP, NOISE = 6.0, 0.02  # distance in metres at which the light is half as strong, and the camera's noise


def render_scenes(count: int, side: int, map_side: int) -> Scenes:
    """Render `count` scenes. The first ones are the same for any count."""
    found = [_scene(number, side) for number in range(count)]
    images, depths = (torch.stack(parts) for parts in zip(*found, strict=True))
    return Scenes(images, resize_maps(depths[:, None], map_side)[:, 0])


def _scene(number: int, side: int) -> tuple[Tensor, Tensor]:
    """Return an image (3, side, side) of bytes, and the depth (side, side) along the camera's axis in metres."""
    draw = torch.Generator().manual_seed(1_000_003 * SEED + number)
    rays = _rays(side)
    wall = _between(*WALL, draw)
    surfaces = [(_plane(rays[1], -EYE), 0.8), (_plane(rays[2], float(wall)), 1.0)]  # depths, and how light falls on it
    boxes = int(torch.randint(1, BOXES + 1, (), generator=draw))
    surfaces += [(_box(rays, *_place(float(wall), draw)), 0.6) for _ in range(boxes)]
    colors = 0.25 + 0.75 * torch.rand(len(surfaces), 3, generator=draw)
    depth, nearest = torch.stack([surface for surface, _ in surfaces]).min(0)
    light = torch.tensor([share for _, share in surfaces])[nearest] / (1 + (depth / LAMP).square())
    image = colors[nearest].permute(2, 0, 1) * light
    image = image + NOISE * torch.randn(image.shape, generator=draw)
    return (255 * image.clamp(0, 1)).round().to(torch.uint8), depth


def _rays(side: int) -> Tensor:
    """Return the rays (3, side, side) of all pixels: right, up, and 1 ahead."""
    at = FIELD * ((2 * torch.arange(side) + 1) / side - 1)
    up, right = torch.meshgrid(-at, at, indexing="ij")
    return torch.stack([right, up, torch.ones_like(up)])


def _plane(towards: Tensor, distance: float) -> Tensor:
    """Return the depths at which rays reach a plane; infinite where they never do."""
    depth = distance / towards
    return torch.where(depth > 0, depth, torch.inf)


def _box(rays: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the depths at which rays enter a box with these corners (3,); infinite where they miss it."""
    ends = torch.stack([corner[:, None, None] / rays for corner in (low, high)])
    enter, leave = ends.amin(0).amax(0), ends.amax(0).amin(0)
    return torch.where((enter <= leave) & (enter > 0), enter, torch.inf)


def _place(wall: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the corners of a box that stands on the floor, between the camera and the wall."""
    size = 0.3 + 1.2 * torch.rand(3, generator=draw)
    ahead = float(_between(1.5, max(1.6, wall - float(size[2])), draw))
    aside = float(_between(-0.9, 0.9, draw)) * FIELD * ahead - float(size[0]) / 2
    low = torch.tensor([aside, -EYE, ahead])
    return low, low + size


def _between(low: float, high: float, draw: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand((), generator=draw)
