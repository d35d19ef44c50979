"""The norms of deep graph networks by name, called as norm(x, edge_index)."""

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from uncollapse.cures import ContraNorm, PairNorm
from uncollapse.errors import UsageError, did_you_mean, import_optional

After = Literal["layer", "none"]


class Norm(nn.Module):
    """A norm of nodes; the edges are given to those that look at them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.takes_edges = "edge_index" in getattr(norm, "reads", ())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Nodes (n, d) and edges (2, E) -> nodes (n, d)."""
        out: Tensor = self.norm(x, edge_index=edge_index) if self.takes_edges else self.norm(x)
        return out


def build_norm(name: str, dim: int, *, scale: float, after: After = "layer", sample: int = 0) -> Norm:
    """A norm by name. `scale` is PairNorm's and ContraNorm's; `after` says what follows ContraNorm."""
    if name not in NORMS:
        raise UsageError(f"norm must be one of {', '.join(NORMS)}, got {name!r}.{did_you_mean(name, NORMS)}")
    followed = "layer" if after == "layer" else None
    return Norm(NORMS[name](dim, scale, {"after": followed, "sample": sample or None}))


def _contra(preset: str) -> Callable[[int, float, dict[str, Any]], nn.Module]:
    def make(dim: int, scale: float, options: dict[str, Any]) -> nn.Module:
        return ContraNorm.preset(preset, dim, scale, **options)

    return make


def _pair(mode: Literal["PN", "SI", "SCS"]) -> Callable[[int, float, dict[str, Any]], nn.Module]:
    return lambda dim, scale, options: PairNorm(scale, mode=mode)


def _group(dim: int, scale: float, options: dict[str, Any]) -> nn.Module:
    """Differentiable group normalisation (arXiv 2006.06972), with its authors' 10 groups and weight."""
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
PER_LAYER_NORMS = (
    "batch_norm",
    "group_norm",
)  # they keep statistics of their layer; the others are shared, as published
SCALED_NORMS = ("pair_norm", "pair_norm_si", "pair_norm_scs", "contra_norm", "contra_norm_features")
