"""Checkpoints that survive a kill at any moment.

A checkpoint is a folder with one safetensors file per group of tensors, and a JSON file with all checksums.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from uncollapse.io.files import replace_folder, write, write_errors

FORMAT = 1
STATE, SUFFIX = "state.json", ".safetensors"
GROUP = re.compile(r"[A-Za-z0-9_-]+")  # of tensors: it becomes the name of a file
REPLACED = ".old"  # suffix of a checkpoint while another one of the same step replaces it
NAME = re.compile(r"step-(\d{9,})(\.old)?")
SCRATCH = re.compile(r"\.step-\d{9,}(?:\.old)?\.(\d{1,9})")  # ends in the id of the process that writes or removes it


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after a step. tensors: by group and name, on the CPU. state: JSON values by name."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class RefusedError(Exception):
    """A checkpoint that is not used; the message completes the sentence "it is not used: …"."""


class ForeignError(RefusedError):
    """A checkpoint that may be intact, but belongs to another run."""


class Checkpoints:
    """The checkpoints of one run, in a folder.

    Each is a folder `step-000001234` that appears complete and atomically: it is written under another name, synced to
    the disk and renamed. A process that is killed at any time leaves the checkpoints as they were before or after.

    Args:
        folder: Where they are; created with the first one.
        identity: Of what is trained, such as a hash of its settings. Checkpoints with another identity are never used.
        keep: How many to keep: the one saved last, and the newest before it.
        exact: False also accepts identities that continue after a dash: recipes add a fingerprint of their data there.
            This finds and removes checkpoints without reading the data.

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
            raise ValueError(f"keep must be at least 1, because the last checkpoint always stays, got {keep}.")
        self.folder, self.identity, self.keep, self.exact = folder, identity, keep, exact

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
        """Write a checkpoint, replacing one of the same step, and remove those that are too old.

        Args:
            step: 0 or more. Checkpoints of later steps stay: call `clear` before starting over.
            tensors: By group, such as "model", and name. Each group becomes a file.
            state: JSON values; floats may be infinite or NaN. Tuples come back as lists.

        Returns:
            Its folder. If writing fails, as on a full disk, the earlier checkpoints are unchanged and nothing is left.
        """
        checkpoint = Checkpoint(step, {group: dict(named) for group, named in tensors.items()}, dict(state))
        _check(checkpoint)
        target = self.folder / f"step-{step:09d}"
        with write_errors(target):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_scratch()
            _write(target, checkpoint, self.identity)
            for old in list(self._list_superseded(step)):
                _remove(old)
        return target

    def load(self) -> Checkpoint | None:
        """Return the newest intact checkpoint of this run, or None. Warn of each that is refused; it stays."""
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
        """Return the step of the checkpoint that `load` would use, as far as its JSON file shows."""
        return next((step for step, folder in self._newest_first() if self._is_usable(step, folder)), None)

    def clear(self) -> None:
        """Remove all checkpoints except those of another run, and the folder if it is then empty."""
        if not self.folder.is_dir():
            return
        self._remove_scratch()
        for step, folder in self._newest_first():
            try:
                read_state(folder, step, self._expected_identity(folder))
            except ForeignError:
                continue
            except RefusedError:
                pass  # damaged: of no use to anyone
            _remove(folder)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _newest_first(self) -> list[tuple[int, Path]]:
        """Return steps and folders. Of the same step, the one that was being replaced comes second."""
        named = [(NAME.fullmatch(path.name), path) for path in self.folder.glob("step-*") if path.is_dir()]
        ranked = sorted(((int(name[1]), name[2] is None, path) for name, path in named if name), reverse=True)
        return [(step, path) for step, _, path in ranked]

    def _list_superseded(self, step: int) -> Iterator[Path]:
        """Yield checkpoints before a step that are too many. A refused one does not count, and stays."""
        earlier = [(other, folder) for other, folder in self._newest_first() if other < step]
        usable = [folder for other, folder in earlier if self._is_usable(other, folder)]
        yield from usable[self.keep - 1 :]  # the one of this step counts too

    def _is_usable(self, step: int, folder: Path) -> bool:
        try:
            read_state(folder, step, self._expected_identity(folder))
        except RefusedError:
            return False
        return True

    def _expected_identity(self, folder: Path) -> str:
        """Return the identity that a checkpoint must have: ours or, if not exact, its own if that continues ours."""
        if self.exact:
            return self.identity
        with suppress(OSError, ValueError, TypeError, KeyError):  # damage is reported where it is checked
            own = str(json.loads((folder / STATE).read_text(encoding="utf-8"))["identity"])
            return own if own.startswith(f"{self.identity}-") else self.identity
        return self.identity

    def _remove_scratch(self) -> None:
        """Remove what terminated processes have half written or half removed."""
        for path in self.folder.glob(".step-*"):
            scratch = SCRATCH.fullmatch(path.name)
            if scratch and not _is_running(int(scratch[1])):
                shutil.rmtree(path, ignore_errors=True)


