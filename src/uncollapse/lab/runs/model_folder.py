"""Folders of kept models: each is there as a whole or not at all."""

import glob
import hashlib
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
from uncollapse.io.files import ADVICE, sync_folder

WEIGHTS, CONFIG, SETTINGS = "model.safetensors", "config.json", "settings.json"
SUMS = "SHA256SUMS"  # of all other files, as sha256sum reads it


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes `folder` at the end, in the place of an earlier one; if anything fails, it goes."""
    _check_replaceable(folder)
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir(parents=True)
        yield part
        _add_sums(part)
        _sync(part)
        _put(part, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        advice = ADVICE.get(getattr(error, "errno", None) or 0, "Name another folder, or make room.")
        raise UsageError(f"The model cannot be kept in {folder}: {reason}. {advice}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file of a kept model says. UsageError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{path.name} is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path.parent} holds no kept model: {error}. Name the folder that `uncollapse train … --save` told."
        ) from error
    return content


def check_weights(folder: Path) -> None:
    """Raise if weights in a folder are not those that were kept there; what an earlier version kept has no checksums.

    Only weights are looked at: damage does not show in them. The other files may be edited.
    """
    sums = folder / SUMS
    lines = sums.read_text(encoding="utf-8", errors="replace").splitlines() if sums.is_file() else []
    for digest, _, name in (line.partition("  ") for line in lines):
        path = folder / Path(name).name
        if path.suffix == ".safetensors" and path.is_file() and _sum(path) != digest:
            raise UsageError(
                f"{path} is not the file that was kept: its checksum is not the one in {SUMS}. Keep the model again, "
                f"or remove {SUMS} if you have changed the weights yourself."
            )


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add_sums(folder: Path) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{_sum(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _check_replaceable(folder: Path) -> None:
    """Raise where something else than a kept model would go."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model is kept in a folder. Name another one.")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if SETTINGS not in names and not names <= {CONFIG, WEIGHTS, SUMS}:
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
    sync_folder(folder.parent)
    digit = "[0-9a-f]"
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.{32 * digit}.*"):  # the old one, and what kills left
        shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Bring all files to the disk, whoever wrote them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
