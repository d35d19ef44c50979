"""Results of runs: one JSON file per run, with its config, its metrics and what is needed to repeat it."""

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import warnings
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uncollapse import __version__
from uncollapse.errors import UsageError
from uncollapse.io.files import write
from uncollapse.lab.config.fields import build, identity

if TYPE_CHECKING:  # recipes import this module, and tables of results need no torch
    from torch import Tensor

    from uncollapse.diagnosis.result import Diagnosis
    from uncollapse.lab.recipe import Recipe

UNSAFE = re.compile(r"[/\\\x00-\x1f\x7f]|^\.")
LONGEST = 180  # bytes of a name, which leaves room for a hash and a suffix in the 255 that file systems allow


def run_name(recipe: "Recipe", config: Any) -> str:
    """Return the name of a run's files: `<name>--<hash>`, without characters that lead to another folder."""
    name = UNSAFE.sub("_", recipe.name_of(config)).encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore")
    return f"{name}--{identity(recipe.name, config)}"


class Results:
    """A folder of results: `folder/<recipe>/<name>--<hash>.json`. Several processes may use it at the same time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, recipe: "Recipe", config: Any) -> Path:
        """Return where the result of a config is, or will be."""
        return self.folder / recipe.name / f"{run_name(recipe, config)}.json"

    def find(self, recipe: "Recipe", config: Any) -> dict[str, Any] | None:
        """Return the record of a config; None if it has not been run.

        A file that is not a record is renamed to `….json.broken`, with a warning. A record that was run with other
        settings than the config's, because a default has changed since, is a UsageError.
        """
        path = self.path(recipe, config)
        record = _read(path, recipe)
        if record is not None:
            _check_same(path, record["config"], _to_json(dataclasses.asdict(config)))
        return record

    def save(self, recipe: "Recipe", config: Any, record: Mapping[str, Any]) -> Path:
        """Write a record, replacing an earlier one. NaN and infinity become null, which all JSON parsers read."""
        items = _to_json(record).items()
        facts = ((key, json.dumps(value, allow_nan=False, ensure_ascii=False)) for key, value in items)
        text = "{\n" + ",\n".join(f" {json.dumps(key)}: {value}" for key, value in facts) + "\n}"  # one line per key
        path = self.path(recipe, config)
        try:
            return write(path, text + "\n")
        except OSError as error:
            raise UsageError(f"The result {error} The same command then resumes from its last checkpoint.") from error

    def all(self, recipe: "Recipe") -> list[dict[str, Any]]:
        """Return the records of all configs of a recipe that were run, sorted by file name.

        A file that is not a record, or whose config is not the one in its name, stays where it is, with a warning.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"{self.folder} is a file; results are in a folder.")
        paths = sorted((self.folder / recipe.name).glob("*--*.json"))
        read = ((path, _read(path, recipe, rename=False)) for path in paths)
        return [record for path, record in read if record is not None and _is_named(path, record, recipe)]


def build_record(recipe: str, config: Any, seconds: float, libraries: tuple[str, ...], **facts: Any) -> dict[str, Any]:
    """Return the record of a run, which can be written as JSON.

    Args:
        recipe: Name of the recipe.
        config: A dataclass with a `seed`.
        seconds: How long the run took.
        libraries: Packages whose versions matter, besides torch and this one.
        facts: What was measured, such as `figures`, the metrics by name.
    """
    import torch

    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "uncollapse": __version__}
    return {
        "recipe": recipe,
        "config": dataclasses.asdict(config),
        "seed": config.seed,
        "versions": versions | {name: metadata.version(name) for name in libraries},
        "processor": processor_name(),
        "threads": torch.get_num_threads(),  # sums over several threads differ in their last digits
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        **facts,
    }


