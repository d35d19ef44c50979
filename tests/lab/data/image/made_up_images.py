"""Tiny pictures in all the places where pictures may be."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

COLORS = {"cat": (200, 30, 30), "dog": (30, 200, 30), "emu": (30, 30, 200)}


def content(color: tuple[int, ...] = (200, 30, 30), side: int = 8, form: str = "PNG", mode: str = "RGB") -> bytes:
    """The bytes of an image file of one color."""
    file = io.BytesIO()
    Image.new(mode, (side, side), color if len(color) > 1 else color[0]).save(file, form)
    return file.getvalue()


def put(path: Path, data: bytes) -> Path:
    """A file with this content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def folder(root: Path, part: str = "val", classes: Sequence[str] = tuple(COLORS), each: int = 3) -> Path:
    """A folder in ImageNet's layout; the part that judges has one picture of each class."""
    for name in classes:
        for number in range(each):
            put(root / "train" / name / f"{number}.png", content(COLORS[name]))
        put(root / part / name / "0.JPEG", content(COLORS[name], form="JPEG"))
    return root


def arrays(files: Sequence[bytes] | None = None, **changes: Any) -> dict[str, Any]:
    """What a packed file has; None leaves an array out."""
    files = [content(color) for color in COLORS.values()] * 2 if files is None else files
    found = {
        "data": numpy.frombuffer(b"".join(files), numpy.uint8),
        "offsets": numpy.cumsum([0, *map(len, files)]),
        "labels": (numpy.arange(len(files)) % 3).astype("uint8"),
        "classes": numpy.array(list(COLORS)),
    }
    return {key: value for key, value in (found | changes).items() if value is not None}


def pack(path: Path, files: Sequence[bytes] | None = None, **changes: Any) -> Path:
    """A packed file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numpy.savez(path, **arrays(files, **changes))
    return path
