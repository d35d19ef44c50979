"""What becomes of image files of all kinds, sound and damaged."""

import io
import random
import struct
import warnings
import zlib
from typing import Any

import numpy
import pytest
from PIL import Image

from uncollapse.io.images import FORMATS, IMAGE_SUFFIXES, UnreadableError, decode_image

NOISE = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (16, 16, 3), "uint8"))


def content(color: tuple[int, ...] = (200, 30, 30), side: int = 8, form: str = "PNG", mode: str = "RGB") -> bytes:
    """The bytes of an image file of one color."""
    return saved(Image.new(mode, (side, side), color if len(color) > 1 else color[0]), form)


def saved(picture: Any, form: str = "PNG", **settings: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **settings)
    return file.getvalue()


def read(data: bytes) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said on the way
        return decode_image(io.BytesIO(data), "x.png")


def declared(width: int, height: int) -> bytes:
    """A PNG that only says how large it is."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + body + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_in_color(form: str) -> None:
    found = read(content((200, 30, 30), form=form))
    assert (found.mode, found.size) == ("RGB", (8, 8))
    assert numpy.abs(numpy.asarray(found).astype(int) - (200, 30, 30)).max() < 4


@pytest.mark.parametrize(
    ("mode", "color", "form", "expected"),
    [
        ("L", (90,), "PNG", (90, 90, 90)),
        ("L", (90,), "JPEG", (90, 90, 90)),
        ("1", (1,), "PNG", (255, 255, 255)),
        ("RGBA", (10, 20, 30, 0), "PNG", (10, 20, 30)),
        ("LA", (90, 0), "PNG", (90, 90, 90)),
        ("CMYK", (0, 255, 255, 0), "JPEG", (255, 0, 0)),
        ("I;16", (40000,), "PNG", (156, 156, 156)),
        ("I", (40000,), "TIFF", (156, 156, 156)),
    ],
)
def test_every_mode_becomes_color(mode: str, color: tuple[int, ...], form: str, expected: tuple[int, ...]) -> None:
    found = read(content(color, mode=mode, form=form))
    assert found.mode == "RGB"
    assert found.getpixel((3, 3)) == pytest.approx(expected, abs=1)


def test_a_palette_with_transparency() -> None:
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette([0, 0, 0, 50, 60, 70])
    assert read(saved(picture, transparency=b"\x00\x80")).getpixel((0, 0)) == (50, 60, 70)


def test_a_note_of_the_camera_turns_nothing() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    assert read(saved(Image.new("RGB", (6, 4)), "JPEG", exif=exif)).size == (6, 4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"hello, this is no picture", "known format"),
        (saved(Image.new("RGB", (4, 4)), "EPS"), "known format"),  # its reader starts a program
        (saved(NOISE, "JPEG")[:-100], "image file is truncated"),
        (saved(NOISE)[:-100], "image file is truncated"),
        (saved(NOISE, "JPEG")[:300], "[Tt]runcated"),
        (declared(30_000, 30_000), "decompression bomb"),
        (saved(Image.new("RGB", (101, 1))), "101 × 1 pixels are a line"),
        (saved(Image.new("F", (4, 4)), "TIFF"), "floating-point"),
    ],
)
def test_what_cannot_be_read(data: bytes, words: str) -> None:
    with pytest.raises(UnreadableError, match=rf"^x\.png: .*({words})"):
        read(data)


def test_more_pixels_than_pillow_likes_are_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    assert read(content(side=8)).size == (8, 8)
    with pytest.raises(UnreadableError, match="bomb"):
        read(content(side=11))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "TIFF", "WEBP"])
def test_damaged_files_are_read_or_refused(form: str) -> None:
    intact, numbers, refused = saved(NOISE, form), random.Random(0), 0
    for _ in range(80):
        damaged = bytearray(intact[: numbers.randrange(len(intact))] if numbers.random() < 0.3 else intact)
        for _ in range(min(len(damaged), 4)):
            damaged[numbers.randrange(min(len(damaged), 200))] = numbers.randrange(256)
        try:
            assert decode_image(io.BytesIO(damaged), "x").mode == "RGB"
        except UnreadableError:
            refused += 1
    assert refused > 20


def test_endings_are_those_of_the_formats() -> None:
    known = Image.registered_extensions()
    assert {known[ending] for ending in IMAGE_SUFFIXES} == set(FORMATS)
