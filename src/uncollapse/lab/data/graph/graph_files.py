"""Read the files of graph datasets: heterophilous graphs (Wikipedia, actors, university pages) and ogbn-arxiv."""

import gzip
import importlib
import io
import shutil
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.errors import UsageError, file_errors, import_optional
from uncollapse.io import download
from uncollapse.io.download import cause, missing_files
from uncollapse.io.loading import silence_libraries
from uncollapse.io.tensor_files import check_unpacked, read_header, read_npz, read_torch_file
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
    """Return a graph by name, from `heterophilous/NAME.npz` or `NAME.npz` below the root, or else with PyG.

    `NAME_directed.npz` comes before `NAME.npz`: it has the edges as they were first published, with self-loops.
    """
    folders = (root / "heterophilous", root)
    places = [folder / f"{file}.npz" for file in (f"{name}_directed", name) for folder in folders]
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


BLOCK, SPARE = 2**22, 2**26  # bytes that are unpacked at a time, and that a small file may unpack to
NAME = "ogbn_arxiv"  # of its folder
PARTS = ("train", "valid", "test")
FILES = (
    *(f"raw/{part}.csv.gz" for part in ("node-feat", "node-label", "edge")),
    *(f"split/time/{p}.csv.gz" for p in PARTS),
)


class Arxiv(NamedTuple):
    """Features x (n, d), edges (2, E) from a paper to those it cites, fields y (n,), and the split by year."""

    x: Tensor
    edges: Tensor
    y: Tensor
    split: Split


def read_arxiv(root: Path) -> Arxiv:
    """Read the graph from `ogbn_arxiv` below the root, where ogb downloads it if it is missing.

    ogb's own reader needs an unrestricted unpickler.
    """
    folder = root / NAME
    if missing_files(folder, FILES):
        _fetch(root, folder)
    x, y, edges = (_numbers(folder / file, kind) for file, kind in zip(FILES, ("f4", "i8", "i8"), strict=False))
    nodes = len(x)
    if y.shape != (nodes, 1) or edges.shape[1] != 2 or not numpy.isfinite(x).all():
        raise UsageError(
            f"{folder} must have finite features, labels (n, 1) and edges (E, 2), got {y.shape}, {edges.shape}."
        )
    if not 0 <= min(y.min(), edges.min()) <= max(y.max(), edges.max()) < nodes:
        raise UsageError(f"{folder} has labels or edges below 0 or above its {nodes} nodes.")
    places = [numpy.isin(numpy.arange(nodes), _numbers(folder / file, "i8")) for file in FILES[3:]]
    split = split_from_masks(places, nodes, folder)
    return Arxiv(torch.from_numpy(x), torch.from_numpy(edges).T, torch.from_numpy(y).squeeze(1), split)


def read_features(path: Path, nodes: int) -> Tensor:
    """Return features (nodes, d) from a .npy file or a tensor in a .pt file, such as GIANT's; nothing in it can run."""
    if path.suffix not in (".npy", ".pt"):
        raise UsageError(f"{path} must be a .npy or .pt file of features.")
    if not path.is_file():
        raise UsageError(f"{path} is not there. Name a file of features below --data-root, with a row per node.")
    x = read_torch_file(path) if path.suffix == ".pt" else _read_npy(path)
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] != nodes or not x.is_floating_point():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise UsageError(f"{path} must have floats ({nodes}, d), a row for each node, got {got}.")
    if not bool(x.isfinite().all()):
        raise UsageError(f"{path} must have finite features; some are NaN or infinite.")
    return x.float()


def _read_npy(path: Path) -> Tensor:
    with file_errors(path, ".npy file of numbers"):
        with path.open("rb") as file:
            read_header(file, path.stat().st_size)
        return torch.from_numpy(numpy.load(path, allow_pickle=False))


def _numbers(path: Path, kind: str) -> NDArray[Any]:
    try:
        _check_growth(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy only warns of an empty file
            return numpy.loadtxt(path, kind, delimiter=",", ndmin=2)
    except UsageError:
        raise
    except Exception as error:  # a torn file makes gzip, zlib and numpy raise several kinds
        raise UsageError(
            f"{path} is not a valid file of ogbn-arxiv. Remove {path.parents[1]} and get it again."
        ) from error


def _check_growth(path: Path) -> None:
    """Raise for a packed file that unpacks to far more than such files do."""
    unpacked = 0
    with gzip.open(path) as file:
        while block := file.read(BLOCK):
            unpacked += len(block)
            check_unpacked(path, unpacked, SPARE)


def _fetch(root: Path, folder: Path) -> None:
    files = ", ".join(missing_files(folder, FILES))
    advice = (
        f"put what is missing there from the Open Graph Benchmark ({files}), or name the folder that has {NAME} with "
        "--data-root."
    )
    if folder.is_dir():  # ogb would ask whether to replace it
        raise UsageError(f"{folder} is not complete. Remove it to have it fetched again, {advice}")
    try:
        ogb: Any = importlib.import_module("ogb.nodeproppred")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{folder} is not there, and {_why_not_importable(error)}. Install it with pip install ogb, {advice}"
        ) from error
    try:
        with silence_libraries(), redirect_stdout(io.StringIO()):  # it prints
            ogb.NodePropPredDataset("ogbn-arxiv", root=str(root))
    except (Exception, SystemExit) as error:  # the network, the disk, a question that nobody answers
        words = "ogb gave up" if isinstance(error, SystemExit) else cause(error)
        raise UsageError(f"{folder} is not there and cannot be fetched now ({words}): {advice}") from error


def _why_not_importable(error: ModuleNotFoundError) -> str:
    """Return why ogb cannot be imported."""
    library = "the library ogb, which fetches it,"
    own = (error.name or "").partition(".")[0] == "ogb"
    return f"{library} is not installed" if own else f"{library} does not start without {error.name}"
