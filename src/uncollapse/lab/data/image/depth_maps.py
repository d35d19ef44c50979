"""Pictures with the distance of every pixel: the labelled part of NYU-Depth-V2, as its authors publish it.

nyu_depth_v2_labeled.mat is an HDF5 file: "images" (n, 3, width, height) of bytes and "depths" (n, width, height) in
metres. Everything that the file declares is checked before anything is read; then a few pictures are read at a time,
cut to squares and made smaller. All of them in full size are never in memory.
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
from uncollapse.lab.runs.records import fingerprint

PAGE = "cs.nyu.edu/~silberman/datasets/nyu_depth_v2.html"
AT_ONCE, PIXELS = 16, 2**24  # pictures that are read together, and their pixels
LARGEST, MOST = 4096, 100_000  # pixels of a side, and pictures
HELD, CHUNK = 4 * 2**30, 2**28  # bytes that may be kept, and that a chunk of the file may have


class Scenes(NamedTuple):
    """images (n, 3, side, side) of bytes, and depths (n, map_side, map_side) in metres."""

    images: Tensor
    depths: Tensor


def read(path: Path, side: int, map_side: int, count: int = 0) -> Scenes:
    """The pictures and depths of a labelled .mat file: the square in the middle of each, at smaller sizes.

    count: take only so many, the first ones; 0: all.
    """
    with _opened(path) as (images, depths):
        there = images.shape[0]
        if count > there:
            raise UsageError(f"{path} has {there} pictures, too few for {count}.")
        count = count or there
        if count * (3 * side**2 + 4 * map_side**2) > HELD:
            raise UsageError(f"{count} pictures of {side} pixels are too many for the memory; take a smaller side.")
        step = max(1, min(AT_ONCE, PIXELS // (images.shape[2] * images.shape[3])))
        groups = (slice(at, min(at + step, count)) for at in range(0, count, step))
        parts = [_reduced(path, images, depths, group, side, map_side) for group in groups]
    return Scenes(torch.cat([part.images for part in parts]), torch.cat([part.depths for part in parts]))


def digest(path: Path) -> str:
    """16 hexadecimal digits of a labelled .mat file's shape, its first picture and its last."""
    with _opened(path) as (images, depths):
        ends = [torch.from_numpy(array[at]) for array in (images, depths) for at in (0, -1)]
        return fingerprint([torch.tensor(images.shape), *ends])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The arrays of images and depths, and sentences in the place of what HDF5 says of a torn file."""
    h5py: Any = import_optional("h5py", "data")
    if not path.is_file():
        raise UsageError(f"There is no {path}. Get nyu_depth_v2_labeled.mat from {PAGE}, or take --data rendered.")
    with file_errors(path, "HDF5 file, as MATLAB writes with -v7.3"), h5py.File(path, "r") as file:
        images, depths = (_dataset(path, file, name) for name in ("images", "depths"))
        _check(path, images, depths)
        yield images, depths


def _dataset(path: Path, file: Any, name: str) -> Any:
    """An array that lies in this very file, not in one that it points to."""
    h5py: Any = import_optional("h5py", "data")
    link = file.get(name, getlink=True)
    if link is None:
        raise UsageError(f"{path} has no array {name!r}; expected images and depths, as nyu_depth_v2_labeled.mat has.")
    found = file[name] if isinstance(link, h5py.HardLink) else None
    if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
        raise UsageError(f"{name} in {path} must be an array in the file itself, and is none or points elsewhere.")
    chunk = numpy.prod(found.chunks or (1,), dtype=float) * found.dtype.itemsize
    if chunk > CHUNK or found.compression not in (None, "gzip", "lzf"):
        raise UsageError(f"{name} in {path} is packed in chunks that are too large, or in an unknown way.")
    return found


def _check(path: Path, images: Any, depths: Any) -> None:
    """Raise unless the shapes and kinds are those of pictures with depths, of bearable sizes and really there."""
    shape = images.shape
    fits = len(shape) == 4 and shape[1] == 3 and depths.shape == (shape[0], *shape[2:])
    kinds = images.dtype == numpy.uint8 and depths.dtype.kind == "f"
    if not fits or not kinds:
        raise UsageError(
            f"{path} must have images (n, 3, width, height) of uint8 and depths (n, width, height) of floats, got "
            f"{images.dtype} {shape} and {depths.dtype} {depths.shape}."
        )
    if not 0 < shape[0] <= MOST or not all(0 < size <= LARGEST for size in shape[2:]):
        raise UsageError(f"{path} must have 1 to {MOST} pictures of up to {LARGEST} pixels a side, got {shape}.")
    if not images.id.get_storage_size() or not depths.id.get_storage_size():
        raise UsageError(f"{path} declares pictures and depths of {shape}, but has none of them.")
    check_unpacked(path, images.nbytes + depths.nbytes)


def _reduced(path: Path, images: Any, depths: Any, group: slice, side: int, map_side: int) -> Scenes:
    """A few scenes: turned from MATLAB's order, cut to the square in the middle, and made smaller."""
    pixels = torch.from_numpy(images[group]).transpose(-1, -2)
    metres = torch.from_numpy(depths[group].astype("float32")).transpose(-1, -2)
    good = (metres.isfinite() & (metres > 0)).flatten(1).all(1)
    if not bool(good.all()):
        wrong = group.start + int((~good).nonzero()[0])
        raise UsageError(
            f"depths in {path} must be metres above 0 at every pixel; those of picture {wrong} are not. "
            "NYU's `depths` are filled in, its `rawDepths` are not."
        )
    small = resized(square(pixels.float()), side).round().clamp(0, 255).to(torch.uint8)
    return Scenes(small, resized(square(metres)[:, None], map_side)[:, 0])


def square(maps: Tensor) -> Tensor:
    """The middle (..., s, s) of maps (..., h, w)."""
    height, width = maps.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return maps[..., top : top + side, left : left + side]


def resized(maps: Tensor, side: int) -> Tensor:
    """Maps (n, c, s, s) at another size; when it is smaller, each pixel is a mean of those that it covers."""
    return F.interpolate(maps, (side, side), mode="bilinear", antialias=True)
