"""What a run leaves behind: its figures with all that is needed to repeat it."""

import dataclasses
import hashlib
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from uncollapse import __version__
from uncollapse.diagnosis.result import Diagnosis


def build_record(
    recipe: str, config: Any, seconds: float, libraries: tuple[str, ...], **figures: Any
) -> dict[str, Any]:
    """The record of a run, which can be written as JSON.

    Args:
        recipe: its name.
        config: a dataclass with a `seed`.
        seconds: how long it took.
        libraries: packages whose versions count, besides torch and this one.
        figures: what was measured.
    """
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "uncollapse": __version__}
    return {
        "recipe": recipe,
        "config": dataclasses.asdict(config),
        "seed": config.seed,
        "versions": versions | {name: metadata.version(name) for name in libraries},
        "threads": torch.get_num_threads(),  # sums over several threads differ in their last digits
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        **figures,
    }


def summarize_diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    """The verdict and the means of all measures by layer: what the record of a run keeps of a diagnosis."""
    layers = [
        {"name": layer.name, **round_metrics({name: found.mean for name, found in layer.measures.items()})}
        for layer in diagnosis.layers
    ]
    verdict = diagnosis.verdict
    return {"verdict": verdict.kind, "onset": verdict.onset, "layers": layers}


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """16 hex digits that change when any value of the data does."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def round_metrics(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures with six digits, which is more than anybody reads; counts as they are."""
    return {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in figures.items()}
