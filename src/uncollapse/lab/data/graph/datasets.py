"""Load graphs for node classification by name, with a split and normalized features."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io import graphs
from uncollapse.io.files import expand_user, user_cache
from uncollapse.lab.data.graph import graph_files
from uncollapse.lab.data.graph.random_graphs import arxiv_like, csbm
from uncollapse.lab.data.graph.splits import (
    SPLITS,
    OwnSplits,
    Split,
    choose_split,
    split_by_class,
    split_by_count,
)
from uncollapse.lab.runs.results import fingerprint

__all__ = [
    "DRAWN",
    "NAMES",
    "NORMALISATIONS",
    "SELF_LOOPS",
    "SPLITS",
    "WITH_SELF_LOOPS",
    "Graph",
    "GraphSource",
    "arxiv_like",
    "csbm",
    "load_graph",
    "to_undirected",
]


@dataclass(frozen=True)
class Graph:
    """Nodes x (n, d), edges (2, E) in both directions, classes y (n,), and masks (n,)."""

    name: str
    x: Tensor
    edge_index: Tensor
    y: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return int(self.y.max()) + 1

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change when any value of the data does."""
        return fingerprint((self.x, self.edge_index, self.y, self.train, self.validation, self.test))


@dataclass(frozen=True)
class GraphSource:
    """A dataset as it is stored: x (n, d), edges (2, E) in any direction, classes y (n,), and its own splits."""

    x: Tensor
    edges: Tensor
    y: Tensor
    own: OwnSplits


def load_graph(
    name: str,
    *,
    split: str = "published",
    split_index: int = 0,
    normalise: str = "auto",
    missing: float = 0.0,
    self_loops: str = "published",
    root: Path | None = None,
    drawn: Mapping[str, Any] | None = None,
) -> Graph:
    """Return a graph by name, with a split by name.

    Args:
        name: One of `NAMES`; karate and the random graphs `DRAWN` need no files.
        split: One of `SPLITS`, see `splits.choose_split`.
        split_index: Which of several splits; also the seed of random splits, missing features and graphs.
        normalise: One of `NORMALISATIONS`, see `normalise_features`.
        missing: Share of the nodes outside training whose features are set to zero.
        self_loops: One of `SELF_LOOPS`: "published" keeps those that the files of `WITH_SELF_LOOPS` have, as
            ContraNorm's code does; "none" drops them. Self-loops in other files are always dropped.
        root: Folder that has the datasets, or gets them.
        drawn: Arguments of the random graph, for `DRAWN`.

    >>> graph = load_graph("csbm")
    >>> graph.x.shape, graph.classes, int(graph.train.sum()), int(graph.validation.sum()), int(graph.test.sum())
    (torch.Size([600, 32]), 3, 60, 140, 400)
    """
    for field, value, choices in (("data", name, NAMES), ("self_loops", self_loops, SELF_LOOPS)):
        if value not in choices:
            hint = did_you_mean(value, choices)
            raise UsageError(f"{field} must be one of {', '.join(choices)}, got {value!r}.{hint}")
    folder = expand_user(root or user_cache())
    source = DRAWN[name](split_index, drawn or {}) if name in DRAWN else SOURCES[name](name, folder, split_index)
    masks = choose_split(split, split_index, source.y, source.own, name=name, root=folder)
    x = normalise_features(source.x, normalise)
    x = hide_features(x, ~masks.train, missing, split_index)
    keep_loops = name in WITH_SELF_LOOPS and self_loops == "published"
    if keep_loops and not bool((source.edges[0] == source.edges[1]).any()):
        raise UsageError(
            f"{name} has self-loops as published, but the file at hand has none. Put {name}_directed.npz of "
            f"yandex-research/heterophilous-graphs next to it, or pass --self-loops none."
        )
    return Graph(name, x, to_undirected(source.edges, len(source.y), keep_loops), source.y, *masks)


