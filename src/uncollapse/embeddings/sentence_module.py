"""An embedding transform as the last module of a sentence-transformers model, saved and loaded with the model."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from uncollapse.embeddings import storage
from uncollapse.embeddings.storage import LinearMap
from uncollapse.errors import import_optional


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
        storage.save_map(self._map(), self.params, Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> "TransformModule":
        """Read the module of a saved model, from a folder or from the hub."""
        folder = Path(model_name_or_path) / subfolder
        if not folder.is_dir():
            known = {name: kwargs.get(name) for name in ("token", "cache_folder", "revision", "local_files_only")}
            util: Any = import_optional("sentence_transformers.util", "st")
            folder = Path(util.load_dir_path(model_name_or_path, subfolder, **known))
        return cls(*storage.load_map(folder))

    def _map(self) -> LinearMap:
        given = [getattr(self, name) for name in ("mean", "matrix", "removed")]
        mean, matrix, removed = (tensor if tensor is None else _tensor(tensor) for tensor in given)
        assert mean is not None
        return LinearMap(self.method, mean, matrix, removed, self.shrinkage)


def _tensor(buffer: Any) -> Tensor:
    """Return a buffer in float64: `model.half()` casts buffers too, and a map is stored as float64."""
    tensor: Tensor = buffer.double()
    return tensor
