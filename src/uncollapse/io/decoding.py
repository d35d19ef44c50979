"""A file or bytes -> a picture."""

import warnings
from typing import IO, Any

from uncollapse.errors import import_optional

# Others are refused whatever their files are called: some of Pillow's readers start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
ENDINGS = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"))
LONGEST = 100  # times the shorter side: scaled to a model's side, a thin line would fill the memory


class UnreadableError(Exception):
    """A picture cannot be read; says which one, and why."""


def decoded(file: IO[bytes], name: str) -> Any:
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
