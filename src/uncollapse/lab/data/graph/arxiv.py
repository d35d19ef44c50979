"""Load ogbn-arxiv, papers that cite each other. The library ogb downloads it; its CSV files are read here."""

import gzip
import importlib
import io
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.io.download import cause, missing_files
from uncollapse.io.loading import silence_libraries
from uncollapse.io.tensor_files import check_unpacked
from uncollapse.lab.data.graph.splits import Split, split_from_masks

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
