"""Deep graph networks for node classification, the GCN of ContraNorm's Table 3 and GCNII, and their norms."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uncollapse.cures import ContraNorm, DropEdge, PairNorm
from uncollapse.errors import UsageError, did_you_mean, import_optional
from uncollapse.pairwise.numerics import csr_matrix, row_starts, to_csr

After = Literal["layer", "none"]


class Norm(nn.Module):
    """A norm of nodes, called as `norm(x, edge_index)`; only norms that read edges are given them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.takes_edges = "edge_index" in getattr(norm, "reads", ())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Normalize nodes (n, d) with edges (2, E)."""
        out: Tensor = self.norm(x, edge_index=edge_index) if self.takes_edges else self.norm(x)
        return out


def build_norm(
    name: str, dim: int, *, scale: float, identity: bool = True, after: After = "layer", sample: int = 0
) -> Norm:
    """Return a norm by name.

    Args:
        name: One of `NORMS`.
        dim: Features of a node.
        scale: Scale of PairNorm or ContraNorm.
        identity: ContraNorm's (1 + s)x − s·m, as released; otherwise x − s·m, the paper's Eq. 9.
        after: What follows ContraNorm: a LayerNorm or nothing.
        sample: Random nodes that ContraNorm compares with in training; 0: all.
    """
    if name not in NORMS:
        raise UsageError(f"norm must be one of {', '.join(NORMS)}, got {name!r}.{did_you_mean(name, NORMS)}")
    followed = "layer" if after == "layer" else None
    return Norm(NORMS[name](dim, scale, {"identity": identity, "after": followed, "sample": sample or None}))


def _contra(preset: str) -> Callable[[int, float, dict[str, Any]], nn.Module]:
    def make(dim: int, scale: float, options: dict[str, Any]) -> nn.Module:
        return ContraNorm.preset(preset, dim, scale, **options)

    return make


def _pair(mode: Literal["PN", "SI", "SCS"]) -> Callable[[int, float, dict[str, Any]], nn.Module]:
    return lambda dim, scale, options: PairNorm(scale, mode=mode)


def _group(dim: int, scale: float, options: dict[str, Any]) -> nn.Module:
    """Return Differentiable Group Normalization (arXiv 2006.06972) with its authors' 10 groups and weight."""
    made: nn.Module = import_optional("torch_geometric.nn", "pyg").DiffGroupNorm(dim, groups=10, lamda=0.01)
    return made


NORMS: dict[str, Callable[[int, float, dict[str, Any]], nn.Module]] = {
    "none": lambda dim, scale, options: nn.Identity(),
    "layer_norm": lambda dim, scale, options: nn.LayerNorm(dim),
    "batch_norm": lambda dim, scale, options: nn.BatchNorm1d(dim),
    "group_norm": _group,
    "pair_norm": _pair("PN"),
    "pair_layer_norm": lambda dim, scale, options: nn.Sequential(PairNorm(scale), nn.LayerNorm(dim)),
    "pair_norm_si": _pair("SI"),
    "pair_norm_scs": _pair("SCS"),
    "contra_norm": _contra("gnn"),
    "contra_norm_features": _contra("arxiv"),
}
PER_LAYER_NORMS = ("batch_norm", "group_norm")  # with statistics of their layer; others are shared, as published
SCALED_NORMS = ("pair_norm", "pair_norm_si", "pair_norm_scs", "contra_norm", "contra_norm_features")


