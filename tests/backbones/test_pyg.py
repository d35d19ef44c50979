"""Graph networks of PyG, tiny and random: layers, graphs in every form, batches, jumping knowledge, random twins."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pyg = pytest.importorskip("torch_geometric")
pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning")  # torch calls them beta

from torch_geometric.data import Batch, Data  # noqa: E402
from torch_geometric.nn import DeepGCNLayer, GCNConv, GENConv, SAGEConv, SAGPooling, Sequential, models  # noqa: E402

import uncollapse as uc  # noqa: E402
from uncollapse import backbones  # noqa: E402
from uncollapse.backbones.sites import Context, Site, sets_with_mask  # noqa: E402

from .reading import context, read_all  # noqa: E402

EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 5], [1, 2, 3, 4, 5, 3, 0]])
PNA = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 5, 2])}
BASIC: dict[str, Any] = {"GCN": {}, "GraphSAGE": {}, "GIN": {}, "GAT": {"heads": 2}, "PNA": PNA, "EdgeCNN": {}}


def basic(name: str = "GCN", layers: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(models, name)(5, 8, layers, 4, **{**BASIC[name], **options}).eval()


def nodes(count: int = 6) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Layers by attributes, with names as in the examples of PyG."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = GCNConv(5, 8), SAGEConv(8, 4)

    def forward(self, data: Data) -> Tensor:
        return self.conv2(torch.relu(self.conv1(data.x, data.edge_index)), data.edge_index)


class Deep(nn.Module):
    """DeepGCN layers, with the graph under a name that nobody knows."""

    def __init__(self, block: str = "res+") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [DeepGCNLayer(GENConv(5, 5, norm="layer"), nn.LayerNorm(5), nn.ReLU(), block=block) for _ in range(3)]
        )

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, links)
        return x


def by_hand(model: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the convolutions of a BasicGNN and of its layers."""
    convolved, passed = [], []
    for number, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True)):
        x = conv(x, EDGES)
        convolved.append(x)
        if number < len(model.convs) - 1 or model.jk_mode is not None:
            x = norm(model.act(x)) if model.act_first else model.act(norm(x))
        passed.append(x)
    return convolved, passed


@pytest.mark.parametrize("name", BASIC)
@pytest.mark.parametrize("options", [{}, {"norm": "batch_norm"}, {"norm": "pair_norm", "act_first": True}], ids=str)
def test_basic_models(name: str, options: dict[str, Any]) -> None:
    model, x = basic(name, **options), nodes()
    stack = backbones.find(model)
    seen = read_all(model, stack, x, EDGES)
    convolved, passed = by_hand(model, x)
    assert (stack.path, stack.family, stack.architecture, stack.layout) == ("", "pyg", name, "nodes")
    assert [block.name for block in stack.blocks] == ["block 0", "block 1", "block 2"]
    assert stack.places() == ("block", "conv.output")
    assert stack.expose_attention is None
    for number in range(3):
        torch.testing.assert_close(seen[number, "conv.output"], convolved[number])
        torch.testing.assert_close(seen[number, "block"], passed[number])
    torch.testing.assert_close(seen["embed"], x)
    torch.testing.assert_close(seen[2, "block"], model(x, EDGES))


@pytest.mark.parametrize("jk", ["last", "cat", "max", "lstm"])
def test_jumping_knowledge(jk: str) -> None:
    model, x = basic(jk=jk, norm="layer_norm"), nodes()
    stack = backbones.find(model)
    seen = read_all(model, stack, x, EDGES)
    convolved, passed = by_hand(model, x)
    torch.testing.assert_close(seen[0, "block"], passed[0])
    torch.testing.assert_close(seen[1, "block"], passed[1])
    if jk == "last":
        torch.testing.assert_close(seen[2, "block"], passed[2])
        assert stack.final is None
    else:
        torch.testing.assert_close(seen[2, "block"], model.norms[2](convolved[2]))  # its activation is no module
        torch.testing.assert_close(model.lin(seen["final"]), model(x, EDGES))
        assert seen["final"].shape[-1] == (24 if jk == "cat" else 8)


