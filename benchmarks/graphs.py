"""Training deep graph networks, beside the published dense form of ContraNorm in the same network."""

import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import printed_and_peak
from benchmarks.targets import SETUP, Result, faster, smaller
from uncollapse.lab.data.graph.datasets import Graph, csbm, load_graph, to_undirected
from uncollapse.lab.data.graph.splits import split_by_count
from uncollapse.lab.engine.runtime import use_threads
from uncollapse.lab.experiments.gcn import config as gcn_config
from uncollapse.lab.models.deep_gcn import adjacency, sparse_features

Epoch = Callable[[], None]
CORA, WORDS = 2708, 18  # its nodes, and the words of a node on average
DEEP = gcn_config.Config()  # as published: 16 layers of width 32, ContraNorm with scale 1 and one LayerNorm for all
LARGE = 100_000


def training() -> Iterator[Result]:
    yield from deep()
    yield from large()


def deep(nodes: int = CORA, rounds: int = 7) -> Iterator[Result]:
    torch.manual_seed(0)
    graph = cora_sized(nodes)
    check_the_same(graph)
    base, epoch = published(graph), ours(graph)
    yield faster(f"an epoch of a 16-layer GCN with ContraNorm, {graph.name}", 2.0, base, epoch, rounds)
    with use_threads(1):
        yield faster("  with one thread", None, base, epoch, rounds)
    yield faster("  with 512 nodes as sample", None, base, ours(graph, sample=512), rounds)
    features = ours(graph, norm="contra_norm_features")
    yield faster("  with D-ContraNorm, over features", None, base, features, rounds)
    body = "from benchmarks import graphs; graphs.{}(graphs.cora_sized(n))()"
    dense, linear = body.format("published"), body.format("ours")
    yield smaller("  peak memory, reading the graph included", 0.2, dense, linear, 256, nodes)


def large(nodes: int = LARGE, layers: int = 4) -> Iterator[Result]:
    """The published form would need a matrix of all pairs for each layer."""
    body = f"from benchmarks import graphs\nprint(graphs.epoch_seconds(n, {layers}))"
    *_, seconds, added = printed_and_peak(SETUP, body, 1000, nodes)
    name = f"an epoch of a {layers}-layer GCN with ContraNorm, {nodes:,} nodes"
    detail = f"a random graph; all pairs of nodes count, {layers - 1} times"
    yield Result(name, None, seconds, "s", False, detail)
    detail = f"one dense matrix takes {nodes**2 * 4 / 2**20:,.0f} MiB"
    yield Result("  peak memory, drawing the graph included", None, added, "MiB", False, detail)


def epoch_seconds(nodes: int, layers: int) -> float:
    """The first epoch on a random graph."""
    epoch = ours(block_model(nodes), layers=layers)
    start = time.perf_counter()
    epoch()
    return time.perf_counter() - start


def ours(graph: Graph, **changes: Any) -> Epoch:
    """An epoch as the recipe gcn-depth trains, without what the loop around it logs and saves."""
    model = gcn_config.build(gcn_config.Config(**changes), graph)
    return _epoch(model, graph, sparse_features(graph.x), graph.edge_index)


def published(graph: Graph) -> Epoch:
    """An epoch of the network as published."""
    return _epoch(PublishedGCN(graph.x.shape[1], graph.classes), graph, graph.x, _sparse(graph))


def _epoch(model: nn.Module, graph: Graph, *inputs: Tensor) -> Epoch:
    """Forward, backward and a step of Adam; there is one batch in an epoch."""
    optimiser = torch.optim.Adam(model.parameters(), lr=DEEP.lr, weight_decay=DEEP.weight_decay, fused=True)
    model.train()

    def run() -> None:
        optimiser.zero_grad()
        logits = model(*inputs)
        torch.autograd.backward(F.cross_entropy(logits[graph.train], graph.y[graph.train]))
        optimiser.step()

    return run


class PublishedGCN(nn.Module):
    """The same network with all pairs of nodes in a matrix, and dense features."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        widths = [features, *[DEEP.hidden] * (DEEP.layers - 1), classes]
        self.convs = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.norm = nn.LayerNorm(DEEP.hidden)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        for number, conv in enumerate(self.convs):
            if number:
                x = self.norm(dense_contra_norm(x, adjacency, DEEP.scale)).relu()
            x = conv(torch.sparse.mm(adjacency, F.dropout(x, DEEP.dropout, self.training)))
        return x


def dense_contra_norm(x: Tensor, adjacency: Tensor, scale: float, temperature: float = 1.0) -> Tensor:
    """As published for graphs, operation by operation; adjacency (n, n) has self-loops."""
    unit = F.normalize(x, dim=1)
    logits = unit @ unit.T / temperature
    logits.masked_fill_(adjacency.to_dense() > 1e-5, -torch.inf)
    mean = logits.softmax(1) @ x
    return (1 + scale) * x - scale * mean


def _sparse(graph: Graph) -> Tensor:
    """D⁻¹(A + I) in coordinates, as it is published."""
    return adjacency(graph.edge_index, len(graph.y), "mean").to_sparse().coalesce()


@torch.no_grad()
def check_the_same(graph: Graph) -> None:
    """With the same weights both networks give the same, or times side by side would say nothing."""
    model, dense = gcn_config.build(DEEP, graph).eval(), PublishedGCN(graph.x.shape[1], graph.classes).eval()
    weights = model.state_dict().items()
    dense.load_state_dict({name.replace("lin.", "").replace("norms.0.norm.", ""): value for name, value in weights})
    expected = dense(graph.x, _sparse(graph))
    torch.testing.assert_close(model(sparse_features(graph.x), graph.edge_index), expected, rtol=1e-3, atol=1e-3)


def cora_sized(nodes: int) -> Graph:
    """Cora from the folder named by UNCOLLAPSE_DATA, else (or with another number of nodes) a random graph like it."""
    root = Path(os.environ.get("UNCOLLAPSE_DATA", ""))
    if nodes == CORA and (root / "planetoid/Cora/raw/ind.cora.graph").is_file():
        return load_graph("cora", root=root)
    x, edges, y = csbm(nodes, 7, degree=2 * 5278 / CORA, features=1433)
    words = torch.zeros_like(x).scatter_(1, x.topk(WORDS).indices, 1 / WORDS)
    name = f"a random graph of {nodes:,} nodes with bags of words"
    return Graph(name, words, to_undirected(edges, nodes), y, *split_by_count(y, 20, 100, seed=0))


def block_model(nodes: int) -> Graph:
    """A random graph with dense features, about as ogbn-arxiv has them."""
    x, edges, y = csbm(nodes, 40, degree=14, features=128)
    return Graph("csbm", x, to_undirected(edges, nodes), y, *split_by_count(y, 10, 100, seed=0))
