"""A deep graph convolutional network on a citation graph, with no norm, LayerNorm or ContraNorm.

The protocol is that of ContraNorm's published code (arXiv 2303.06562): features normalised by row, adjacency
D⁻¹(A + I), dropout before each layer, every hidden layer followed by the norm and ReLU, one LayerNorm shared by all of
them, no norm after the output layer. ContraNorm leaves out neighbours. The last epoch is tested, on every node that is
neither for training nor for validation. The weights are initialised as PyG does, which is not the published code's way.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.cures import ContraNorm
from uncollapse.lab.records import record
from uncollapse.loading import graphs
from uncollapse.loading.errors import library
from uncollapse.registry import CURES

NAME = "deep_gcn"
TITLE = "A deep GCN on Cora, CiteSeer or PubMed, with no norm, LayerNorm or ContraNorm"
PAPER = CURES["contra_norm"].paper

Progress = Callable[[int], None]  # called with the number of epochs done

NORMS = ("none", "layer", "contra")


@dataclass(frozen=True)
class Config:
    """A run. norm: "none", "layer" or "contra", with `scale` for the latter.

    graph: cora, citeseer, pubmed, or karate, which is small and comes with PyG. root: the folder of the others.
    """

    norm: str = "contra"
    scale: float = 1.0
    depth: int = 16
    hidden: int = 32
    dropout: float = 0.6
    lr: float = 5e-3
    weight_decay: float = 5e-4
    epochs: int = 200
    graph: str = "cora"
    root: str | None = None
    seed: int = 0


class DeepGCN(nn.Module):
    """`depth` graph convolutions; the same norm follows each but the last."""

    def __init__(self, features: int, classes: int, config: Config) -> None:
        super().__init__()
        conv: Any = library("torch_geometric.nn", "pyg").GCNConv
        sizes = [features, *[config.hidden] * (config.depth - 1), classes]
        self.convs = nn.ModuleList(conv(a, b, normalize=False) for a, b in pairwise(sizes))
        self.norm = _norm(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Nodes (n, features) and edges (2, E) without self-loops -> logits (n, classes)."""
        edges, weights = mean_over_neighbours(edge_index, len(x))
        *hidden, last = self.convs
        for conv in hidden:
            x = conv(F.dropout(x, self.dropout, self.training), edges, weights)
            x = self.norm(x, edge_index=edge_index).relu()
        out: Tensor = last(F.dropout(x, self.dropout, self.training), edges, weights)
        return out


class _PlainNorm(nn.Module):
    """A norm that does not look at the edges."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def _norm(config: Config) -> nn.Module:
    match config.norm:
        case "none":
            return _PlainNorm(nn.Identity())
        case "layer":
            return _PlainNorm(nn.LayerNorm(config.hidden))
        case "contra":
            return ContraNorm.preset("gnn", config.hidden, config.scale, after="layer")
    raise ValueError(f"norm must be one of {NORMS}, got {config.norm!r}.")


def mean_over_neighbours(edge_index: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """D⁻¹(A + I) as edges (2, E + n) and their weights: each node takes the mean of its neighbours and itself."""
    loops = torch.arange(nodes, device=edge_index.device).expand(2, -1)
    edges = torch.cat([edge_index, loops], 1)
    degree = torch.bincount(edges[1], minlength=nodes)
    return edges, 1.0 / degree[edges[1]]


def load(config: Config) -> Any:
    """The graph with rows of features that sum to one."""
    graph, _ = graphs.load(config.graph, None if config.root is None else Path(config.root))
    if "train_mask" not in graph:
        raise ValueError(f"{config.graph} does not say which nodes are for training; choose one of {graphs.NAMES}.")
    graph.x = graph.x / graph.x.sum(1, keepdim=True).clamp(min=1e-12)
    return graph


def train(config: Config, progress: Progress | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Train a model, and give it in evaluation mode with the record of the run. The random state is not touched."""
    graph, losses = load(config), []
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = DeepGCN(graph.num_features, int(graph.y.max()) + 1, config)
        optimiser = torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        for epoch in range(1, config.epochs + 1):
            losses.append(_step(model, optimiser, graph))
            if progress is not None:
                progress(epoch)
    figures = {"losses": losses, "accuracy": accuracies(model, graph)}
    seconds = time.perf_counter() - started
    public = replace(config, root=None)  # where the graph lies on this machine is nobody's business
    return model, record(NAME, public, seconds, ("torch_geometric",), **figures)


def _step(model: nn.Module, optimiser: torch.optim.Optimizer, graph: Any) -> float:
    model.train()
    logits = model(graph.x, graph.edge_index)
    loss = F.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask])
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    optimiser.step()
    return loss.item()


@torch.no_grad()
def accuracies(model: nn.Module, graph: Any) -> dict[str, float]:
    """Share of the nodes that the model names rightly; it is left in evaluation mode."""
    model.eval()
    right: Tensor = (model(graph.x, graph.edge_index).argmax(1) == graph.y).float()
    seen = {"train": graph.train_mask} | ({"validation": graph.val_mask} if "val_mask" in graph else {})
    rest = ~torch.stack(list(seen.values())).any(0)
    return {name: float(right[mask].mean()) for name, mask in {**seen, "test": rest}.items()}


def run(config: Config) -> dict[str, Any]:
    """Train a model, and give the record of the run."""
    return train(config)[1]
