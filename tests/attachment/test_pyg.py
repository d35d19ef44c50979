"""Cures in graph networks of PyG: places by hand, batches and forms of graphs, the published form, dropped edges."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch_geometric as pyg
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, Sequential, models, to_hetero
from torch_geometric.utils import to_torch_coo_tensor

import uncollapse as uc

from .by_hand import Around, assert_clean, assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning"),  # torch calls them beta
    pytest.mark.filterwarnings("ignore:.*takes no batch:UserWarning"),  # the graphs in here are alone, but for one test
]
EDGES = torch.tensor([[0, 1, 1, 2, 3, 4, 0, 3], [1, 0, 2, 1, 4, 3, 3, 0]])
SPARSE = to_torch_coo_tensor(EDGES.flip(0), size=(6, 6)).double()  # transposed
OPTIONS = {"scale": 0.5, "temperature": 0.7}
PNA = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 5, 2])}
BASIC: dict[str, Any] = {"GCN": {}, "GraphSAGE": {}, "GIN": {}, "GAT": {"heads": 2}, "PNA": PNA, "EdgeCNN": {}}


def spread(model: Any) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.5)
    return model.double().eval()


def basic(name: str = "GCN", layers: int = 3, **options: Any) -> Any:
    return spread(getattr(models, name)(5, 8, layers, 4, **{**BASIC[name], **options}))


def nodes(count: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cure(x: Tensor, edges: Tensor | None = EDGES, **context: Any) -> Tensor:
    return uc.contra_norm(x, **OPTIONS, edge_index=edges, **context)


def behind_convs(model: Any, change: Any = cure) -> Any:
    """A copy of the model with a change behind each convolution."""
    model = copy.deepcopy(model)
    convs = [path for path, module in model.named_modules() if isinstance(module, pyg.nn.MessagePassing)]
    for path in convs:
        model.set_submodule(path, Around(model.get_submodule(path), after=change))
    return model


def behind_blocks(model: Any, change: Any = cure) -> Any:
    """A copy of a BasicGNN with a change of what enters each convolution but the first, and of what leaves the last."""
    model = copy.deepcopy(model)
    first, *others = model.convs
    model.convs = nn.ModuleList([first, *(Around(conv, change) for conv in others)])
    match model.jk_mode:
        case None:
            model.convs[-1] = Around(model.convs[-1], after=change)
        case "last":
            model.lin = Around(model.lin, change)
        case _:
            model.norms[-1] = Around(model.norms[-1], after=change)
    return model


@pytest.mark.parametrize("name", BASIC)
@pytest.mark.parametrize(
    "options", [{}, {"norm": "layer_norm"}, {"jk": "cat"}, {"jk": "last", "act_first": True}], ids=str
)
def test_every_place(name: str, options: dict[str, Any]) -> None:
    model, original = basic(name, **options), basic(name, **options)
    x = nodes()
    plain = original(x, EDGES)
    assert uc.places(model) == ("block", "conv.output")
    for place, by_hand in (("conv.output", behind_convs), ("block", behind_blocks)):
        with uc.attach(model, "contra_norm", at=place, **OPTIONS):
            assert_same(model(x, EDGES), by_hand(original)(x, EDGES), plain)
    with uc.attach(model, "contra_norm", **OPTIONS) as handle:  # that is the default
        assert handle.at == ("conv.output",)
        assert_same(model(x, EDGES), behind_convs(original)(x, EDGES), plain)
    assert_clean(model)


class Plain(nn.Module):
    """As in the examples of PyG."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = GCNConv(5, 8), GATConv(8, 4, heads=2), SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv1(x, edge_index).relu()
        x = x + self.conv2(x, edge_index)
        return self.conv3(x, edge_index)


class Graph(Plain):
    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index)


