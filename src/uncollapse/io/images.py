"""Decode image files, and make batches of images."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from uncollapse.errors import UsageError, import_optional

CROP, STEP = 224, 56  # side of a crop of the built-in photographs, and the distance between two crops


def image_files(folder: Path) -> list[Path]:
    """Return all image files under a folder, by suffix, sorted."""
    found = sorted(
        Path(place) / name
        for place, _, names in os.walk(folder)
        for name in names
        if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
    )
    if not found:
        raise UsageError(f"{folder} has no image files; their names end in {', '.join(sorted(IMAGE_SUFFIXES))}.")
    return found


def open_images(paths: Sequence[Path], unreadable: list[Path]) -> Iterator[Any]:
    """Yield the images of the files in color; files that cannot be read are added to `unreadable`."""
    for path in paths:
        try:
            with path.open("rb") as file:
                image = decode_image(file, str(path))
        except (UnreadableError, OSError):
            unreadable.append(path)
        else:
            yield image
    if len(unreadable) == len(paths):
        raise UsageError(f"None of the {len(paths)} image files can be read, such as {paths[0]}.")


def built_in_crops() -> list[Any]:
    """Return overlapping crops of scikit-learn's two photographs, alternating between them."""
    datasets: Any = import_optional("sklearn.datasets", "data")
    image: Any = import_optional("PIL.Image", "data")
    photographs = [image.fromarray(array) for array in datasets.load_sample_images().images]
    width, height = photographs[0].size
    corners = [(x, y) for y in range(0, height - CROP + 1, STEP) for x in range(0, width - CROP + 1, STEP)]
    return [photo.crop((x, y, x + CROP, y + CROP)) for x, y in corners for photo in photographs]


def image_batches(images: Iterator[Any], read: Callable[[Sequence[Any]], Any], batch_size: int) -> Iterator[Any]:
    """Yield what `read` returns for each batch of images."""
    batch: list[Any] = []
    for image in images:
        batch.append(image)
        if len(batch) == batch_size:
            yield read(batch)
            batch = []
    if batch:
        yield read(batch)


# Other formats are refused whatever the file is called: some of Pillow's readers start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"))
LONGEST = 100  # times the shorter side: a thin line, resized for a model, would fill the memory


class UnreadableError(Exception):
    """An image cannot be read; the message says which one, and why."""


def decode_image(file: IO[bytes], name: str) -> Any:
    """Return the image in color (RGB); UnreadableError, with `name` in its message, if it cannot be read.

    Transparency and the orientation tag are ignored, as in torchvision. Images with more pixels than Pillow considers
    safe are refused before they are decoded.
    """
    pillow: Any = import_optional("PIL.Image", "data")
    pillow.preinit()  # else the first image imports all of Pillow's readers, in each process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about many pixels, palettes and metadata
            with pillow.open(file, formats=FORMATS) as image:
                return _to_rgb(image)
    except pillow.UnidentifiedImageError as error:
        raise UnreadableError(f"{name}: {_describe_unknown(file)}") from error
    except Exception as error:  # a damaged file raises many kinds of errors
        raise UnreadableError(f"{name}: {' '.join(str(error).split()) or type(error).__name__}") from error


def _to_rgb(image: Any) -> Any:
    short, long = sorted(image.size)
    if long > LONGEST * short:
        raise ValueError(f"{image.size[0]} × {image.size[1]} pixels are a line, not an image")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image.convert("RGB")


def _describe_unknown(file: IO[bytes]) -> str:
    file.seek(0)
    return f"not an image in a known format ({', '.join(FORMATS)})" if file.read(1) else "the file is empty"
