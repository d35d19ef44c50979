"""Nodes of several graphs in one matrix (PyG's `batch` vector): sort, split and average by graph; neighbors."""

import weakref

import torch
from torch import Tensor

from uncollapse.pairwise import check_pairs, numerics, sort_by_query


class Groups:
    """Rows by the graph that they belong to: sorts, splits and averages them."""

    def __init__(self, batch: Tensor, n: int) -> None:
        if batch.shape != (n,) or batch.is_floating_point() or batch.dtype == torch.bool:
            raise ValueError(
                f"batch must be an integer tensor of shape ({n},), got {batch.dtype} {tuple(batch.shape)}."
            )
        self.order = batch.argsort(stable=True)
        self.inverse = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(n, device=batch.device))
        self.sorted: Tensor = torch.unique_consecutive(batch[self.order], return_inverse=True)[1]  # 0, 1, 2, … no gaps
        self.count = int(self.sorted[-1]) + 1 if n else 0

    @property
    def of(self) -> Tensor:
        """The group of each row, in the original order."""
        return self.unsort(self.sorted)

    def sort(self, x: Tensor) -> Tensor:
        """Return the rows of x (n, ...) group by group."""
        return x[self.order]

    def unsort(self, x: Tensor) -> Tensor:
        """Return sorted rows in the original order."""
        return x[self.inverse]

    def sort_edges(self, edge_index: Tensor) -> Tensor:
        """Return edges (2, E) with the indices of the sorted rows."""
        return self.inverse[edge_index]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split the rows of x (n, d) into one tensor per group; `unsort(torch.cat(...))` puts them back."""
        return torch.split(self.sort(x), torch.bincount(self.sorted, minlength=self.count).tolist())

    def mean(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return for each row of x (n, d) the mean over the real rows of its group; masked rows must be zero."""
        real = x.new_ones(x.shape[0], 1) if mask is None else mask.unsqueeze(-1).to(x.dtype)
        group = self.of
        total = x.new_zeros(self.count, x.shape[-1]).index_add(0, group, x)
        number = x.new_zeros(self.count, 1).index_add(0, group, real)
        return (total / number.clamp(min=1))[group]


def check_graphs(x: Tensor, causal: bool) -> None:
    """Raise unless x is one matrix of nodes, which have no order, as `batch` requires."""
    if x.dim() != 2 or causal:
        raise ValueError(f"batch needs nodes (n, d) and no causal, got x of shape {tuple(x.shape)}, causal={causal}.")


def token_mean(x: Tensor, mask: Tensor | None = None, batch: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return the mean over the real tokens of x (..., n, d): (..., 1, d), or (..., n, d) with `batch` or `causal`.

    Masked rows must be zero. `causal`: the mean over the tokens up to each one.
    """
    if batch is not None:
        check_graphs(x, causal)
        return Groups(batch, x.shape[0]).mean(x, mask)
    if causal:
        real = x.new_ones(x.shape[-2], 1) if mask is None else mask.unsqueeze(-1).to(x.dtype)
        return x.cumsum(-2) / real.cumsum(-2).clamp(min=1)
    if mask is None:
        return x.mean(-2, keepdim=True)
    return x.sum(-2, keepdim=True) / mask.sum(-1)[..., None, None].clamp(min=1)


def visible_mean(context: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return the mean of the values (..., heads, m, d) that each query of a context (..., heads, n, d) sees.

    mask: (..., m) bool, True = real key; without the dimension of the heads. causal: needs n = m.
    """
    if context.dim() < 3 or context.shape[-1] != v.shape[-1] or context.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            f"context must be (..., heads, n, d), v (..., heads, m, d), got {tuple(context.shape)}, {tuple(v.shape)}."
        )
    if causal and context.shape[-2] != v.shape[-2]:
        raise ValueError(f"causal needs as many keys as queries, got {v.shape[-2]} and {context.shape[-2]}.")
    if mask is not None:
        numerics.check_mask(mask, torch.Size((*v.shape[:-3], v.shape[-2])))
        mask = mask.unsqueeze(-2)  # (..., 1, m): the same in every head
    return token_mean(numerics.prepare(v, mask), mask, causal=causal)


def scale_per_head(scale: float | Tensor, context: Tensor) -> float | Tensor:
    """Return a scale, a number or one per head (heads,), so that it multiplies a context (..., heads, n, d)."""
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return scale
    if scale.shape != context.shape[-3:-2]:
        shape = tuple(scale.shape)
        raise ValueError(f"scale must be a number or one per head, ({context.shape[-3]},), got shape {shape}.")
    return scale[:, None, None]


_last: tuple["weakref.ref[Tensor]", int, int, Tensor] | None = None  # edges, their version, number of nodes, result


def neighbours(edge_index: Tensor, nodes: int) -> Tensor:
    """Return both directions of edges (2, E) between nodes, each once, without self-loops, sorted: (2, E').

    All layers of a network and all training steps use the same graph, so the last result is cached for as long as its
    edges live and do not change. Changes made through NumPy are not noticed. Compiled code cannot know how many pairs
    are left, and keeps duplicates.
    """
    global _last
    if torch.compiler.is_compiling():
        edges = check_pairs(edge_index, nodes, nodes, "edge_index")
        return sort_by_query(torch.cat([edges, edges.flip(0)], 1))
    usable = not edge_index.is_inference()  # inference tensors have no version
    last = _last  # read once: another thread may replace it
    if usable and last is not None and last[0]() is edge_index and last[1:3] == (edge_index._version, nodes):
        return last[3]
    i, j = check_pairs(edge_index, nodes, nodes, "edge_index")
    i, j = i[i != j], j[i != j]
    codes = torch.unique(torch.cat([i * nodes + j, j * nodes + i]))
    found = torch.stack([codes // max(1, nodes), codes % max(1, nodes)])
    if usable:
        _last = (weakref.ref(edge_index, _forget), edge_index._version, nodes, found)
    return found


def _forget(gone: "weakref.ref[Tensor]") -> None:
    global _last
    if _last is not None and _last[0] is gone:
        _last = None