def processor_name() -> str:
    """Return what the processor calls itself and, as that may say little, its family and model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    pairs = [line.partition(":") for line in lines]
    found = {key.strip(): value.strip() for key, _, value in reversed(pairs)}  # the first processor
    if "model name" not in found:
        return platform.processor()
    more = ", ".join(f"{key.split()[-1]} {found[key]}" for key in ("cpu family", "model") if key in found)
    return f"{found['model name']}, {more}" if more else found["model name"]


def summarize_diagnosis(diagnosis: "Diagnosis") -> dict[str, Any]:
    """Return what a record stores of a diagnosis: the verdict, and the means of all measures per layer."""
    layers = [
        {"name": layer.name, **round_metrics({name: found.mean for name, found in layer.measures.items()})}
        for layer in diagnosis.layers
    ]
    verdict = diagnosis.verdict
    return {"verdict": verdict.kind, "onset": verdict.onset, "layers": layers}


def fingerprint(tensors: "Iterable[Tensor]") -> str:
    """Return 16 hexadecimal digits that change when any value of the data does."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def round_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with six significant digits; integers are unchanged."""
    return {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in metrics.items()}


def _read(path: Path, recipe: "Recipe", rename: bool = True) -> dict[str, Any] | None:
    """Return the record in a file; None if there is no file, or if it is not a record, which may be renamed then."""
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        fault = _find_fault(record, recipe.name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"The result {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # damaged, or not text
        fault = str(error)
    if fault:
        if rename:
            _rename_broken(path, fault)
        else:
            warnings.warn(f"{path} is not a result and does not count: {fault}.", stacklevel=3)
        return None
    return record | {"config": _defaults(recipe.config) | record["config"]}


def _find_fault(record: Any, recipe: str) -> str | None:
    """Return why the content of a file is not a record; None if it is one."""
    if not isinstance(record, dict):
        return "it is not a JSON object"
    lacking = [key for key in ("config", "figures") if not isinstance(record.get(key), dict)]
    if lacking:
        return f"it lacks {' and '.join(lacking)}"
    if record.get("recipe") != recipe:
        return f"it is of the recipe {record.get('recipe')!r}, not {recipe!r}"
    if not isinstance(record.get("seed"), int) or record["seed"] != record["config"].get("seed"):
        return "its seed is not that of its config"
    nested = [name for name, value in record["config"].items() if not _is_plain(value)]
    return f"its setting {nested[0]} is not a plain value" if nested else None


def _is_plain(value: Any) -> bool:
    """Return whether a setting can have a value: a plain value, or a list of plain values."""
    values = value if isinstance(value, list) else [value]
    return not any(isinstance(one, dict | list) for one in values)


def _is_named(path: Path, record: Mapping[str, Any], recipe: "Recipe") -> bool:
    """Return whether the hash in a file's name is that of its config, which it is not in an edited copy."""
    known = {name: record["config"][name] for name in _defaults(recipe.config)}
    try:
        same = path.stem.endswith(f"--{identity(recipe.name, build(recipe.config, known))}")
    except UsageError:  # a value that is no longer allowed
        same = False
    if not same:
        warnings.warn(
            f"{path} does not count: its settings are not those that its name stands for. It was edited or copied, or "
            "a default of the recipe has changed since.",
            stacklevel=3,
        )
    return same


def _rename_broken(path: Path, fault: str) -> None:
    broken = path.with_name(f"{path.name}.broken")
    try:
        os.replace(path, broken)
        outcome = f"It was renamed to {broken.name} and counts as not run."
    except OSError as error:  # another process was first, or the folder is not ours
        outcome = f"It counts as not run, and could not be renamed ({error.strerror})."
    warnings.warn(f"{path} is not a result: {fault}. {outcome}", stacklevel=2)


def _check_same(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise if a default has changed: the hash in the name only covers what differs from the defaults."""
    for name in sorted(stored.keys() | wanted.keys()):
        if name not in wanted:
            fault = f"has the setting {name}, which the recipe no longer has"
        elif stored[name] != wanted[name]:
            fault = f"was run with {name} = {stored[name]!r}, expected {wanted[name]!r}: its default has changed"
        else:
            continue
        raise UsageError(f"{path} {fault}. Move that file elsewhere to run it anew, or use another results folder.")


def _defaults(config: type) -> dict[str, Any]:
    """Return the defaults of a config: the values of fields that were added after a record was written."""
    defaults: dict[str, Any] = _to_json(dataclasses.asdict(config()))
    return defaults


def _to_json(value: Any) -> Any:
    """Return a value as JSON reads it back: lists for tuples, null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