class Batched(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        return super().forward(x, edge_index)


class Links(Plain):
    """The graph under a name that nobody knows; the convolutions know it."""

    def forward(self, x: Tensor, links: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, links)


def chain() -> Any:
    parts = [(GCNConv(5, 8), "x, edge_index -> x"), nn.ReLU(), (GCNConv(8, 4), "x, edge_index -> x")]
    return Sequential("x, edge_index", parts)


@pytest.mark.parametrize("build", [Plain, Graph, Batched, Links, chain])
def test_stacks_of_ones_own(build: Any) -> None:
    model = spread(build())
    original, x = copy.deepcopy(model), nodes()
    given = (Data(x=x, edge_index=EDGES),) if build is Graph else (x, EDGES)
    plain = original(*given)
    with uc.attach(model, "contra_norm", **OPTIONS) as handle:
        assert len(handle.cures) == (2 if build is chain else 3)
        assert_same(model(*given), behind_convs(original)(*given), plain)
    assert_clean(model)
    assert torch.equal(model(*given), plain)
    if build is Plain:  # what enters the next convolution, residual included
        uc.attach(model, "contra_norm", at="block", **OPTIONS)
        h = original.conv1(x, EDGES).relu()
        h = h + original.conv2(cure(h), EDGES)
        assert_same(model(x, EDGES), cure(original.conv3(cure(h), EDGES)), plain)


def published(x: Tensor, edges: Tensor, scale: float | Tensor, temperature: float) -> Tensor:
    """(1 + s)x − s·softmax(mask(x̂x̂ᵀ/τ))x, dense: each node and its neighbours are masked out."""
    unit = x / x.norm(dim=1, keepdim=True)
    adjacent = torch.eye(len(x), dtype=torch.bool)
    adjacent[edges[0], edges[1]] = adjacent[edges[1], edges[0]] = True
    weights = (unit @ unit.T / temperature).masked_fill(adjacent, -torch.inf).softmax(1)
    return (1 + scale) * x - scale * weights @ x


@pytest.mark.parametrize("learnable", [False, True])
def test_the_published_form(learnable: bool) -> None:
    model, original, x = basic(), basic(), nodes()
    handle = uc.attach(model, "contra_norm", preset="gnn", learnable=learnable, **OPTIONS)
    found = model(x, EDGES)
    dense = behind_convs(original, lambda x: published(x, EDGES, 0.5, 0.7))
    assert_same(found, dense(x, EDGES), original(x, EDGES))
    if learnable:
        found.square().sum().backward()
        scales = [one.scale_param for one in handle.cures.values()]
        assert [tuple(scale.shape) for scale in scales] == [(8,), (8,), (4,)]
        assert all(scale.grad.abs().max() > 1e-6 for scale in scales)
        assert len(list(model.parameters())) == len(list(original.parameters())) + 3


def joined() -> tuple[Batch, list[Data]]:
    ring = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graphs = [Data(x=nodes(), edge_index=EDGES), Data(x=nodes(4, seed=2), edge_index=ring)]
    return Batch.from_data_list(graphs), graphs


@pytest.mark.parametrize("place", ["conv.output", "block"])
@pytest.mark.parametrize("name", ["contra_norm", "pair_norm"])
def test_graphs_of_a_batch_do_not_mix(place: str, name: str) -> None:
    batch, graphs = joined()
    options = OPTIONS if name == "contra_norm" else {}
    for build, call in (
        (basic, lambda m, g: m(g.x, g.edge_index, batch=g.batch)),
        (lambda: spread(Batched()), lambda m, g: m(g.x, g.edge_index, g.batch)),
        (lambda: spread(Graph()), lambda m, g: m(g)),
        (lambda: spread(Graph()), lambda m, g: m(data=g)),
    ):
        model, original = build(), build()
        uc.attach(model, name, at=place, **options)
        alone = torch.cat([call(model, graph) for graph in graphs])
        assert_same(call(model, batch), alone, call(original, batch))
        batch_of_one = batch.clone()
        batch_of_one.batch = torch.zeros_like(batch.batch)
        assert (call(model, batch_of_one) - alone).abs().max() > 1e-3


class Classifier(nn.Module):
    """Only the model around the graph network knows which nodes are a graph."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(4, 3)

    def forward(self, data: Data) -> Tensor:
        return self.head(pyg.nn.global_add_pool(self.inner(data.x, data.edge_index), data.batch))


@pytest.mark.parametrize("build", [Plain, lambda: models.GCN(5, 8, 3, 4)])
def test_the_batch_of_the_model_around(build: Any) -> None:
    batch, graphs = joined()
    model, original = spread(Classifier(build())), spread(Classifier(build()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = uc.attach(model, "contra_norm", **OPTIONS)
    alone = torch.cat([model(Batch.from_data_list([graph])) for graph in graphs])
    assert_same(model(batch), alone, original(batch))
    with pytest.warns(UserWarning, match="outside"):
        inner = model.inner(batch.x, batch.edge_index)  # by itself it is not told
    mixed = behind_convs(original.inner, lambda x: cure(x, batch.edge_index))
    assert_same(inner, mixed(batch.x, batch.edge_index), original.inner(batch.x, batch.edge_index))
    handle.remove()
    assert_clean(model)


def test_a_model_that_is_not_told_its_batch_is_one_graph() -> None:
    batch, graphs = joined()
    model, original = spread(Plain()), spread(Plain())
    with pytest.warns(UserWarning, match="no batch"):
        uc.attach(model, "contra_norm", **OPTIONS)
    expected = behind_convs(original, lambda x: cure(x, batch.edge_index))(batch.x, batch.edge_index)
    assert_same(model(batch.x, batch.edge_index), expected, original(batch.x, batch.edge_index))
    assert (expected - torch.cat([model(graph.x, graph.edge_index) for graph in graphs])).abs().max() > 1e-3


NO_NEED = ((basic, "contra_norm"), (Graph, "contra_norm"), (Batched, "pair_norm"), (Plain, "feat_scale"))


@pytest.mark.parametrize(("build", "name"), [*NO_NEED, (Plain, "drop_edge")])
def test_no_warning_without_need(build: Any, name: str) -> None:
    model = build()  # PyG itself warns on Python 3.13
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uc.attach(model, name, **(OPTIONS if name == "contra_norm" else {}))


def test_forms_of_a_graph() -> None:
    model, original, x = basic(), basic(), nodes()
    expected, plain = behind_convs(original)(x, EDGES), original(x, EDGES)
    uc.attach(model, "contra_norm", **OPTIONS)
    for graph in (EDGES, SPARSE.coalesce(), SPARSE.to_sparse_csr(), pyg.EdgeIndex(EDGES, sparse_size=(6, 6))):
        assert_same(model(x, graph), expected, plain)
    no_edges = behind_convs(original, lambda x: cure(x, None))(x, EDGES)
    assert (expected - no_edges).abs().max() > 1e-3


class Sampled(nn.Module):
    """Nodes come with the hop that they are targets of, as from a neighbour loader."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 4)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv((x, x[:4]), edge_index)
        return x


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


FEW = EDGES[:, EDGES.max(0).values < 4]
RELATIONS = [("a", "to", "b"), ("b", "to", "a")]
TWO_KINDS = {"a": nodes().float(), "b": nodes(4).float()}, dict.fromkeys(RELATIONS, torch.tensor([[0, 1], [1, 0]]))


@pytest.mark.filterwarnings("ignore:There exist node types:UserWarning")
@pytest.mark.parametrize(
    ("model", "call", "place", "word"),
    [
        *((Sampled().double(), lambda m: m(nodes(), FEW), place, "pair") for place in ("conv.output", "block")),
        (Two(), lambda m: to_hetero(m, (["a", "b"], RELATIONS))(*TWO_KINDS), "conv.output", "heterogeneous"),
    ],
    ids=["sources and targets", "sources and targets of blocks", "twins of many kinds"],
)
def test_what_is_not_one_set_of_nodes_is_refused(model: Any, call: Any, place: str, word: str) -> None:
    with uc.attach(model, "contra_norm", at=place, **OPTIONS), pytest.raises(RuntimeError, match=word):
        call(model)
    assert not uc.attachments(model)
    call(model)


def test_lazy_convolutions_and_unknown_graphs() -> None:
    model = models.GCN(-1, 8, 2, 4).double()
    with pytest.raises(ValueError, match="Links"):  # a graph under a name that is not known
        uc.attach(Links(), "drop_edge")
    with pytest.raises(ValueError, match="dim"):
        uc.attach(models.GIN(-1, 8, 2, 4), "contra_norm", learnable=True, **OPTIONS)
    handle = uc.attach(model, "contra_norm", learnable=True, **OPTIONS)
    assert [one.dim for one in handle.cures.values()] == [8, 4]
    found = model(nodes(), EDGES)
    original = copy.deepcopy(model)
    uc.detach(original)
    assert_same(found, behind_convs(original)(nodes(), EDGES), original(nodes(), EDGES))


class Weighted(nn.Module):
    """Notes the edges that reach each convolution."""

    def __init__(self, kind: Any = GCNConv) -> None:
        super().__init__()
        self.convs = nn.ModuleList([kind(5, 5) for _ in range(3)])
        self.seen: list[tuple[Tensor, Any]] = []

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        for conv in self.convs:
            self.seen.append((edge_index, edge_weight))
            x = conv(x, edge_index, edge_weight)
        return x


class WeightedData(Weighted):
    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.edge_weight)


