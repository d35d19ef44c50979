"""DropEdge: drop a random share of the edges in each training step (Rong et al., ICLR 2020, arXiv 1907.10903)."""

import torch
from torch import Tensor, nn

from uncollapse.registry import cure


def drop_edge(
    edge_index: Tensor,
    p: float,
    *,
    undirected: bool = True,
    batch: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop a share p of the edges at random.

    DropEdge (arXiv 1907.10903). Of E edges, not counting self-loops, exactly round(p·E) are dropped; convolutions then
    normalize the remaining adjacency. Self-loops are kept.

    Args:
        edge_index: (2, E).
        p: share of the edges to drop, from 0 to 1.
        undirected: both directions of an edge, and its duplicates, are kept or dropped together.
        batch: (n,) graph of each node: each graph loses its own share.
        generator: source of the random numbers.

    Returns:
        The remaining edges (2, E'), and a bool mask (E,) of them, for the weights of the edges.

    >>> edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> kept, which = drop_edge(edges, 0.5)
    >>> kept.shape, int(which.sum())
    (torch.Size([2, 2]), 2)
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p must be between 0 and 1, got {p}.")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.is_floating_point():
        raise ValueError(
            f"edge_index must be integers (2, E), got {edge_index.dtype} of shape {tuple(edge_index.shape)}."
        )
    keep = edge_index[0] == edge_index[1]
    real = (~keep).nonzero().squeeze(1)
    if real.numel() == 0:
        return edge_index, keep
    ends = edge_index[:, real]
    edge = torch.arange(real.numel(), device=real.device)  # the edge that each entry belongs to
    if undirected:
        edge = torch.unique(ends.sort(0).values, dim=1, return_inverse=True)[1]
    number = int(edge.max()) + 1
    graph = torch.zeros(number, dtype=torch.long, device=real.device)
    if batch is not None:
        if batch.dim() != 1 or len(batch) <= int(ends.max()):
            raise ValueError(f"batch must have one entry per node, at least {int(ends.max()) + 1}, got {len(batch)}.")
        graph.scatter_(0, edge, batch[ends[0]])
    keep[real] = _draw_kept(graph, p, generator)[edge]
    return edge_index[:, keep], keep


def _draw_kept(graph: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
    """Return which edges stay: a random share 1 − p of each graph."""
    number = graph.numel()
    order = torch.randperm(number, generator=generator).to(graph.device)
    order = order[graph[order].argsort(stable=True)]  # graph by graph, random within each
    ordered = graph[order]
    rank = torch.arange(number, device=graph.device) - torch.searchsorted(ordered, ordered)
    size = torch.bincount(graph)[ordered]
    stays = torch.zeros(number, dtype=torch.bool, device=graph.device)
    stays[order] = rank >= (size * p).round()
    return stays


@cure(
    drop_edge,
    acts_on="edges",
    paper="DropEdge, ICLR 2020, arXiv 1907.10903",
    cost="O(E) per training step",
    use="deep graph networks that overfit or whose nodes grow alike",
)
class DropEdge(nn.Module):
    """`drop_edge` in training, the identity in evaluation. DropEdge (arXiv 1907.10903).

    Args:
        p, undirected: as for `drop_edge`.

    Shape: edge_index (2, E), edge_weight (E, ...) or None -> (2, E'), (E', ...) or None.

    >>> edges = torch.tensor([[0, 1], [1, 0]])
    >>> DropEdge(0.5).eval()(edges)[0].shape
    torch.Size([2, 2])
    """

    def __init__(self, p: float = 0.5, *, undirected: bool = True) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be between 0 and 1, got {p}.")
        self.p, self.undirected = p, undirected

    def forward(
        self, edge_index: Tensor, edge_weight: Tensor | None = None, *, batch: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the remaining edges and their weights."""
        if not self.training or self.p == 0:
            return edge_index, edge_weight
        edge_index, keep = drop_edge(edge_index, self.p, undirected=self.undirected, batch=batch)
        return edge_index, None if edge_weight is None else edge_weight[keep]

    def extra_repr(self) -> str:
        """Return the options."""
        return f"p={self.p}, undirected={self.undirected}"
