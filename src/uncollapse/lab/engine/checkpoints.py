"""Checkpoints that survive a kill at any moment."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from uncollapse.io.files import sync_folder, write_errors
from uncollapse.lab.engine.checkpoint_files import (
    STATE,
    Checkpoint,
    ForeignError,
    RefusedError,
    check,
    read_facts,
    read_files,
    write_files,
)

__all__ = ["Checkpoint", "Checkpoints"]

REPLACED = ".old"  # ends the name of a checkpoint while another of the same step takes its place
NAME = re.compile(r"step-(\d{9,})(\.old)?")
SCRATCH = re.compile(r"\.step-\d{9,}(?:\.old)?\.(\d{1,9})")  # ends in the id of the process that writes or removes it


class Checkpoints:
    """The checkpoints of one run, in a folder.

    Each is a folder `step-000001234` that appears complete, in one moment: it is written under another name, brought to
    the disk and renamed. A process that is killed at any time leaves the checkpoints as they were before or after.

    Args:
        folder: where they are; made when the first is saved.
        identity: of what is trained, such as a hash of its settings. Checkpoints of another one are never used.
        keep: how many are kept: the one saved last, and the newest before it.
        exact: False takes those as well whose identity goes on behind a dash, as recipes add what their data is. They
            can be looked for and removed so, without reading the data.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.TemporaryDirectory()
        >>> checkpoints = Checkpoints(Path(folder.name), identity="0f3a")
        >>> checkpoints.save(20, {"model": {"weight": torch.ones(2)}}, {"loss": 0.5}).name
        'step-000000020'
        >>> checkpoints.load()
        Checkpoint(step=20, tensors={'model': {'weight': tensor([1., 1.])}}, state={'loss': 0.5})
    """

    def __init__(self, folder: Path, identity: str, keep: int = 2, *, exact: bool = True) -> None:
        if keep < 1:
            raise ValueError(f"keep is 1 or more, because the last checkpoint always stays, and is {keep}.")
        self.folder, self.identity, self.keep, self.exact = folder, identity, keep, exact

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, in place of one of the same step if there is one, and remove those that are too old.

        Args:
            step: 0 or more. Checkpoints of later steps stay: `clear` before starting over.
            tensors: by group, such as "model", and name. Each group becomes a file.
            state: JSON values; floats may be infinite or not a number. Tuples come back as lists.

        Returns:
            Its folder. If writing fails, as on a full disk, what was there before is still there and nothing else is.
        """
        checkpoint = Checkpoint(step, {group: dict(named) for group, named in tensors.items()}, dict(state))
        check(checkpoint)
        target = self.folder / f"step-{step:09d}"
        with write_errors(target):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            _write(target, checkpoint, self.identity)
            for old in list(self._superseded(step)):
                _remove(old)
        return target

    def load(self) -> Checkpoint | None:
        """The newest intact checkpoint of this run, or None. Each that is refused is told in a warning, and stays."""
        found, refused = None, []
        for step, folder in self._newest_first():
            try:
                found = read_files(folder, step, self.identity)
                break
            except RefusedError as reason:
                refused.append(f"The checkpoint {folder} is not used: {reason}.")
        instead = "There is no other." if found is None else f"The one of step {found.step} is used instead."
        for sentence in refused:
            warnings.warn(f"{sentence} {instead}", UserWarning, stacklevel=2)
        return found

    def newest(self) -> int | None:
        """The step of the checkpoint that `load` would use, as far as that shows without reading the tensors."""
        return next((step for step, folder in self._newest_first() if self._usable(step, folder)), None)

    def clear(self) -> None:
        """Remove all checkpoints but those of another run, and the folder if nothing is left in it."""
        if not self.folder.is_dir():
            return
        self._tidy()
        for step, folder in self._newest_first():
            try:
                read_facts(folder, step, self._identity(folder))
            except ForeignError:
                continue
            except RefusedError:
                pass  # torn: of no use to anyone
            _remove(folder)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _newest_first(self) -> list[tuple[int, Path]]:
        """Steps and folders. Of the same step, the one that was being replaced comes second."""
        named = [(NAME.fullmatch(path.name), path) for path in self.folder.glob("step-*") if path.is_dir()]
        ranked = sorted(((int(name[1]), name[2] is None, path) for name, path in named if name), reverse=True)
        return [(step, path) for step, _, path in ranked]

    def _superseded(self, step: int) -> Iterator[Path]:
        """Those before a step that are too many. One that would be refused does not count, and stays."""
        earlier = [(other, folder) for other, folder in self._newest_first() if other < step]
        usable = [folder for other, folder in earlier if self._usable(other, folder)]
        yield from usable[self.keep - 1 :]  # the one of this step is kept as well

    def _usable(self, step: int, folder: Path) -> bool:
        try:
            read_facts(folder, step, self._identity(folder))
        except RefusedError:
            return False
        return True

    def _identity(self, folder: Path) -> str:
        """What a checkpoint must have: ours or, if that is not exact, its own where that only goes on behind ours."""
        if self.exact:
            return self.identity
        with suppress(OSError, ValueError, TypeError, KeyError):  # what is wrong with it is told where it is checked
            own = str(json.loads((folder / STATE).read_text(encoding="utf-8"))["identity"])
            return own if own.startswith(f"{self.identity}-") else self.identity
        return self.identity

    def _tidy(self) -> None:
        """Remove what processes that are gone have half written or half removed."""
        for path in self.folder.glob(".step-*"):
            scratch = SCRATCH.fullmatch(path.name)
            if scratch and not _busy(int(scratch[1])):
                shutil.rmtree(path, ignore_errors=True)


def _busy(process: int) -> bool:
    """Whether it still runs. This one has nothing half done yet: what has its id is of an earlier one with the same."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def _scratch(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}")


def _write(target: Path, checkpoint: Checkpoint, identity: str) -> None:
    part = _scratch(target)
    try:
        part.mkdir()
        write_files(part, checkpoint, identity)
        _put(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _put(part: Path, target: Path) -> None:
    """Rename. A folder cannot be replaced in one moment: the old one steps aside, and counts until the new is there."""
    old = target.with_name(target.name + REPLACED)
    if target.exists():
        if old.exists():
            _remove(old)
        os.rename(target, old)
    try:
        os.rename(part, target)
    except BaseException:
        if old.exists():
            os.rename(old, target)
        raise
    sync_folder(target.parent)
    if old.exists():
        _remove(old)


def _remove(folder: Path) -> None:
    """Out of sight first, so that a kill meanwhile leaves no half checkpoint."""
    scratch = _scratch(folder)
    os.rename(folder, scratch)
    shutil.rmtree(scratch)
