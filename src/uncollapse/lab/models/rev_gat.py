"""RevGAT: graph attention with reversible blocks, whose activations are recomputed in the backward pass.

Li et al., Training Graph Neural Networks with 1000 Layers (ICML 2021, arXiv 2106.07476), with the attention that it has
on ogbn-arxiv: scores of the sender alone, and values scaled by the degrees.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import UsageError, import_optional
from uncollapse.pairwise.numerics import csr_matrix, row_starts

GROUPS = 2  # of features in a reversible block
SLOPE = 0.2  # of the leaky ReLU on the scores
SPREAD = 80.0  # scores further below the largest count as this far below: their weights stay above 0 in float32


class SenderAttention(nn.Module):
    """Graph attention whose scores depend on the sender alone, with a linear skip connection and no bias.

        v_j = W x_j/√d_j      e_j = leaky_relu(a·v_j)      y_i = √d_i · Σ_j softmax_j(e_j) v_j + S x_i

    The softmax is over the neighbors j of i. As the scores do not depend on i, it is a ratio of two sums over
    neighbors, Σ exp(e_j) v_j and Σ exp(e_j): no tensor has a row per edge. A node without neighbors gets S x_i.

    Args:
        features: Features of a node.
        width: Features of a head.
        heads: Heads, whose outputs are concatenated.
    """

    def __init__(self, features: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.value = nn.Linear(features, heads * width, bias=False)
        self.skip = nn.Linear(features, heads * width, bias=False)
        self.score = nn.Parameter(torch.empty(1, heads, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights, as published."""
        for weight in (self.value.weight, self.score, self.skip.weight):
            nn.init.xavier_normal_(weight, gain=nn.init.calculate_gain("relu"))

    def forward(self, x: Tensor, neighbours: Tensor, root_degree: Tensor) -> Tensor:
        """Return (n, heads · width) of nodes (n, features), a CSR matrix (n, n) of ones, and √d (n, 1)."""
        values = (self.value(x) / root_degree).view(len(x), self.heads, -1)
        scores = F.leaky_relu((values * self.score).sum(-1), SLOPE)
        weights = (scores - scores.detach().amax(0)).clamp(min=-SPREAD).exp()
        sums = neighbours @ torch.cat([(weights.unsqueeze(-1) * values).flatten(1), weights], 1)
        total, norm = sums[:, : -self.heads], sums[:, -self.heads :]
        mean = total.reshape(values.shape) / norm.where(norm > 0, 1.0).unsqueeze(-1)
        out: Tensor = mean.flatten(1) * root_degree + self.skip(x)
        return out


class RevGATBlock(nn.Module):
    """One group of a reversible block: batch norm, ReLU, dropout with a given mask, and attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(heads * width)
        self.attention = SenderAttention(heads * width, width, heads)

    def forward(self, x: Tensor, neighbours: Tensor, root_degree: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return (n, heads · width) of the same; mask: what the nodes are multiplied with, drawn once for all calls."""
        x = self.norm(x).relu()
        out: Tensor = self.attention(x if mask is None else x * mask, neighbours, root_degree)
        return out


class RevGAT(nn.Module):
    """Graph attention layers, of which all but the first and the last are reversible (arXiv 2106.07476).

    With two layers there is no reversible block. A norm follows each layer but the last. Reversible blocks keep no
    activations for the backward pass, so without norms memory does not grow with depth; ContraNorm between them keeps
    its own input, two tensors (n, heads · hidden) per layer. They update their running statistics three times in a
    training step, forward, inverted and recomputed, as published.

    Args:
        features: Features of a node.
        classes: Outputs.
        layers: Number of attention layers, at least 2.
        hidden: Width of a head; even if there are reversible blocks.
        heads: Heads of the hidden layers.
        norm: Returns the norm after a hidden layer.
        dropout: Share of features that are dropped before each layer but the first; one mask for all reversible blocks.
        input_drop: Share of input features that are dropped.
        edge_drop: Share of edges that are dropped in each layer of a training pass.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        layers: int = 2,
        hidden: int = 256,
        heads: int = 3,
        norm: Callable[[], nn.Module] = nn.Identity,
        dropout: float = 0.75,
        input_drop: float = 0.25,
        edge_drop: float = 0.3,
    ) -> None:
        super().__init__()
        if layers < 2 or (layers > 2 and hidden % GROUPS):
            raise UsageError(
                f"RevGAT needs at least 2 layers, and an even hidden for more than 2, got {layers} layers of {hidden}."
            )
        self.enter = SenderAttention(features, hidden, heads)
        self.blocks = nn.ModuleList(_reversible(hidden // GROUPS, heads) for _ in range(layers - 2))
        self.norms = nn.ModuleList(norm() for _ in range(layers - 1))
        self.last_norm = nn.BatchNorm1d(heads * hidden)
        self.leave = SenderAttention(heads * hidden, classes, 1)
        self.bias = nn.Parameter(torch.zeros(classes))
        self.dropout, self.input_drop, self.edge_drop = dropout, input_drop, edge_drop

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits (n, classes) of nodes (n, features) and edges (2, E) in both directions without self-loops."""
        edges = sorted_edges(edge_index, len(x))
        root_degree = edges[0].bincount(minlength=len(x)).to(x.dtype).sqrt().unsqueeze(1)
        x = self.enter(F.dropout(x, self.input_drop, self.training), self.neighbours(edges, x), root_degree)
        x = self.norms[0](x)
        mask = F.dropout(torch.ones_like(x), self.dropout) if self.training else None
        blocks: Any = zip(self.blocks, list(self.norms)[1:], strict=True)
        for block, norm in blocks:
            block.disable = not torch.is_grad_enabled()  # else it frees its input, which hooks may still read
            x = norm(block(x, self.neighbours(edges, x), root_degree, mask))
        x = F.dropout(self.last_norm(x).relu(), self.dropout, self.training)
        out: Tensor = self.leave(x, self.neighbours(edges, x), root_degree) + self.bias
        return out

    def neighbours(self, edges: Tensor, x: Tensor) -> Tensor:
        """Return a CSR matrix of ones at sorted edges (2, E); in training without a random share of them.

        As published, both directions of an edge are dropped independently, and self-loops too: not `drop_edge`.
        """
        if self.training and self.edge_drop:
            keep = torch.ones(edges.shape[1], dtype=torch.bool, device=edges.device)
            keep[torch.randperm(len(keep), device=edges.device)[: int(len(keep) * self.edge_drop)]] = False
            edges = edges[:, keep]
        receiver, sender = edges
        ones = torch.ones(len(sender), dtype=x.dtype, device=x.device)
        return csr_matrix(row_starts(receiver, len(x)), sender.contiguous(), ones, (len(x), len(x)))


def sorted_edges(edge_index: Tensor, nodes: int) -> Tensor:
    """Return edges (2, E) from sender to receiver as (receiver, sender) with self-loops, sorted by receiver."""
    loops = torch.arange(nodes, device=edge_index.device).expand(2, -1)
    edges = torch.cat([edge_index.flip(0), loops], 1)
    return edges[:, (edges[0] * nodes + edges[1]).argsort()]


def _reversible(width: int, heads: int) -> Any:
    """Return a reversible block of groups that start equal, as published."""
    block = RevGATBlock(width, heads)
    groups = nn.ModuleList([block, *(deepcopy(block) for _ in range(GROUPS - 1))])
    return import_optional("torch_geometric.nn.models.rev_gnn", "pyg").GroupAddRev(groups)
