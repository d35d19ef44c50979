"""A fitted linear map of embeddings: applied to rows, stored in a folder, and as a module of sentence-transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from uncollapse.errors import UsageError, import_optional
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
        with torch.autocast(rows.device.type, enabled=False):  # whitening would amplify what bfloat16 rounds off
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
        return _build_map(config, tensors), dict(config["arguments"])
    except OSError as error:
        raise UsageError(f"{folder} has no embedding transform: {error.strerror} ({error.filename}).") from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError(f"{folder} is not a valid embedding transform: {error}.") from error


def _build_map(config: dict[str, Any], tensors: dict[str, Tensor]) -> LinearMap:
    mean = tensors["mean"]
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float64 or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} must be finite float64, got {tensor.dtype}")
        if tensor.dim() != (1 if name == "mean" else 2) or tensor.shape[-1] != mean.shape[0]:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, which does not fit the mean")
    shrinkage = config["shrinkage"]
    return LinearMap(str(config["method"]), mean, tensors.get("matrix"), tensors.get("removed"), shrinkage)


class TransformModule(nn.Module):
    """A module of sentence-transformers that transforms `sentence_embedding`; see `EmbeddingTransform.as_module`.

    Its map is fixed: it has buffers and no parameters. A model that was trained on goes with a new fit.
    """

    def __init__(self, linear_map: LinearMap, params: dict[str, Any]) -> None:
        super().__init__()
        self.method, self.shrinkage, self.params = linear_map.method, linear_map.shrinkage, params
        self.register_buffer("mean", linear_map.mean.clone())
        self.register_buffer("matrix", linear_map.matrix)
        self.register_buffer("removed", linear_map.removed)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Transform the embeddings of a batch."""
        features["sentence_embedding"] = self._map().apply(features["sentence_embedding"])
        return features

    def get_embedding_dimension(self) -> int:
        """Return the number of features of an embedding."""
        return self._map().out_dim

    get_sentence_embedding_dimension = get_embedding_dimension  # its name before sentence-transformers 6

    def save(self, output_path: str, *_: Any, **__: Any) -> None:
        """Write the files of the module into its folder of a saved model."""
        save_map(self._map(), self.params, Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> "TransformModule":
        """Read the module of a saved model, from a folder or from the hub."""
        folder = Path(model_name_or_path) / subfolder
        if not folder.is_dir():
            known = {name: kwargs.get(name) for name in ("token", "cache_folder", "revision", "local_files_only")}
            util: Any = import_optional("sentence_transformers.util", "st")
            folder = Path(util.load_dir_path(model_name_or_path, subfolder, **known))
        return cls(*load_map(folder))

    def _map(self) -> LinearMap:
        given = [getattr(self, name) for name in ("mean", "matrix", "removed")]
        mean, matrix, removed = (tensor if tensor is None else _tensor(tensor) for tensor in given)
        assert mean is not None
        return LinearMap(self.method, mean, matrix, removed, self.shrinkage)


def _tensor(buffer: Any) -> Tensor:
    """Return a buffer in float64: `model.half()` casts buffers too, and a map is stored as float64."""
    tensor: Tensor = buffer.double()
    return tensor
