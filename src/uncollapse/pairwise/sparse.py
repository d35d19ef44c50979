"""Sparse matrices in compressed rows."""

import warnings

import torch
from torch import Tensor


def csr(start: Tensor, column: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix of which row i has the values start[i] … start[i + 1], without torch's note that such are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        return torch.sparse_csr_tensor(start, column, values, shape, check_invariants=False)


def csr_of(dense: Tensor) -> Tensor:
    """What is not zero in a matrix."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support")
        return dense.to_sparse_csr()


def row_starts(row: Tensor, rows: int) -> Tensor:
    """Where each row starts among entries that are sorted by row: (rows + 1,)."""
    counts = torch.bincount(row, minlength=rows)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def sums(pairs: Tensor, x: Tensor, rows: int) -> Tensor:
    """For each row i the sum of x_j over its pairs (i, j): pairs (2, E) sorted by i, x (m, d) -> (rows, d)."""
    ones = x.new_ones(pairs.shape[1])
    matrix = csr(row_starts(pairs[0], rows), pairs[1].contiguous(), ones, (rows, len(x)))
    return matrix @ x
