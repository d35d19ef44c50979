"""Folders of saved models: each appears complete or not at all."""

import glob
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from uncollapse.errors import UsageError
from uncollapse.io.files import ADVICE, replace_folder

WEIGHTS, CONFIG, SETTINGS = "model.safetensors", "config.json", "settings.json"


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` at the end, replacing an earlier one; on failure it is removed."""
    _check_replaceable(folder)
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        yield part
        _sync_files(part)
        replace_folder(part, folder, part.with_suffix(".old"))
        _remove_leftovers(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = ADVICE.get(getattr(error, "errno", None) or 0, "Name another folder, or make room.")
        raise UsageError(f"The model cannot be saved in {folder}: {reason}. {advice}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file of a saved model; UsageError if it is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{path.name} is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path.parent} is not a saved model: {error}. Name the folder that `uncollapse train … --save` reported."
        ) from error
    return content


def _check_replaceable(folder: Path) -> None:
    """Raise if something other than a saved model would be lost."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model is saved in a folder. Name another one.")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if SETTINGS not in names and not names <= {CONFIG, WEIGHTS}:
        raise UsageError(f"{folder} has other files than a saved model, which would be lost. Name a new folder.")


def _remove_leftovers(folder: Path) -> None:
    """Remove the folder that was replaced, and what killed processes have left."""
    digit = "[0-9a-f]"
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.{32 * digit}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _sync_files(folder: Path) -> None:
    """Write all files to the disk, whichever library wrote them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
