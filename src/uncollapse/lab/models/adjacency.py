"""A graph as a sparse matrix, which is what graph convolutions multiply with."""

from typing import Literal

import torch
from torch import Tensor

from uncollapse.pairwise.sparse import csr, csr_of, row_starts


def adjacency(
    edge_index: Tensor, nodes: int, kind: Literal["mean", "symmetric"], dtype: torch.dtype = torch.float32
) -> Tensor:
    """D⁻¹(A + I) ("mean") or D^−½(A + I)D^−½ ("symmetric") of edges (2, E) without self-loops, as CSR (n, n).

    Row i holds the weights of the edges j → i and of i itself.

    >>> adjacency(torch.tensor([[0, 1], [1, 0]]), 3, "mean").to_dense()
    tensor([[0.5000, 0.5000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 1.0000]])
    """
    loops = torch.arange(nodes, device=edge_index.device)
    row, column = torch.cat([edge_index.flip(0), loops.expand(2, -1)], 1)
    order = (row * nodes + column).argsort()
    row, column = row[order], column[order]
    degree = torch.bincount(row, minlength=nodes)
    inverse = 1.0 / degree.to(dtype)
    values = inverse[row] if kind == "mean" else inverse[row].sqrt() * inverse[column].sqrt()
    return csr(row_starts(row, nodes), column, values, (nodes, nodes))


def sparse_features(x: Tensor, share: float = 0.2) -> Tensor:
    """Features (n, d) as CSR if at most this share of them is not zero, else as they are."""
    if torch.count_nonzero(x) > share * x.numel():
        return x
    return csr_of(x)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout of dense or CSR features; zeros that a sparse matrix does not hold need no dropping."""
    if x.layout != torch.sparse_csr:
        return torch.nn.functional.dropout(x, p, training)
    if not training:
        return x
    values = torch.nn.functional.dropout(x.values(), p)
    rows, columns = x.shape
    return csr(x.crow_indices(), x.col_indices(), values, (rows, columns))