def to_undirected(edges: Tensor, nodes: int, self_loops: bool = False) -> Tensor:
    """Return both directions of every edge once, sorted; with or without self-loops."""
    both = torch.cat([edges, edges.flip(0)], 1)
    both = both if self_loops else both[:, both[0] != both[1]]
    codes = torch.unique(both[0] * nodes + both[1])
    return torch.stack([codes // nodes, codes % nodes])


def _csbm(seed: int, drawn: Mapping[str, Any]) -> GraphSource:
    x, edges, y = csbm(**drawn, seed=seed)
    own = (split_by_count(y, 20, 140, seed),)
    return GraphSource(x, edges, y, OwnSplits(own, own))


def _arxiv_like(seed: int, drawn: Mapping[str, Any]) -> GraphSource:
    """Return a random graph with the shares of ogbn-arxiv's split, 54/18/28, drawn within each class."""
    x, edges, y = arxiv_like(**drawn, seed=seed)
    own = (split_by_class(y, (0.54, 0.18), seed),)
    return GraphSource(x, edges, y, OwnSplits(own, own))


def _karate(name: str, root: Path, seed: int) -> GraphSource:
    """Return the karate club: its four labeled nodes are for training, a random half of the others for validation."""
    data, _ = graphs.load_graph(name, None)
    others = (~data.train_mask).nonzero().squeeze(1)
    others = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))]
    validation = torch.zeros_like(data.train_mask).index_fill(0, others[: len(others) // 2], True)
    own = (Split(data.train_mask, validation, ~(data.train_mask | validation)),)
    return GraphSource(data.x, data.edge_index, data.y, OwnSplits(own, own))


def _planetoid(name: str, root: Path, seed: int) -> GraphSource:
    data = graphs.load_planetoid(name, root)
    public = Split(data.train, data.validation, data.test)
    published = public._replace(test=~(data.train | data.validation))
    return GraphSource(data.x, data.edge_index, data.y, OwnSplits((published,), (public,)))


def _heterophilous(name: str, root: Path, seed: int) -> GraphSource:
    data = graph_files.read_heterophilous(name, root)
    return GraphSource(data.x, data.edges, data.y, OwnSplits(data.splits, data.splits, fixed=True))


def _arxiv(name: str, root: Path, seed: int) -> GraphSource:
    data = graph_files.read_arxiv(root)
    return GraphSource(data.x, data.edges, data.y, OwnSplits((data.split,), (data.split,)))


SOURCES: dict[str, Callable[[str, Path, int], GraphSource]] = {
    "karate": _karate,
    **dict.fromkeys(graphs.PLANETOID, _planetoid),
    **dict.fromkeys(graph_files.LOADERS, _heterophilous),
    "arxiv": _arxiv,
}
DRAWN: dict[str, Callable[[int, Mapping[str, Any]], GraphSource]] = {"csbm": _csbm, "arxiv_like": _arxiv_like}
NAMES = ("csbm", *SOURCES, "arxiv_like")
WITH_SELF_LOOPS = ("chameleon", "squirrel")
SELF_LOOPS = ("published", "none")


NORMALISATIONS = ("auto", "rows", "unit", "standard", "none")


def normalise_features(x: Tensor, how: str) -> Tensor:
    """Return features (n, d) on a common scale.

    - rows: the absolute values of each node sum to one;
    - unit: each node has length one;
    - standard: each feature has mean zero and variance one over all nodes;
    - none: unchanged;
    - auto: rows where no value is negative (bags of words), none otherwise.

    Nodes without features and constant features become zero.

    >>> normalise_features(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), "rows")
    tensor([[0.7500, 0.2500],
            [0.0000, 0.0000]])
    """
    if how not in NORMALISATIONS:
        hint = did_you_mean(how, NORMALISATIONS)
        raise UsageError(f"normalise must be one of {', '.join(NORMALISATIONS)}, got {how!r}.{hint}")
    if how == "auto":
        how = "rows" if bool((x >= 0).all()) else "none"
    if how == "rows":
        return x / x.abs().sum(1, keepdim=True).clamp(min=1e-12)
    if how == "unit":
        return torch.nn.functional.normalize(x, dim=1, eps=1e-12)
    if how == "standard":
        centred = x - x.mean(0)
        varies = x.amax(0) > x.amin(0)  # rounding leaves a variance where there is none
        return torch.where(varies, centred / centred.square().mean(0).sqrt().clamp(min=1e-12), 0.0)
    return x


def hide_features(x: Tensor, nodes: Tensor, share: float, seed: int) -> Tensor:
    """Set the features of a random share of some nodes (mask) to zero: PairNorm's missing features."""
    if not 0.0 <= share <= 1.0:
        raise UsageError(f"missing must be between 0 and 1, got {share}.")
    candidates = nodes.nonzero().squeeze(1)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return x.index_fill(0, candidates[order[: round(share * len(candidates))]], 0.0)
