"""Graphs by name or file, as PyG data objects."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean, import_optional
from uncollapse.io import GRAPHS, download, planetoid
from uncollapse.io.files import expand_user, user_cache
from uncollapse.io.loading import silence_libraries
from uncollapse.io.tensor_files import read_npz

PLANETOID = {name: title for name, title in GRAPHS.items() if name != "karate"}


def load_graph(what: str, root: Path | None) -> tuple[Any, str]:
    """Return a graph and its title.

    Args:
        what: karate, cora, citeseer or pubmed; a .npz file with node_features and edges; a .pt file with x, edge_index.
        root: Folder for the Planetoid files, such as "Cora/raw/ind.cora.x"; missing ones are downloaded.
    """
    check_graph_name(what)
    path = expand_user(what)
    if what == "karate":
        with silence_libraries():
            graph = import_optional("torch_geometric.datasets", "pyg").KarateClub()[0]
        return graph, "Zachary's karate club"
    if what in PLANETOID:
        return _planetoid(what, root), PLANETOID[what]
    return (_npz if path.suffix == ".npz" else _pt)(path), path.name


def check_graph_name(what: str) -> None:
    """Raise unless `what` is a known name or a file of a known kind."""
    path = expand_user(what)
    if what not in GRAPHS and not path.is_file():
        hint = did_you_mean(what, GRAPHS)
        raise UsageError(f"{what!r} is neither a known graph ({', '.join(GRAPHS)}) nor a file.{hint}")
    if what not in GRAPHS and path.suffix not in (".npz", ".pt"):
        raise UsageError(f"A graph file is .npz (node_features, edges) or .pt (x, edge_index), got {path.name}.")


def load_planetoid(what: str, root: Path | None) -> planetoid.Citations:
    """Load Cora, CiteSeer or PubMed from the raw files in a folder; missing files are downloaded first."""
    name, folder = PLANETOID[what], root or user_cache()
    places = (folder / name / "raw", folder / "planetoid" / name / "raw")
    there = next((place for place in places if not download.missing_files(place, planetoid.file_names(name))), None)
    if there is None:
        dataset = import_optional("torch_geometric.datasets", "pyg").Planetoid
        settings = {"name": name, "split": "public"}
        download.download_missing(dataset, settings, places[0], "the project kimiyoung/planetoid on GitHub")
    return planetoid.read_planetoid(there or places[0], name)


def _planetoid(what: str, root: Path | None) -> Any:
    graph = load_planetoid(what, root)
    masks = {"train_mask": graph.train, "val_mask": graph.validation, "test_mask": graph.test}
    return import_optional("torch_geometric.data", "pyg").Data(
        x=graph.x, edge_index=graph.edge_index, y=graph.y, **masks
    )


def _npz(path: Path) -> Any:
    """Read the layout of the heterophilous graphs; edges count in both directions, as in PyG."""
    arrays = read_npz(path, ("node_features", "edges"))
    if arrays["edges"].dtype.kind not in "iu":
        raise UsageError(f"{path} must have node indices in edges, got {arrays['edges'].dtype}.")
    features = torch.from_numpy(arrays["node_features"].astype("float32"))
    edges = torch.from_numpy(arrays["edges"].astype("int64"))
    if edges.dim() == 2 and edges.shape[1] == 2:
        edges = edges.T
    graph = _graph(path, features, edges)
    graph.edge_index = import_optional("torch_geometric.utils", "pyg").to_undirected(graph.edge_index)
    return graph


def _pt(path: Path) -> Any:
    from uncollapse.io.tensor_files import read_torch_file

    content = read_torch_file(path)
    if not isinstance(content, dict) or not {"x", "edge_index"} <= set(content):
        raise UsageError(f"{path} must hold a dictionary with x and edge_index, saved with torch.save.")
    for name in ("x", "edge_index"):
        if not isinstance(content[name], Tensor) or content[name].layout != torch.strided:
            raise UsageError(f"{path} must have a dense tensor in {name}, got {type(content[name]).__name__}.")
        if content[name].nbytes > content[name].untyped_storage().nbytes():  # such as one number expanded to billions
            raise UsageError(f"{path} declares {tuple(content[name].shape)} in {name}, but does not hold that many.")
    return _graph(path, content["x"], content["edge_index"])


def _graph(path: Path, x: Tensor, edge_index: Tensor) -> Any:
    if x.dim() != 2 or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise UsageError(
            f"{path} must have features (nodes, d) and edges (2, E) or (E, 2), "
            f"got {tuple(x.shape)} and {tuple(edge_index.shape)}."
        )
    edge_index = edge_index.long()
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < len(x):
        low, high = int(edge_index.min()), int(edge_index.max())
        raise UsageError(f"{path} has {len(x)} nodes, but its edges name nodes from {low} to {high}.")
    return import_optional("torch_geometric.data", "pyg").Data(x=x.float(), edge_index=edge_index)
