"""Decode image files, and make batches of images."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from uncollapse.errors import UsageError, import_optional

CROP, STEP = 224, 56  # side of a crop of the built-in photographs, and from one to the next


def image_files(folder: Path) -> list[Path]:
    """All files under a folder whose names end as those of images do, sorted."""
    found = sorted(
        Path(place) / name
        for place, _, names in os.walk(folder)
        for name in names
        if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
    )
    if not found:
        raise UsageError(f"{folder} holds no image files: their names end in {', '.join(sorted(IMAGE_SUFFIXES))}.")
    return found


def open_images(paths: Sequence[Path], unreadable: list[Path]) -> Iterator[Any]:
    """The pictures of the files in colour; those that cannot be read are added to `unreadable`."""
    for path in paths:
        try:
            with path.open("rb") as file:
                picture = decode_image(file, str(path))
        except (UnreadableError, OSError):
            unreadable.append(path)
        else:
            yield picture
    if len(unreadable) == len(paths):
        raise UsageError(f"None of the {len(paths)} image files can be read, such as {paths[0]}.")


def built_in_crops() -> list[Any]:
    """Overlapping crops of scikit-learn's two photographs, first of one, then of the other, in turns."""
    datasets: Any = import_optional("sklearn.datasets", "data")
    image: Any = import_optional("PIL.Image", "data")
    photographs = [image.fromarray(array) for array in datasets.load_sample_images().images]
    width, height = photographs[0].size
    corners = [(x, y) for y in range(0, height - CROP + 1, STEP) for x in range(0, width - CROP + 1, STEP)]
    return [photo.crop((x, y, x + CROP, y + CROP)) for x, y in corners for photo in photographs]


def image_batches(pictures: Iterator[Any], read: Callable[[Sequence[Any]], Any], batch_size: int) -> Iterator[Any]:
    """What `read` makes of so many pictures at a time."""
    gathered: list[Any] = []
    for picture in pictures:
        gathered.append(picture)
        if len(gathered) == batch_size:
            yield read(gathered)
            gathered = []
    if gathered:
        yield read(gathered)


# Others are refused whatever their files are called: some of Pillow's readers start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"))
LONGEST = 100  # times the shorter side: scaled to a model's side, a thin line would fill the memory


class UnreadableError(Exception):
    """A picture cannot be read; says which one, and why."""


def decode_image(file: IO[bytes], name: str) -> Any:
    """The picture in colour (RGB); UnreadableError, which calls it `name`, if it cannot be read.

    Transparency is left out, and a note that the picture is to be turned is not followed, as in torchvision. Pictures
    with more pixels than Pillow takes for honest are refused before they are decoded.
    """
    image: Any = import_optional("PIL.Image", "data")
    image.preinit()  # else the first picture imports all of Pillow's readers, in each process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about many pixels, palettes, notes of cameras
            with image.open(file, formats=FORMATS) as picture:
                return _coloured(picture)
    except image.UnidentifiedImageError as error:
        raise UnreadableError(f"{name}: {_unknown(file)}") from error
    except Exception as error:  # a damaged file makes Pillow raise a dozen kinds
        raise UnreadableError(f"{name}: {' '.join(str(error).split()) or type(error).__name__}") from error


def _coloured(picture: Any) -> Any:
    short, long = sorted(picture.size)
    if long > LONGEST * short:
        raise ValueError(f"{picture.size[0]} × {picture.size[1]} pixels are a line, not a picture")
    if picture.mode == "F":
        raise ValueError("pixels are decimal numbers, whose range is not known; save it with 8 or 16 bits")
    if picture.mode.startswith("I"):  # 16 bits, of which Pillow would cut off all above 255
        picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return picture.convert("RGB")


def _unknown(file: IO[bytes]) -> str:
    file.seek(0)
    return f"no picture in a known format ({', '.join(FORMATS)})" if file.read(1) else "the file is empty"