def test_one_layer() -> None:
    model = basic(layers=1)
    stack = backbones.find(model)
    torch.testing.assert_close(read_all(model, stack, nodes(), EDGES)[0, "block"], model(nodes(), EDGES))


def as_csr() -> Tensor:
    """The transposed adjacency matrix, as PyG takes it: entry (target, source)."""
    return torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(7), (6, 6)).to_sparse_csr()


def sorted_edges(edge_index: Tensor) -> list[list[int]]:
    return sorted(edge_index.T.tolist())


@pytest.mark.parametrize("form", ["list", "EdgeIndex", "csr", "coo"])
def test_graphs_in_every_form(form: str) -> None:
    graph = {
        "list": EDGES,
        "EdgeIndex": pyg.EdgeIndex(EDGES, sparse_size=(6, 6)),
        "csr": as_csr(),
        "coo": as_csr().to_sparse_coo(),
    }[form]
    model = basic("GraphSAGE")
    stack = backbones.find(model)
    for args, kwargs in (((nodes(), graph), {}), ((nodes(),), {"edge_index": graph})):
        found = context(model, stack, *args, **kwargs)
        assert type(found.edge_index) is Tensor
        assert sorted_edges(found.edge_index) == sorted_edges(EDGES)
        assert found.batch is None
    torch.testing.assert_close(model(nodes(), graph), model(nodes(), EDGES))  # the same graph for the model too


def test_batch_of_two_graphs() -> None:
    sizes = (6, 4)
    graphs = [Data(x=nodes(n), edge_index=EDGES[:, (n > EDGES).all(0)]) for n in sizes]
    joined = Batch.from_data_list(graphs)
    model = basic(norm="graph_norm")
    stack = backbones.find(model)
    found = context(model, stack, joined.x, joined.edge_index, batch=joined.batch)
    assert torch.equal(found.batch, joined.batch)
    seen = read_all(model, stack, joined.x, joined.edge_index, batch=joined.batch)
    for number in range(3):
        sets, mask = sets_with_mask(seen[number, "block"], stack.layout, found)
        assert mask.sum(-1).tolist() == list(sizes)
        for one, graph in enumerate(graphs):
            alone = read_all(model, stack, graph.x, graph.edge_index, batch=torch.zeros(len(graph.x), dtype=torch.long))
            torch.testing.assert_close(sets[one][mask[one]], alone[number, "block"])


@pytest.mark.parametrize("batched", [False, True])
def test_data_objects(batched: bool) -> None:
    model, data = Net().eval(), Data(x=nodes(), edge_index=EDGES)
    data = Batch.from_data_list([data, data]) if batched else data
    stack = backbones.find(model)
    found = context(model, stack, data)
    assert torch.equal(found.edge_index, data.edge_index)
    assert (found.batch is not None) == batched
    seen = read_all(model, stack, data)
    torch.testing.assert_close(seen[0, "block"], model.conv1(data.x, data.edge_index).relu())
    torch.testing.assert_close(seen[1, "block"], model(data))
    assert [seen[number, "block"].shape[-1] for number in (0, 1)] == [8, 4]


@pytest.mark.parametrize("block", ["res+", "res", "plain"])
def test_layers_around_convolutions(block: str) -> None:
    model, x = Deep(block).eval(), nodes()
    stack = backbones.find(model)
    found = context(model, stack, x, EDGES)
    assert torch.equal(found.edge_index, EDGES)  # known from the convolution
    assert stack.context((x, EDGES), {}).edge_index is None  # the model calls it otherwise
    seen = read_all(model, stack, x, EDGES)
    for number, layer in enumerate(model.layers):
        if block == "res+":
            torch.testing.assert_close(seen[number, "conv.output"], layer(x, EDGES) - x)
        x = layer(x, EDGES)
        torch.testing.assert_close(seen[number, "block"], x)


