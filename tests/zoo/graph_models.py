"""Graph networks of PyG: its models, and three layers of each of its convolutions."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .entries import Built, Entry

WIDTH, EDGE_WIDTH, RELATIONS = 16, 8, 3
MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN")
OTHERS = (
    "GraphUNet",
    "AttentiveFP",
    "LINKX",
    "SchNet",
    "DimeNet",
    "GPS",
    "DeepGCN",
    "Hetero",
    "to_hetero",
    "Sequential",
)
GIVEN: dict[str, dict[str, Any]] = {  # arguments of convolutions that need more than their widths
    "ChebConv": {"K": 2},
    "GravNetConv": {"space_dimensions": 3, "propagate_dimensions": 8, "k": 4},
    "SplineConv": {"dim": 2, "kernel_size": 3},
    "GMMConv": {"dim": 2, "kernel_size": 3},
    "RGCNConv": {"num_relations": RELATIONS},
    "FastRGCNConv": {"num_relations": RELATIONS},
    "RGATConv": {"num_relations": RELATIONS},
    "FiLMConv": {},
    "PDNConv": {"edge_dim": EDGE_WIDTH, "hidden_channels": 8},
    "FeaStConv": {"heads": 2},
    "PANConv": {"filter_size": 2},
    "MixHopConv": {"powers": [1]},
    "PNAConv": {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 4, 8, 4])},
}


class Net(nn.Module):
    """Three convolutions of one kind, with a tanh after each."""

    def __init__(self, convs: list[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, extra: dict[str, Tensor]) -> Tensor:
        for conv in self.convs:
            x = conv(x=x, edge_index=edge_index, **extra).tanh()
        return x


def entries(library: str) -> Iterator[Entry]:
    """Yield the models and convolutions of PyG."""
    import torch_geometric.nn.conv as convs

    yield from (Entry(f"torch_geometric/{name}", name) for name in (*MODELS, *OTHERS))
    yield from (Entry(f"torch_geometric/{name}", name) for name in sorted(convs.__all__) if name.endswith("Conv"))


def build(library: str, kind: str) -> Built:
    """Build a model, and two batches of two graphs each."""
    graphs = [_graph(14, 0), _graph(10, 1)]
    if kind in MODELS:
        return Built(_basic(kind), [{**g, "batch": b} for g, b in graphs])
    if kind in OTHERS:
        return _other(kind, graphs)
    import torch_geometric.nn as pyg

    conv = getattr(pyg, kind)
    model = Net([_conv(conv, kind) for _ in range(3)]).eval()
    extra = [_extra(conv, g) for g, _ in graphs]
    return Built(model, [{**g, "batch": b, "extra": e} for (g, b), e in zip(graphs, extra, strict=True)])


def _graph(nodes: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, WIDTH, generator=random)
    half = nodes // 2
    ring = torch.arange(half)
    one = torch.stack(
        [torch.cat([ring, ring, (ring + 1) % half]), torch.cat([(ring + 1) % half, (ring + 3) % half, ring])]
    )
    return {"x": x, "edge_index": torch.cat([one, one + half], 1)}, torch.arange(nodes) // half


def _basic(kind: str) -> nn.Module:
    import torch_geometric.nn as pyg

    more = GIVEN["PNAConv"] if kind == "PNA" else {}
    return getattr(pyg, kind)(WIDTH, WIDTH, 3, act="gelu", **more).eval()


def _conv(conv: type, kind: str) -> nn.Module:
    if kind in ("GINConv", "GINEConv"):
        mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        return conv(mlp, edge_dim=EDGE_WIDTH) if kind == "GINEConv" else conv(mlp)
    if kind in ("EdgeConv", "DynamicEdgeConv"):
        mlp = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH))
        return conv(mlp, k=3) if kind == "DynamicEdgeConv" else conv(mlp)
    if kind == "NNConv":
        return conv(WIDTH, WIDTH, nn.Linear(EDGE_WIDTH, WIDTH * WIDTH))
    if kind == "GPSConv":
        import torch_geometric.nn as pyg

        return conv(WIDTH, pyg.GCNConv(WIDTH, WIDTH), heads=2)
    values = {"in_channels": WIDTH, "out_channels": WIDTH, "channels": WIDTH, "hidden_channels": WIDTH}
    values |= {"num_layers": 2, "num_timesteps": 2, "K": 2, "shared_weights": True, "heads": 1, "alpha": 0.1}
    values |= {"num_relations": RELATIONS, "edge_dim": EDGE_WIDTH}
    parameters = inspect.signature(conv).parameters
    needed = {n: values[n] for n, p in parameters.items() if n in values and p.default is p.empty}
    return conv(**{**needed, **GIVEN.get(kind, {})})


def _extra(conv: Any, graph: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a convolution takes besides nodes and edges."""
    count, random = graph["edge_index"].shape[1], torch.Generator().manual_seed(2)
    parameters = inspect.signature(conv.forward).parameters
    name, found = conv.__name__, {}
    if name in ("NNConv", "GINEConv", "PDNConv", "SplineConv", "GMMConv"):
        width = 2 if name in ("SplineConv", "GMMConv") else EDGE_WIDTH
        found["edge_attr"] = torch.rand(count, width, generator=random)
    if "edge_type" in parameters and parameters["edge_type"].default is None and "R" in name[:5]:
        found["edge_type"] = torch.randint(RELATIONS, (count,), generator=random)
    if "x_0" in parameters:
        found["x_0"] = graph["x"]
    return found


