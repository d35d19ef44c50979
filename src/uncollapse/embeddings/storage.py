"""Apply a fitted linear map to rows, and store it as a folder with safetensors and JSON."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.io import files
from uncollapse.pairwise.numerics import check_float

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KIND = "uncollapse.EmbeddingTransform"


@dataclass(frozen=True)
class LinearMap:
    """y = matrix (x − mean), or y = (x − mean) without its parts along the rows of `removed`; float64.

    method: which one it is. shrinkage: that of the covariance, if it was whitened.
    """

    method: str
    mean: Tensor
    matrix: Tensor | None = None
    removed: Tensor | None = None
    shrinkage: float | None = None

    @property
    def out_dim(self) -> int:
        """Return the number of features after the map."""
        return self.mean.shape[0] if self.matrix is None else self.matrix.shape[0]

    def apply(self, rows: Any) -> Any:
        """Return rows (..., d) mapped, as a tensor or array of the same kind."""
        if isinstance(rows, Tensor):
            return self._apply(rows)
        array = numpy.asarray(rows)
        given = torch.from_numpy(numpy.ascontiguousarray(array))
        mapped: Any = self._apply(given if given.is_floating_point() else given.float()).numpy()
        return mapped

    def _apply(self, rows: Tensor) -> Tensor:
        check_float(rows, "rows")
        if rows.shape[-1] != self.mean.shape[0]:
            raise ValueError(f"Rows must have {self.mean.shape[0]} features, got {tuple(rows.shape)}.")
        if self.method == "none":
            return rows
        exact = torch.float64 if rows.dtype == torch.float64 else torch.float32
        x = rows.to(exact) - self.mean.to(rows.device, exact)
        if self.removed is not None:
            top = self.removed.to(x)
            x = x - (x @ top.mT) @ top
        if self.matrix is not None:
            x = x @ self.matrix.to(x).mT
        return x.to(rows.dtype)


def save_map(linear_map: LinearMap, params: dict[str, Any], folder: Path) -> Path:
    """Write a map and the arguments of its transform into a folder."""
    tensors = {"mean": linear_map.mean, "matrix": linear_map.matrix, "removed": linear_map.removed}
    there = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    config = {"type": KIND, "method": linear_map.method, "shrinkage": linear_map.shrinkage, "arguments": params}
    files.write(folder / WEIGHTS, save(there))
    files.write(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    return folder


def load_map(folder: Path) -> tuple[LinearMap, dict[str, Any]]:
    """Read a map and the arguments of its transform. UsageError if the folder has something else."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        if config["type"] != KIND:
            raise ValueError(f"its type is {config['type']!r}")
        return _checked(config, tensors), dict(config["arguments"])
    except OSError as error:
        raise UsageError(f"{folder} has no embedding transform: {error.strerror} ({error.filename}).") from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError(f"{folder} is not a valid embedding transform: {error}.") from error


def _checked(config: dict[str, Any], tensors: dict[str, Tensor]) -> LinearMap:
    mean = tensors["mean"]
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float64 or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite float64, got {tensor.dtype}")
        if tensor.dim() != (1 if name == "mean" else 2) or tensor.shape[-1] != mean.shape[0]:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, which does not fit the mean")
    shrinkage = config["shrinkage"]
    return LinearMap(str(config["method"]), mean, tensors.get("matrix"), tensors.get("removed"), shrinkage)