@pytest.mark.parametrize("build", [Weighted, WeightedData])
def test_dropped_edges(build: Any) -> None:
    model, weights = spread(build()), torch.arange(8).double()
    whole = {(int(a), int(b)): float(w) for a, b, w in zip(*EDGES, weights, strict=True)}
    data = Data(x=nodes(), edge_index=EDGES, edge_weight=weights)
    given = (data,) if build is WeightedData else (nodes(), EDGES, weights)
    plain = model(*given)
    handle = uc.attach(model, "drop_edge", p=0.5)
    assert torch.equal(model.eval()(*given), plain)
    model.train()
    kept = set()
    for seed in range(8):
        torch.manual_seed(seed)
        model.seen.clear()
        assert (model(*given) - plain).abs().max() > 1e-3
        assert len({id(edges) for edges, _ in model.seen}) == 1  # one drop for all layers
        edges, weight = model.seen[0]
        assert edges.shape == (2, 4)  # two of four undirected edges
        assert all(whole[int(a), int(b)] == float(w) for a, b, w in zip(*edges, weight, strict=True))
        assert {(int(a), int(b)) for a, b in edges.T} == {(int(b), int(a)) for a, b in edges.T}
        kept.add(tuple(edges.flatten().tolist()))
    assert len(kept) > 2
    assert EDGES.shape == (2, 8)
    handle.remove()
    assert_clean(model)
    assert torch.equal(model(*given), plain)