def read_files(folder: Path, step: int, identity: str) -> Checkpoint:
    """Return a checkpoint if every bit is as it was written; RefusedError otherwise."""
    facts = read_state(folder, step, identity)
    tensors = {}
    for group, file in facts["files"].items():
        try:
            content = (folder / (group + SUFFIX)).read_bytes()
        except OSError as error:
            raise RefusedError(f"{group}{SUFFIX} cannot be read ({error.strerror})") from error
        if hashlib.sha256(content).hexdigest() != file["sha256"]:
            raise RefusedError(f"the content of {group}{SUFFIX} is not what was written")
        tensors[group] = safetensors.torch.load(content)
    return Checkpoint(step, tensors, facts["state"])


def read_state(folder: Path, step: int, identity: str) -> dict[str, Any]:
    """Return state.json if it is as it was written, belongs to this run, and the other files have their sizes."""
    facts = _load_state(folder)
    if facts["format"] != FORMAT:
        raise ForeignError(f"its format is {facts['format']}, and this version of uncollapse reads {FORMAT}")
    if facts.pop("sha256", None) != _digest(facts):
        raise RefusedError(f"the content of {STATE} is not what was written")
    if facts["identity"] != identity:
        raise ForeignError(_describe_difference(str(facts["identity"]), identity))
    if facts["step"] != step:
        raise RefusedError(f"{STATE} is of step {facts['step']}")
    for group, file in facts["files"].items():
        if not GROUP.fullmatch(group):
            raise RefusedError(f"it names a file {group!r}, which no checkpoint has")
        path = folder / (group + SUFFIX)
        if not path.is_file():
            raise RefusedError(f"{path.name} is missing")
        if path.stat().st_size != file["size"]:
            raise RefusedError(f"{path.name} has {path.stat().st_size} bytes instead of {file['size']}")
    return facts


def _load_state(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except OSError as error:
        raise RefusedError(f"{STATE} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{STATE} is damaged ({error})") from error
    if not isinstance(facts, dict) or "format" not in facts:
        raise RefusedError(f"{STATE} does not describe a checkpoint")
    return facts


def _describe_difference(theirs: str, ours: str) -> str:
    """Return how two identities differ. After the settings, recipes add their data and their initial weights."""
    if theirs.partition("-")[0] == ours.partition("-")[0]:
        return "its settings are those of this run, but the data or the model that it started from has changed since"
    return f"it is of another run: {theirs!r}, and this one is {ours!r}"


def _check(checkpoint: Checkpoint) -> None:
    """Raise if a checkpoint would not be read back as it is."""
    if checkpoint.step < 0:
        raise ValueError(f"The step of a checkpoint must be 0 or more, got {checkpoint.step}.")
    for group in checkpoint.tensors:
        if not GROUP.fullmatch(group):
            raise ValueError(f"A group of tensors becomes a file: use letters, digits, - and _, got {group!r}.")
    _check_keys(checkpoint.state)


def _check_keys(value: Any) -> None:
    """Raise for keys that are not text: JSON would silently turn a number into text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"Keys in the state of a checkpoint must be text, got {key!r}: use str() on it.")
            _check_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner)


def _write(target: Path, checkpoint: Checkpoint, identity: str) -> None:
    """Write a checkpoint under another name and rename it. One that it replaces stays usable until then."""
    part, old = _scratch(target), target.with_name(target.name + REPLACED)
    try:
        part.mkdir()
        _write_files(part, checkpoint, identity)
        if target.exists() and old.exists():
            _remove(old)
        replace_folder(part, target, old)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if old.exists():
        _remove(old)


def _write_files(folder: Path, checkpoint: Checkpoint, identity: str) -> None:
    files = {}
    for group, tensors in checkpoint.tensors.items():
        content = safetensors.torch.save({name: _copy(tensor) for name, tensor in tensors.items()})
        files[group] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        write(folder / (group + SUFFIX), content)
    facts = {"format": FORMAT, "identity": identity, "step": checkpoint.step, "state": checkpoint.state, "files": files}
    write(folder / STATE, json.dumps({**facts, "sha256": _digest(facts)}, indent=1) + "\n")


def _copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy that shares no memory: safetensors saves no other."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _is_running(process: int) -> bool:
    """Return whether a process runs. This one has not written yet: its id on a folder is from an earlier process."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it belongs to somebody else
    return True


def _scratch(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}")


def _remove(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill leaves no half checkpoint."""
    scratch = _scratch(folder)
    os.rename(folder, scratch)
    shutil.rmtree(scratch)
