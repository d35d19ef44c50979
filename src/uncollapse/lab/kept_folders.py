"""Folders of kept models: each is there as a whole or not at all."""

import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from uncollapse.files import keep_names
from uncollapse.loading.errors import UsageError

WEIGHTS, CONFIG, SETTINGS = "model.safetensors", "config.json", "settings.json"


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes `folder` at the end, in the place of an earlier one; if anything fails, it goes."""
    _check_replaceable(folder)
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        yield part
        _sync(part)
        _put(part, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"The model cannot be kept in {folder}: {reason}. Name another folder, or make room."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _check_replaceable(folder: Path) -> None:
    """Raise where something else than a kept model would go."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model is kept in a folder. Name another one.")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if SETTINGS not in names and not names <= {CONFIG, WEIGHTS}:
        raise UsageError(f"{folder} has other files than a kept model, which would be lost. Name a new folder.")


def _put(part: Path, folder: Path) -> None:
    """Rename. A folder cannot be replaced in one moment: the old one steps aside and goes when the new one is there."""
    old = part.with_suffix(".old")
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(part, folder)
    except BaseException:
        if old.exists():
            os.rename(old, folder)
        raise
    keep_names(folder.parent)
    digit = "[0-9a-f]"
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.{32 * digit}.*"):  # the old one, and what kills left
        shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Bring all files to the disk, whoever wrote them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