def adjacency(
    edge_index: Tensor, nodes: int, kind: Literal["mean", "symmetric"], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return D⁻¹(A + I) ("mean") or D^−½(A + I)D^−½ ("symmetric") of edges (2, E), as CSR (n, n).

    Row i holds the weights of the edges j → i and of i itself, which counts twice if it has a self-loop. Its attribute
    `transposed` is the transposed matrix, which the backward pass of `Propagate` needs.

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
    matrix = csr_matrix(row_starts(row, nodes), column, values, (nodes, nodes))
    by_column = column.argsort(stable=True)
    starts = row_starts(column, nodes)
    matrix.transposed = csr_matrix(starts, row[by_column], values[by_column], (nodes, nodes))  # type: ignore[attr-defined]
    return matrix


class Propagate(torch.autograd.Function):
    """The product Ax of an adjacency and nodes (n, d).

    PyTorch's own backward pass sorts the edges in every layer, to transpose A: with 400,000 edges and 32 features, it
    takes ten times as long as the product.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, x: Tensor) -> Tensor:
        """Return Ax."""
        ctx.transposed = weights.transposed  # type: ignore[attr-defined]
        return weights @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Return Aᵀ∂, the gradient of the nodes; the adjacency has none."""
        return None, ctx.transposed @ grad


def propagate(adj_t: Tensor, x: Tensor) -> Tensor:
    """Return the product of an adjacency and nodes (n, d)."""
    if not hasattr(adj_t, "transposed"):  # not of `adjacency`: a diagnosis asks what other edges would do
        return adj_t @ x
    product: Tensor = Propagate.apply(adj_t, x)  # type: ignore[no-untyped-call]
    return product


def convolution(name: str, *sizes: Any) -> Any:
    """Return a convolution of PyG by its name, without normalization of the edges, whose product is `propagate`."""
    conv = getattr(import_optional("torch_geometric.nn", "pyg"), name)(*sizes, normalize=False)
    conv.message_and_aggregate = propagate
    return conv


def sparse_features(x: Tensor, share: float = 0.2) -> Tensor:
    """Return features (n, d) as CSR if at most this share of them is not zero, else unchanged."""
    if torch.count_nonzero(x) > share * x.numel():
        return x
    return to_csr(x)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Apply dropout to dense or CSR features; zeros that a sparse matrix does not store need no dropping."""
    if x.layout != torch.sparse_csr:
        return torch.nn.functional.dropout(x, p, training)
    if not training:
        return x
    values = torch.nn.functional.dropout(x.values(), p)
    rows, columns = x.shape
    return csr_matrix(x.crow_indices(), x.col_indices(), values, (rows, columns))


Init = Literal["published", "glorot"]


class DeepGCN(nn.Module):
    """Graph convolutions over D⁻¹(A + I), as in ContraNorm's published code (arXiv 2303.06562).

    Dropout precedes each convolution. A norm and ReLU follow each but the last.

    Args:
        features: Features of a node.
        classes: Outputs.
        layers: Number of convolutions.
        norms: The norm of each hidden layer, or one that all share.
        hidden: Width of the hidden layers.
        dropout: Share of features that are dropped.
        norm_every: Layers from one norm to the next.
        residual: Adds the output of so many layers before; 0: no residual.
        drop_edge: Share of edges that are dropped in a training step.
        init: "published" draws weights and biases from ±1/√(width of the output); "glorot" is PyG's own.
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
            raise UsageError(f"layers must be at least 1, got {layers}.")
        sizes = [features, *[hidden] * (layers - 1), classes]
        self.convs = nn.ModuleList(convolution("GCNConv", a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(norms)
        self.dropout, self.norm_every, self.residual = dropout, norm_every, residual
        self.drop_edge = DropEdge(drop_edge)
        if init == "published":
            for parameter in self.convs.parameters():
                width = parameter.shape[0]  # of the output, for weights (out, in) and biases (out,)
                nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits (n, classes) of nodes (n, features), dense or CSR, and edges (2, E)."""
        return self.with_hidden(x, edge_index)[0]

    def with_hidden(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the nodes (n, hidden) that enter the last convolution."""
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
        features: Features of a node.
        classes: Outputs.
        layers: Number of convolutions.
        hidden: Width of the hidden layers.
        alpha: Share of the first layer's output in each layer; 0: identity mapping alone.
        theta: Strength of the weights; 0: initial residual alone, β_l = 1.
        norms: Returns the norm of a layer by its number, or None.
        dropout: Share of features that are dropped.
        drop_edge: Share of edges that are dropped in a training step.
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
            raise UsageError(f"layers must be at least 1, got {layers}.")
        self.enter, self.leave = nn.Linear(features, hidden), nn.Linear(hidden, classes)
        self.convs = nn.ModuleList(
            convolution("GCN2Conv", hidden, alpha, theta or None, layer if theta else None)
            for layer in range(1, layers + 1)
        )
        made = {str(number): norm for number in range(layers) if (norm := norms(number)) is not None}
        self.norms = nn.ModuleDict(made)
        self.dropout = dropout
        self.drop_edge = DropEdge(drop_edge)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits (n, classes) of nodes (n, features), dense or CSR, and edges (2, E)."""
        return self.with_hidden(x, edge_index)[0]

    def with_hidden(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the nodes (n, hidden) that enter the last linear map."""
        weights = adjacency(self.drop_edge(edge_index)[0], x.shape[0], "symmetric", x.dtype)
        x = first = self.enter(dropout(x, self.dropout, self.training)).relu()
        for number, conv in enumerate(self.convs):
            x = conv(dropout(x, self.dropout, self.training), first, weights)
            if str(number) in self.norms:
                x = self.norms[str(number)](x, edge_index)
            x = x.relu()
        return self.leave(dropout(x, self.dropout, self.training)), x
