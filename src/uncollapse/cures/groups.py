"""Nodes of several graphs in one matrix, as PyG's `batch` vector tells them apart."""

import torch
from torch import Tensor


class Groups:
    """Sorts, splits and averages rows by the graph that they belong to."""

    def __init__(self, batch: Tensor, n: int) -> None:
        if batch.shape != (n,) or batch.is_floating_point() or batch.dtype == torch.bool:
            raise ValueError(
                f"batch must be an integer tensor of shape ({n},), got {batch.dtype} {tuple(batch.shape)}."
            )
        self.order = batch.argsort(stable=True)
        self.inverse = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(n, device=batch.device))
        self.sorted: Tensor = torch.unique_consecutive(batch[self.order], return_inverse=True)[1]  # 0, 1, 2 … no gaps
        self.count = int(self.sorted[-1]) + 1 if n else 0

    @property
    def of(self) -> Tensor:
        """The group of each row, in the original order."""
        return self.unsort(self.sorted)

    def sort(self, x: Tensor) -> Tensor:
        """Rows of x (n, ...) group by group."""
        return x[self.order]

    def unsort(self, x: Tensor) -> Tensor:
        """Back from `sort`."""
        return x[self.inverse]

    def sort_edges(self, edge_index: Tensor) -> Tensor:
        """Edges (2, E) between the sorted rows."""
        return self.inverse[edge_index]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Rows of x (n, d), one tensor a group; `unsort(torch.cat(...))` puts them back."""
        return torch.split(self.sort(x), torch.bincount(self.sorted, minlength=self.count).tolist())

    def mean(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """For each row of x (n, d) the mean over the real rows of its group; the others must be zero."""
        real = x.new_ones(x.shape[0], 1) if mask is None else mask.unsqueeze(-1).to(x.dtype)
        group = self.of
        total = x.new_zeros(self.count, x.shape[-1]).index_add(0, group, x)
        number = x.new_zeros(self.count, 1).index_add(0, group, real)
        return (total / number.clamp(min=1))[group]


def token_mean(x: Tensor, mask: Tensor | None = None, batch: Tensor | None = None, causal: bool = False) -> Tensor:
    """Mean over the real tokens of x (..., n, d): (..., 1, d), or a row for each token with `batch` or `causal`.

    Rows that the mask leaves out must be zero. `causal`: over the tokens up to each one.
    """
    if batch is not None:
        return Groups(batch, x.shape[0]).mean(x, mask)
    if causal:
        real = x.new_ones(x.shape[-2], 1) if mask is None else mask.unsqueeze(-1).to(x.dtype)
        return x.cumsum(-2) / real.cumsum(-2).clamp(min=1)
    if mask is None:
        return x.mean(-2, keepdim=True)
    return x.sum(-2, keepdim=True) / mask.sum(-1)[..., None, None].clamp(min=1)
