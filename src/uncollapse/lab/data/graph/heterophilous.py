"""Load heterophilous graphs, whose neighbours are often of another class: Wikipedia pages, actors, university pages."""

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.errors import UsageError, import_optional
from uncollapse.io import download
from uncollapse.io.loading import silence_libraries
from uncollapse.io.tensor_files import read_npz
from uncollapse.lab.data.graph.splits import Split, split_from_masks

ARRAYS = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")


class PygLoader(NamedTuple):
    """How PyG loads a graph: its class, its folder and that of its raw files below the root, and its arguments."""

    dataset: str
    top: str
    raw: str
    settings: dict[str, Any]


def _webkb(name: str) -> PygLoader:
    return PygLoader("WebKB", ".", f"{name}/raw", {"name": name})


def _wikipedia(name: str) -> PygLoader:
    return PygLoader("WikipediaNetwork", ".", f"{name}/geom_gcn/raw", {"name": name, "geom_gcn_preprocess": True})


LOADERS: dict[str, PygLoader | None] = {
    "chameleon": _wikipedia("chameleon"),
    "squirrel": _wikipedia("squirrel"),
    "chameleon_filtered": None,
    "squirrel_filtered": None,
    "actor": PygLoader("Actor", "actor", "actor/raw", {}),
    "cornell": _webkb("cornell"),
    "texas": _webkb("texas"),
    "wisconsin": _webkb("wisconsin"),
}


class Heterophilous(NamedTuple):
    """Features x (n, d), edges (2, E), classes y (n,), and Geom-GCN's splits."""

    x: Tensor
    edges: Tensor
    y: Tensor
    splits: tuple[Split, ...]


def read_heterophilous(name: str, root: Path) -> Heterophilous:
    """Return a graph by name, from `heterophilous/NAME.npz` or `NAME.npz` below the root, or else with PyG."""
    places = [folder / f"{name}.npz" for folder in (root / "heterophilous", root)]
    there = next((path for path in places if path.is_file()), None)
    if there is not None:
        return _check_arrays(read_npz(there, ARRAYS), there)
    loader = LOADERS[name]
    if loader is None:
        raise UsageError(
            f"{name} was not found. Get {name}.npz from the project yandex-research/heterophilous-graphs on GitHub and "
            f"put it into {root / 'heterophilous'}, or name the folder that has it with --data-root."
        )
    return _load_with_pyg(loader, name, root)


def _check_arrays(arrays: dict[str, NDArray[Any]], path: Path) -> Heterophilous:
    x, y, edges = (arrays[key] for key in ("node_features", "node_labels", "edges"))
    nodes = len(x) if x.ndim == 2 else 0
    if nodes == 0 or not numpy.isfinite(x).all():
        raise UsageError(f"{path} must have in node_features finite numbers (nodes, d), got shape {x.shape}.")
    if y.shape != (nodes,) or y.dtype.kind not in "iu" or not 0 <= y.min() <= y.max() < nodes:
        raise UsageError(f"{path} must have in node_labels {nodes} classes counted from 0, got {y.dtype} of {y.shape}.")
    if edges.ndim != 2 or edges.shape[1] != 2 or edges.dtype.kind not in "iu":
        raise UsageError(f"{path} must have in edges numbers of nodes (E, 2), got {edges.dtype} of {edges.shape}.")
    if len(edges) and not 0 <= edges.min() <= edges.max() < nodes:
        raise UsageError(f"{path} has {nodes} nodes, and edges to {edges.min()} … {edges.max()}.")
    parts = [arrays[key] for key in ARRAYS[3:]]
    if not all(part.ndim == 2 and 0 < len(part) == len(parts[0]) for part in parts):
        raise UsageError(f"{path} must have masks (splits, nodes), got {', '.join(str(part.shape) for part in parts)}.")
    return Heterophilous(
        torch.from_numpy(x.astype("float32")),
        torch.from_numpy(edges.astype("int64")).T,
        torch.from_numpy(y.astype("int64")),
        tuple(split_from_masks(split, nodes, path) for split in zip(*parts, strict=True)),
    )


def _load_with_pyg(loader: PygLoader, name: str, root: Path) -> Heterophilous:
    """Read a graph with PyG in a temporary folder, as it writes next to what it reads."""
    dataset = getattr(import_optional("torch_geometric.datasets", "pyg"), loader.dataset)
    folder = root / loader.raw
    page = (
        f"the project graphdml-uiuc-jlu/geom-gcn on GitHub (or put {name}.npz of yandex-research/heterophilous-graphs "
        f"into {root / 'heterophilous'})"
    )
    download.download_missing(dataset, loader.settings, folder, page)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(folder, Path(scratch) / loader.raw, copy_function=shutil.copyfile)
        try:
            with silence_libraries():
                data = dataset(str(Path(scratch) / loader.top), **loader.settings)[0]
        except Exception as error:  # a damaged file can make its reader raise anything
            raise UsageError(f"{folder} has no valid raw files of {name}. Get them again from {page}.") from error
    found = (data.x, data.y, data.edge_index.T, data.train_mask.T, data.val_mask.T, data.test_mask.T)
    return _check_arrays({key: tensor.numpy() for key, tensor in zip(ARRAYS, found, strict=True)}, folder)
