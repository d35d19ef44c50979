"""The files of one checkpoint: a safetensors file for each group of tensors, and a JSON file with all checksums."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from uncollapse.io.files import write

FORMAT = 1
STATE, SUFFIX = "state.json", ".safetensors"
GROUP = re.compile(r"[A-Za-z0-9_-]+")  # of tensors: it becomes the name of a file


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after a step. tensors: by group and name, on the CPU. state: JSON values by name."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class RefusedError(Exception):
    """A checkpoint that is not used, and why: the rest of a sentence."""


class ForeignError(RefusedError):
    """It may be whole, but is not one of this run."""


def check(checkpoint: Checkpoint) -> None:
    """Raise if it would not come back as it is."""
    if checkpoint.step < 0:
        raise ValueError(f"The step of a checkpoint is 0 or more, and is {checkpoint.step}.")
    for group in checkpoint.tensors:
        if not GROUP.fullmatch(group):
            raise ValueError(
                f"A group of tensors becomes a file: name it with letters, digits, - and _, not {group!r}."
            )
    _check_keys(checkpoint.state)


def _check_keys(value: Any) -> None:
    """JSON would turn a number that is a key into text, without a word."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"Keys in the state of a checkpoint are text, and {key!r} is not: use str() on it.")
            _check_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner)


def write_files(folder: Path, checkpoint: Checkpoint, identity: str) -> None:
    """Write a checkpoint into a new folder and bring it to the disk."""
    files = {}
    for group, tensors in checkpoint.tensors.items():
        content = safetensors.torch.save({name: _copy(tensor) for name, tensor in tensors.items()})
        files[group] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        write(folder / (group + SUFFIX), content)
    facts = {"format": FORMAT, "identity": identity, "step": checkpoint.step, "state": checkpoint.state, "files": files}
    write(folder / STATE, json.dumps({**facts, "sha256": _digest(facts)}, indent=1) + "\n")


def _copy(tensor: Tensor) -> Tensor:
    """One of its own memory, without gaps: safetensors takes no other."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def read_files(folder: Path, step: int, identity: str) -> Checkpoint:
    """A checkpoint, if every bit is as it was written; RefusedError otherwise."""
    facts = read_facts(folder, step, identity)
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


def read_facts(folder: Path, step: int, identity: str) -> dict[str, Any]:
    """What state.json says, if it is as it was written, of this run, and the other files have their sizes."""
    facts = _read_state(folder)
    if facts["format"] != FORMAT:
        raise ForeignError(f"its format is {facts['format']}, and this version of uncollapse reads {FORMAT}")
    if facts.pop("sha256", None) != _digest(facts):
        raise RefusedError(f"the content of {STATE} is not what was written")
    if facts["identity"] != identity:
        raise ForeignError(_difference(str(facts["identity"]), identity))
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


def _difference(theirs: str, ours: str) -> str:
    """How two identities differ. Behind the settings, recipes add what their data and their first weights are."""
    if theirs.partition("-")[0] == ours.partition("-")[0]:
        return "its settings are those of this run, but the data or the model that it started from has changed since"
    return f"it is of another run: {theirs!r}, and this one is {ours!r}"


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except OSError as error:
        raise RefusedError(f"{STATE} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{STATE} is torn ({error})") from error
    if not isinstance(facts, dict) or "format" not in facts:
        raise RefusedError(f"{STATE} does not describe a checkpoint")
    return facts