def test_dropped_edges_by_name_and_with_another_cure() -> None:
    """What is left after the drop is also what the other cure leaves out of its means."""
    model, original = basic("GAT", edge_dim=3).train(), basic("GAT", edge_dim=3).train()
    features = torch.randn(8, 3, dtype=torch.float64)
    uc.attach(model, "contra_norm", **OPTIONS)
    uc.attach(model, "drop_edge", p=0.25)
    torch.manual_seed(4)
    found = model(x=nodes(), edge_index=EDGES, edge_attr=features)
    torch.manual_seed(4)
    left, which = uc.drop_edge(EDGES, 0.25)
    expected = behind_convs(original, lambda x: cure(x, left))(nodes(), left, edge_attr=features[which])
    assert_same(found, expected, original(nodes(), EDGES, edge_attr=features))
    assert left.shape[1] == 6


@pytest.mark.parametrize(
    ("build", "call", "words"),
    [
        (basic, lambda m: m(nodes(), SPARSE), r"\(2, E\)"),
        (basic, lambda m: m(nodes(), EDGES, num_sampled_nodes_per_hop=[6], num_sampled_edges_per_hop=[8]), "per hop"),
        (lambda: spread(Graph()), lambda m: m(Data(x=nodes(), adj_t=SPARSE)), "has none"),
    ],
)
def test_edges_that_cannot_be_dropped(build: Any, call: Any, words: str) -> None:
    """Outside of training none are, and any form of a graph will do."""
    model = build().train()
    with uc.attach(model, "drop_edge"):
        with pytest.raises(ValueError, match=words):
            call(model)
        if words == r"\(2, E\)":
            assert torch.equal(model.eval()(nodes(), SPARSE), build()(nodes(), SPARSE))


OTHERS: dict[str, tuple[dict[str, Any], Any]] = {
    "contra_norm": ({"scale": 0.3, "axis": "features"}, lambda x: uc.contra_norm(x, 0.3, axis="features")),
    "pair_norm": ({"mode": "SCS"}, lambda x: uc.pair_norm(x, mode="SCS")),
    "feat_scale": ({}, lambda x: uc.feat_scale(x, 0.25, 0.25)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_cures(name: str) -> None:
    model, original, x = basic(), basic(), nodes()
    options, change = OTHERS[name]
    for parameter in uc.attach(model, name, layers="last 2", **options).parameters():
        nn.init.constant_(parameter, 0.25)
    expected = copy.deepcopy(original)
    for number in (1, 2):
        expected.convs[number] = Around(expected.convs[number], after=change)
    assert_same(model(x, EDGES), expected(x, EDGES), original(x, EDGES))
