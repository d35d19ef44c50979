"""Deep graph networks for node classification: the plain GCN of ContraNorm's Table 3, and GCNII."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn

from uncollapse.cures import DropEdge
from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.models.adjacency import adjacency, dropout
from uncollapse.lab.models.norms import Norm

Init = Literal["published", "glorot"]


class DeepGCN(nn.Module):
    """`layers` graph convolutions over D⁻¹(A + I), as in ContraNorm's published code (arXiv 2303.06562).

    Dropout before each; every hidden one is followed by a norm and ReLU; the last has neither.

    Args:
        features, hidden, classes: widths.
        layers: number of convolutions.
        norms: the norm of each hidden layer, or one that all share.
        dropout: share of features that is dropped.
        norm_every: layers from one norm to the next.
        residual: adds what left the layer so many layers before; 0 adds nothing.
        drop_edge: share of the edges that is left out in a training step.
        init: "published" draws weights and biases from ±1/√width of the output, "glorot" is PyG's own way.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        layers: int,
        norms: list[Norm],
        hidden: int = 32,
        dropout: float = 0.6,
        norm_every: int = 1,
        residual: int = 0,
        drop_edge: float = 0.0,
        init: Init = "published",
    ) -> None:
        super().__init__()
        if layers < 1:
            raise UsageError(f"A network has at least 1 layer, got {layers}.")
        conv: Any = import_optional("torch_geometric.nn", "pyg").GCNConv
        sizes = [features, *[hidden] * (layers - 1), classes]
        self.convs = nn.ModuleList(conv(a, b, normalize=False) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(norms)
        self.dropout, self.norm_every, self.residual = dropout, norm_every, residual
        self.drop_edge = DropEdge(drop_edge)
        if init == "published":
            for parameter in self.convs.parameters():
                width = parameter.shape[0]  # of the output, for weights (out, in) and biases (out,)
                nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Nodes (n, features), dense or CSR, and edges (2, E) without self-loops -> logits (n, classes)."""
        return self.with_hidden(x, edge_index)[0]

    def with_hidden(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and the nodes (n, hidden) that enter the last convolution."""
        weights = adjacency(self.drop_edge(edge_index)[0], x.shape[0], "mean", x.dtype)
        *hidden, last = self.convs
        before: Tensor | float = 0.0
        for number, conv in enumerate(hidden):
            x = conv(dropout(x, self.dropout, self.training), weights)
            if (number + 1) % self.norm_every == 0:
                x = self.norms[number % len(self.norms)](x, edge_index)
            x = x.relu()
            if self.residual and number % self.residual == 0:
                x = before = x + before
        return last(dropout(x, self.dropout, self.training), weights), x


class GCNII(nn.Module):
    """Graph convolutions with an initial residual and identity mapping (Chen et al. 2020, arXiv 2007.02133).

        x ← ReLU(norm(((1 − β_l)I + β_l W_l)((1 − α)Px + αx₀)))      β_l = log(θ/l + 1)      P = D^−½(A + I)D^−½

    Args:
        features, hidden, classes: widths.
        layers: number of convolutions.
        alpha: share of the first layer's output in each layer; 0 is identity mapping alone.
        theta: strength of the weights; 0 takes them as they are: initial residual alone.
        norms: by the number of the layer, where there are some.
        dropout, drop_edge: as for `DeepGCN`.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        layers: int,
        hidden: int = 64,
        alpha: float = 0.1,
        theta: float = 0.5,
        norms: Callable[[int], Norm | None] = lambda number: None,
        dropout: float = 0.6,
        drop_edge: float = 0.0,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise UsageError(f"A network has at least 1 layer, got {layers}.")
        conv: Any = import_optional("torch_geometric.nn", "pyg").GCN2Conv
        self.enter, self.leave = nn.Linear(features, hidden), nn.Linear(hidden, classes)
        self.convs = nn.ModuleList(
            conv(hidden, alpha, theta or None, layer if theta else None, normalize=False)
            for layer in range(1, layers + 1)
        )
        made = {str(number): norm for number in range(layers) if (norm := norms(number)) is not None}
        self.norms = nn.ModuleDict(made)
        self.dropout = dropout
        self.drop_edge = DropEdge(drop_edge)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Nodes (n, features), dense or CSR, and edges (2, E) without self-loops -> logits (n, classes)."""
        return self.with_hidden(x, edge_index)[0]

    def with_hidden(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and the nodes (n, hidden) that enter the last linear map."""
        weights = adjacency(self.drop_edge(edge_index)[0], x.shape[0], "symmetric", x.dtype)
        x = first = self.enter(dropout(x, self.dropout, self.training)).relu()
        for number, conv in enumerate(self.convs):
            x = conv(dropout(x, self.dropout, self.training), first, weights)
            if str(number) in self.norms:
                x = self.norms[str(number)](x, edge_index)
            x = x.relu()
        return self.leave(dropout(x, self.dropout, self.training)), x
