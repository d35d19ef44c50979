"""Graphs for node classification, with their splits, as tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io import graphs
from uncollapse.io.files import expand_user, user_cache
from uncollapse.lab.data.graph import arxiv, heterophilous
from uncollapse.lab.data.graph.csbm import csbm
from uncollapse.lab.data.graph.features import NORMALISATIONS, hide
from uncollapse.lab.data.graph.features import normalise as normalised
from uncollapse.lab.data.graph.splits import SPLITS, Own, Split, by_count, choose
from uncollapse.lab.runs.records import fingerprint

__all__ = ["NAMES", "NORMALISATIONS", "SPLITS", "Graph", "Source", "load", "undirected"]


@dataclass(frozen=True)
class Graph:
    """Nodes x (n, d), edges (2, E) in both directions without self-loops, classes y (n,), and masks (n,)."""

    name: str
    x: Tensor
    edge_index: Tensor
    y: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.y.max()) + 1

    def fingerprint(self) -> str:
        """16 hex digits that change when any value of the data does."""
        return fingerprint((self.x, self.edge_index, self.y, self.train, self.validation, self.test))


@dataclass(frozen=True)
class Source:
    """A data set as it comes: x (n, d), edges (2, E) in any direction, classes y (n,), and its own splits."""

    x: Tensor
    edges: Tensor
    y: Tensor
    own: Own


def load(
    name: str,
    *,
    split: str = "published",
    split_index: int = 0,
    normalise: str = "auto",
    missing: float = 0.0,
    root: Path | None = None,
    drawn: Mapping[str, Any] | None = None,
) -> Graph:
    """A graph by name, with a split by name.

    Args:
        name: one of `NAMES`; csbm and karate need no files.
        split: one of `SPLITS`, see `splits.choose`.
        split_index: which of several splits; also what random splits, missing features and csbm are drawn by.
        normalise: one of `NORMALISATIONS`, see `features.normalise`.
        missing: share of the nodes that are not for training whose features are set to zero.
        root: the folder that has the data sets, or gets them.
        drawn: arguments of `csbm`, for that graph: its size and so on.

    >>> graph = load("csbm")
    >>> graph.x.shape, graph.classes, int(graph.train.sum()), int(graph.validation.sum()), int(graph.test.sum())
    (torch.Size([600, 32]), 3, 60, 140, 400)
    """
    if name not in NAMES:
        hint = did_you_mean(name, NAMES)
        raise UsageError(f"data must be one of {', '.join(NAMES)}, got {name!r}.{hint}")
    folder = expand_user(root or user_cache())
    source = _csbm(split_index, drawn or {}) if name == "csbm" else SOURCES[name](name, folder, split_index)
    masks = choose(split, split_index, source.y, source.own, name=name, root=folder)
    x = normalised(source.x, normalise)
    x = hide(x, ~masks.train, missing, split_index)
    return Graph(name, x, undirected(source.edges, len(source.y)), source.y, *masks)


def undirected(edges: Tensor, nodes: int) -> Tensor:
    """Both directions of every edge once, without self-loops, sorted."""
    both = torch.cat([edges, edges.flip(0)], 1)
    both = both[:, both[0] != both[1]]
    codes = torch.unique(both[0] * nodes + both[1])
    return torch.stack([codes // nodes, codes % nodes])


def _csbm(seed: int, drawn: Mapping[str, Any]) -> Source:
    x, edges, y = csbm(**drawn, seed=seed)
    own = (by_count(y, 20, 140, seed),)
    return Source(x, edges, y, Own(own, own))


def _karate(name: str, root: Path, seed: int) -> Source:
    """Its four labelled nodes are for training; half of the others, by the seed, for validation."""
    data, _ = graphs.load_graph(name, None)
    others = (~data.train_mask).nonzero().squeeze(1)
    others = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))]
    validation = torch.zeros_like(data.train_mask).index_fill(0, others[: len(others) // 2], True)
    own = (Split(data.train_mask, validation, ~(data.train_mask | validation)),)
    return Source(data.x, data.edge_index, data.y, Own(own, own))


def _planetoid(name: str, root: Path, seed: int) -> Source:
    data = graphs.load_planetoid(name, root)
    public = Split(data.train, data.validation, data.test)
    published = public._replace(test=~(data.train | data.validation))
    return Source(data.x, data.edge_index, data.y, Own((published,), (public,)))


def _heterophilous(name: str, root: Path, seed: int) -> Source:
    data = heterophilous.read(name, root)
    return Source(data.x, data.edges, data.y, Own(data.splits, data.splits, fixed=True))


def _arxiv(name: str, root: Path, seed: int) -> Source:
    data = arxiv.read(root)
    return Source(data.x, data.edges, data.y, Own((data.split,), (data.split,)))


SOURCES: dict[str, Callable[[str, Path, int], Source]] = {
    "karate": _karate,
    **dict.fromkeys(graphs.PLANETOID, _planetoid),
    **dict.fromkeys(heterophilous.LOADERS, _heterophilous),
    "arxiv": _arxiv,
}
NAMES = ("csbm", *SOURCES)