def _other(kind: str, graphs: list[tuple[dict[str, Tensor], Tensor]]) -> Built:
    import torch_geometric.nn as pyg

    batches: list[Any] = [{**g, "batch": b} for g, b in graphs]
    if kind == "GraphUNet":
        return Built(pyg.GraphUNet(WIDTH, WIDTH, WIDTH, depth=2).eval(), batches)
    if kind == "AttentiveFP":
        model = pyg.AttentiveFP(WIDTH, WIDTH, WIDTH, edge_dim=EDGE_WIDTH, num_layers=3, num_timesteps=2)
        for batch in batches:
            batch["edge_attr"] = torch.ones(batch["edge_index"].shape[1], EDGE_WIDTH)
        return Built(model.eval(), batches)
    if kind == "Sequential":
        layers = [(pyg.GCNConv(WIDTH, WIDTH), "x, edge_index -> x"), nn.GELU()] * 2
        return Built(pyg.Sequential("x, edge_index, batch", layers).eval(), batches)
    if kind == "DeepGCN":
        layers = [pyg.DeepGCNLayer(pyg.GENConv(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(3)]
        return Built(_Deep(layers).eval(), batches)
    if kind == "GPS":
        return Built(
            _Deep([pyg.GPSConv(WIDTH, pyg.GCNConv(WIDTH, WIDTH), heads=2) for _ in range(3)], True).eval(), batches
        )
    if kind in ("Hetero", "to_hetero"):
        return _hetero(kind)
    raise NotImplementedError(f"{kind} takes molecules or fixed graphs")


class _Deep(nn.Module):
    def __init__(self, layers: list[nn.Module], takes_batch: bool = False) -> None:
        super().__init__()
        self.layers, self.takes_batch = nn.ModuleList(layers), takes_batch

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index, batch=batch) if self.takes_batch else layer(x, edge_index)
        return x


class _Hetero(nn.Module):
    def __init__(self) -> None:
        import torch_geometric.nn as pyg

        super().__init__()
        kinds = [("a", "to", "b"), ("b", "to", "a")]
        convs = [{kind: pyg.SAGEConv((WIDTH, WIDTH), WIDTH) for kind in kinds} for _ in range(3)]
        self.convs = nn.ModuleList(pyg.HeteroConv(relations) for relations in convs)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> dict[str, Tensor]:
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return x_dict


def _hetero(kind: str) -> Built:
    import torch_geometric.nn as pyg

    edges = {
        ("a", "to", "b"): torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]]),
        ("b", "to", "a"): torch.tensor([[0, 1, 2], [3, 1, 0]]),
    }
    random = torch.Generator().manual_seed(0)
    batch = {"x_dict": {"a": torch.randn(9, WIDTH, generator=random), "b": torch.randn(7, WIDTH, generator=random) + 3}}
    batch["edge_index_dict"] = edges
    if kind == "Hetero":
        return Built(_Hetero().eval(), [batch])
    model = pyg.to_hetero(pyg.GraphSAGE((-1, -1), WIDTH, 3), (["a", "b"], list(edges)))
    model = model.eval()
    return Built(model, [{"x": batch["x_dict"], "edge_index": edges}])