def test_sequential() -> None:
    steps = [(GCNConv(5, 8), "x, edge_index -> x"), nn.ReLU(), (GCNConv(8, 4), "x, edge_index -> x")]
    model = Sequential("x, edge_index, batch", steps).eval()
    stack = backbones.find(model)
    batch = torch.tensor([0, 0, 0, 1, 1, 1])
    seen = read_all(model, stack, nodes(), EDGES, batch)
    torch.testing.assert_close(seen[0, "block"], model[0](nodes(), EDGES).relu())
    torch.testing.assert_close(seen[1, "block"], model(nodes(), EDGES, batch))
    found = context(model, stack, nodes(), EDGES, batch)
    assert torch.equal(found.edge_index, EDGES)
    assert torch.equal(found.batch, batch)


def test_nested_beside_pooling() -> None:
    model = nn.Module()
    model.pool = SAGPooling(5)  # has a convolution of its own, for its scores
    model.body = nn.ModuleDict({"gnn": basic()})
    stack = backbones.find(model)
    assert stack.path == "body.gnn"
    assert stack.blocks[0].places["block"] == Site("body.gnn.convs.1", "input")


def test_residuals_outside_of_layers() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.lin = GCNConv(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.lin(self.conv(x, edge_index))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step1, self.step2 = Step(), Step()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = x + self.step1(x, edge_index)
            return x + self.step2(x, edge_index)

    model, x = Residual().eval(), nodes()
    stack = backbones.find(model)
    seen = read_all(model, stack, x, EDGES)
    torch.testing.assert_close(seen[0, "block"], x + model.step1(x, EDGES))
    torch.testing.assert_close(seen[1, "conv.output"], model.step2.conv(seen[0, "block"], EDGES))


def test_heterogeneous_models_are_refused() -> None:
    relations = {("a", "to", "b"): SAGEConv(5, 5), ("b", "to", "a"): SAGEConv(5, 5)}
    model = nn.ModuleList([pyg.nn.HeteroConv(relations)])
    with pytest.raises(ValueError, match="known model"):
        backbones.find(model)


@pytest.mark.parametrize("name", BASIC)
def test_random_twin(name: str) -> None:
    model = basic(name, norm="batch_norm", jk="lstm", act="prelu")
    stack = backbones.find(model)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    twin, again = stack.reinitialize(model), stack.reinitialize(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for key, value in twin.named_parameters():
        assert value.shape == before[key].shape
        assert torch.equal(value, again.state_dict()[key])
        assert not torch.allclose(value, before[key])
    assert not torch.allclose(twin(nodes(), EDGES), model(nodes(), EDGES))


def test_twin_of_a_model_without_shapes() -> None:
    model = models.GCN(-1, 8, 2)
    stack = backbones.find(model)
    with pytest.raises(ValueError, match="shape"):
        stack.reinitialize(model)
    model(nodes(), EDGES)
    assert stack.reinitialize(model) is not model


class Plain(nn.Module):
    """A model that is not told which graph a node belongs to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([GCNConv(5, 5) for _ in range(3)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
        return x


def test_graphs_of_a_batch_that_the_model_does_not_take() -> None:
    graphs = [Data(x=nodes() + shift, edge_index=EDGES) for shift in (5.0, -5.0)]
    together, apart = uc.diagnose(Plain(), [Batch.from_data_list(graphs)]), uc.diagnose(Plain(), graphs)
    assert together.sequences == apart.sequences == 2
    for one, other in zip(together.layers, apart.layers, strict=True):
        assert one["mean_cosine"] == pytest.approx(other["mean_cosine"], abs=1e-6)


def test_other_nodes_than_those_of_the_batch_vector() -> None:
    with pytest.raises(ValueError, match="6 nodes"):
        sets_with_mask(torch.randn(4, 5), "nodes", Context(batch=torch.tensor([0, 0, 0, 1, 1, 1])))


def test_a_dataset_is_batches_and_a_graph_is_not() -> None:
    from torch_geometric.datasets import FakeDataset  # its own attributes are those of its first graph

    dataset = FakeDataset(num_graphs=3, avg_num_nodes=20, num_channels=5)
    assert uc.diagnose(Plain(), dataset, plan=uc.Plan(baseline=0)).batches == 3
    with pytest.raises(ValueError, match="one Data"):
        uc.diagnose(Plain(), dataset[0])
