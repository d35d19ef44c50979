"""Graphs by name or file, as PyG data objects."""

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from uncollapse.loading.errors import UsageError, library
from uncollapse.loading.quiet import quiet

PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
NAMES = ("karate", *PLANETOID)


def load(what: str, root: Path | None) -> tuple[Any, str]:
    """A graph and what it is, in words.

    Args:
        what: karate, cora, citeseer or pubmed; a .npz file with node_features and edges; a .pt file with x, edge_index.
        root: the folder that has or gets the Planetoid files, as "Cora/raw/ind.cora.x" and so on.
    """
    check_name(what)
    path = Path(what).expanduser()
    if what == "karate":
        with quiet():
            graph = library("torch_geometric.datasets", "pyg").KarateClub()[0]
        return graph, "Zachary's karate club"
    if what in PLANETOID:
        return _planetoid(PLANETOID[what], root or default_root()), PLANETOID[what]
    return (_npz if path.suffix == ".npz" else _pt)(path), path.name


def check_name(what: str) -> None:
    """Raise unless it is a name or a file of a known kind."""
    path = Path(what).expanduser()
    if what not in NAMES and not path.is_file():
        raise UsageError(f"{what!r} is neither a graph known by name ({', '.join(NAMES)}) nor a file.")
    if what not in NAMES and path.suffix not in (".npz", ".pt"):
        raise UsageError(f"A graph file is .npz (node_features, edges) or .pt (x, edge_index), got {path.name}.")


def default_root() -> Path:
    """Where graphs are kept that are fetched."""
    return Path.home() / ".cache" / "uncollapse"


def _planetoid(name: str, root: Path) -> Any:
    """A citation graph read by PyG, in a folder of its own if the files are there: PyG writes beside what it reads."""
    planetoid: Any = library("torch_geometric.datasets", "pyg").Planetoid
    places = (root / name / "raw", root / "planetoid" / name / "raw")
    there = next((place for place in places if any(place.glob("ind.*"))), None)
    try:
        with quiet(), tempfile.TemporaryDirectory() as scratch:
            if there is not None:
                shutil.copytree(there, Path(scratch) / name / "raw", copy_function=shutil.copyfile)
            return planetoid(scratch if there is not None else str(root), name)[0]
    except OSError as error:
        raise UsageError(
            f"{name} is not whole in {there or root} and cannot be fetched now; put Planetoid's raw files into "
            f"{places[0]}, or name the folder that has them with --data-root."
        ) from error


def _npz(path: Path) -> Any:
    """The layout of the heterophilous graphs; edges count in both directions, as PyG reads them."""
    try:
        with numpy.load(path, allow_pickle=False) as file:
            arrays = {key: torch.from_numpy(file[key]) for key in ("node_features", "edges") if key in file}
            there = ", ".join(file)
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is no intact .npz file of numbers.") from error
    if len(arrays) < 2:
        raise UsageError(f"{path} must have node_features and edges. There are: {there}.")
    features, edges = arrays["node_features"], arrays["edges"]
    if edges.dim() == 2 and edges.shape[1] == 2:
        edges = edges.T
    graph = _graph(path, features, edges)
    graph.edge_index = library("torch_geometric.utils", "pyg").to_undirected(graph.edge_index)
    return graph


def _pt(path: Path) -> Any:
    from uncollapse.loading.checkpoints import read_torch_file

    content = read_torch_file(path)
    if not isinstance(content, dict) or not {"x", "edge_index"} <= set(content):
        raise UsageError(f"{path} must hold a dictionary with x and edge_index, saved with torch.save.")
    return _graph(path, content["x"], content["edge_index"])


def _graph(path: Path, x: Tensor, edge_index: Tensor) -> Any:
    if x.dim() != 2 or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise UsageError(
            f"{path} must have features (nodes, d) and edges (2, E) or (E, 2), "
            f"got {tuple(x.shape)} and {tuple(edge_index.shape)}."
        )
    edge_index = edge_index.long()
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < len(x):
        raise UsageError(f"{path} has {len(x)} nodes, and edges to {int(edge_index.min())} … {int(edge_index.max())}.")
    return library("torch_geometric.data", "pyg").Data(x=x.float(), edge_index=edge_index)
