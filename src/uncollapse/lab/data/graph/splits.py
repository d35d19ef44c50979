"""Splits of a graph's nodes into training, validation and test."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io.tensor_files import read_npz

SPLITS = ("published", "public", "60/20/20", "48/32/20", "contranorm")
SHARES = {"60/20/20": (0.6, 0.2), "48/32/20": (0.48, 0.32)}


class Split(NamedTuple):
    """Three masks (n,) that do not overlap; they need not cover all nodes."""

    train: Tensor
    validation: Tensor
    test: Tensor


@dataclass(frozen=True)
class OwnSplits:
    """The splits that come with a dataset: one, or one per index.

    published: those of ContraNorm's published code. public: those of the dataset itself. fixed: whether the public
    ones are the usual splits 48/32/20 (Geom-GCN's).
    """

    published: tuple[Split, ...]
    public: tuple[Split, ...]
    fixed: bool = False


def choose_split(split: str, index: int, y: Tensor, own: OwnSplits, *, name: str, root: Path) -> Split:
    """Return a split by name.

    - published: as in ContraNorm's published code: Planetoid's public training and validation nodes with every other
      node for the test, and Geom-GCN's split of that index for the heterophilous graphs.
    - public: that of the dataset: Planetoid's own, Geom-GCN's, ogbn-arxiv's by year.
    - 60/20/20: drawn at random within each class, with the index as seed.
    - 48/32/20: Geom-GCN's of that index, for citation graphs from `geom_gcn_splits/NAME_split_0.6_0.2_INDEX.npz`; drawn
      as above for graphs without any.
    - contranorm: the one split 60/20/20 of ContraNorm's repository, from `contranorm_splits/NAME.npz`.

    Where there is one split only, the index does not matter.
    """
    if split not in SPLITS:
        raise UsageError(f"split must be one of {', '.join(SPLITS)}, got {split!r}.{did_you_mean(split, SPLITS)}")
    if index < 0:
        raise UsageError(f"split_index must be 0 or more, got {index}.")
    if split == "contranorm":
        return _contranorm(root / "contranorm_splits" / f"{name}.npz", len(y))
    files = sorted((root / "geom_gcn_splits").glob(f"{name}_split_0.6_0.2_*.npz")) if split == "48/32/20" else []
    if files:
        return _geom_gcn(files, index, len(y))
    if split in SHARES and not (own.fixed and split == "48/32/20"):
        return split_by_class(y, SHARES[split], index)
    return _split_at(own.published if split == "published" else own.public, index, name)


def split_by_class(y: Tensor, shares: tuple[float, float], seed: int) -> Split:
    """Draw shares of each class for training and validation, the rest for the test. Each class has a training node."""
    random = torch.Generator().manual_seed(seed)
    part = torch.full_like(y, 2)
    for label in torch.unique(y):
        nodes = (y == label).nonzero().squeeze(1)
        nodes = nodes[torch.randperm(len(nodes), generator=random)]
        train = max(1, round(shares[0] * len(nodes)))
        part[nodes[:train]] = 0
        part[nodes[train : train + round(shares[1] * len(nodes))]] = 1
    return Split(part == 0, part == 1, part == 2)


def split_by_count(y: Tensor, train: int, validation: int, seed: int) -> Split:
    """Draw `train` nodes per class for training, `validation` of the others, and leave the rest for the test."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    chosen = torch.cat([order[y[order] == label][:train] for label in torch.unique(y)])
    part = torch.full_like(y, 2).index_fill(0, chosen, 0)
    part[order[part[order] == 2][:validation]] = 1
    return Split(part == 0, part == 1, part == 2)


def split_from_masks(arrays: Sequence[NDArray[Any]], nodes: int, where: Path) -> Split:
    """Return a split from three boolean arrays of the right length, without overlap, with nodes in each."""
    for array in arrays:
        if array.shape != (nodes,) or not numpy.isin(array, (0, 1)).all():
            raise UsageError(f"{where} must have masks of {nodes} booleans, got {array.dtype} of shape {array.shape}.")
    split = Split(*(torch.from_numpy(array.astype(bool)) for array in arrays))
    if int(torch.stack(split).sum(0).max()) > 1:
        raise UsageError(f"{where} has a node in two of training, validation and test.")
    if not all(bool(mask.any()) for mask in split):
        raise UsageError(f"{where} has no node for training, validation or test.")
    return split


def _split_at(own: tuple[Split, ...], index: int, name: str) -> Split:
    if len(own) > 1 and index >= len(own):
        raise UsageError(f"{name} has the splits 0 … {len(own) - 1}, got split_index {index}.")
    return own[index if len(own) > 1 else 0]


def _geom_gcn(files: list[Path], index: int, nodes: int) -> Split:
    wanted = next((path for path in files if path.stem.endswith(f"_{index}")), None)
    if wanted is None:
        raise UsageError(f"{files[0].parent} has {files[0].name} … {files[-1].name}, but none for split_index {index}.")
    arrays = read_npz(wanted, ("train_mask", "val_mask", "test_mask"))
    return split_from_masks(list(arrays.values()), nodes, wanted)


def _contranorm(path: Path, nodes: int) -> Split:
    if not path.is_file():
        raise UsageError(
            f"The split contranorm needs {path}, a file of ContraNorm's repository (PKU-ML/ContraNorm on GitHub) for "
            "cora, citeseer and pubmed. Put it there, or use 60/20/20."
        )
    arrays = read_npz(path, ("train", "val", "test"))
    for key, array in arrays.items():
        bad = array.ndim != 1 or array.dtype.kind not in "iu" or len(numpy.unique(array)) != len(array)
        if bad or (len(array) and not 0 <= array.min() <= array.max() < nodes):
            raise UsageError(f"{path} must have in {key} node indices below {nodes}, each once.")
    return split_from_masks([numpy.isin(numpy.arange(nodes), array) for array in arrays.values()], nodes, path)
