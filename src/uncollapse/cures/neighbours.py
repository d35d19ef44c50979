"""The pairs of a graph that ContraNorm leaves out."""

import weakref

import torch
from torch import Tensor

from uncollapse.pairwise import by_query, check_pairs

Remembered = tuple["weakref.ref[Tensor]", int, int, Tensor]
_last: Remembered | None = None


def neighbours(edge_index: Tensor, nodes: int) -> Tensor:
    """Both directions of edges (2, E) between n nodes, each once and without self-loops, sorted: (2, E').

    All layers of a network and all steps of its training ask for the same graph, so the last one is remembered, for as
    long as its edges live and do not change. What NumPy changes in their memory is not noticed. Compiled code cannot
    know how many pairs are left, and keeps duplicates.
    """
    global _last
    if torch.compiler.is_compiling():
        edges = check_pairs(edge_index, nodes, nodes, "edge_index")
        return by_query(torch.cat([edges, edges.flip(0)], 1))
    usable = not edge_index.is_inference()  # these have no version
    last = _last  # once: another thread may ask for another graph meanwhile
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
