"""The deep networks against formulas written out with dense matrices in float64."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse import Plan, diagnose
from uncollapse.errors import UsageError
from uncollapse.lab.models import deep_gcn
from uncollapse.lab.models.deep_gcn import GCNII, DeepGCN, adjacency, dropout, sparse_features

pytest.importorskip("torch_geometric")
NODES, FEATURES, CLASSES = 12, 9, 4


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges in both directions, and the dense adjacency; the last node has no edge."""
    source = torch.Generator().manual_seed(0)
    dense = torch.rand(NODES, NODES, generator=source) < 0.3
    dense = (dense | dense.T).fill_diagonal_(False)
    dense[-1], dense[:, -1] = False, False
    x = torch.rand(NODES, FEATURES, generator=source, dtype=torch.float64)
    return x * (x > 0.5), dense.nonzero().T.contiguous(), dense.double()


def deep(norm: str, **more: object) -> DeepGCN:
    torch.manual_seed(1)
    made = [deep_gcn.build_norm(norm, 8, scale=0.5) for _ in range(3 if norm in deep_gcn.PER_LAYER_NORMS else 1)]
    options: dict[str, object] = {"layers": 4, "hidden": 8, "norms": made, **more}
    return DeepGCN(FEATURES, CLASSES, **options).double().eval()  # type: ignore[arg-type]


def contra_by_hand(x: Tensor, dense: Tensor, scale: float) -> Tensor:
    """(1 + s)x − s·softmax(mask(x̂x̂ᵀ))x, neighbours and self left out, then LayerNorm."""
    unit = x / x.norm(dim=1, keepdim=True)
    logits = (unit @ unit.T).masked_fill(dense + torch.eye(len(x)) > 0, -math.inf)
    return F.layer_norm((1 + scale) * x - scale * logits.softmax(1) @ x, (x.shape[1],))


def normed(norm: str, x: Tensor, dense: Tensor) -> Tensor:
    centred = x - x.mean(0)
    match norm:
        case "layer_norm":
            return F.layer_norm(x, (x.shape[1],))
        case "pair_norm":
            return 0.5 * centred / (1e-6 + centred.square().sum(1).mean()).sqrt()
        case "pair_layer_norm":
            return F.layer_norm(normed("pair_norm", x, dense), (x.shape[1],))
        case "pair_norm_si":
            return 0.5 * centred / (1e-6 + centred.square().sum(1, keepdim=True)).sqrt()
        case "pair_norm_scs":
            return 0.5 * x / (1e-6 + x.square().sum(1, keepdim=True)).sqrt() - x.mean(0)
        case "contra_norm":
            return contra_by_hand(x, dense, 0.5)
        case "contra_norm_features":
            unit = x / x.norm(dim=1, keepdim=True)
            return F.layer_norm(1.5 * x - 0.5 * x @ (unit.T @ unit).softmax(1), (x.shape[1],))
        case "batch_norm":  # its running statistics are those of the start
            return x / (1 + 1e-5) ** 0.5
    return x


def test_the_adjacency_is_the_mean_or_symmetric() -> None:
    _, edges, dense = graph()
    whole = dense + torch.eye(NODES)
    degree = whole.sum(1)
    mean, symmetric = (adjacency(edges, NODES, kind).to_dense().double() for kind in ("mean", "symmetric"))
    torch.testing.assert_close(mean, whole / degree[:, None], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(symmetric, whole / (degree[:, None] * degree).sqrt(), atol=1e-6, rtol=1e-6)


def test_weights_go_from_the_start_of_an_edge_to_its_end() -> None:
    loop = adjacency(torch.tensor([[0, 1, 0], [1, 0, 0]]), 2, "mean").to_dense()
    torch.testing.assert_close(loop, torch.tensor([[2 / 3, 1 / 3], [1 / 2, 1 / 2]]))  # A + I with a self-loop in A
    one_way = adjacency(torch.tensor([[0], [1]]), 2, "mean").to_dense()
    torch.testing.assert_close(one_way, torch.tensor([[1.0, 0.0], [0.5, 0.5]]))


def test_gradients_go_back_along_edges_of_one_direction() -> None:
    _, edges, _ = graph()
    edges = edges[:, ::3]
    x = torch.randn(NODES, 5, dtype=torch.float64, requires_grad=True)
    weights = adjacency(edges, NODES, "symmetric", torch.float64)
    assert not torch.equal(weights.to_dense(), weights.to_dense().T)
    assert torch.autograd.gradcheck(lambda x: deep_gcn.propagate(weights, x), x)
    conv = deep_gcn.convolution("GCNConv", 5, 3).double()
    out = torch.randn(NODES, 3, dtype=torch.float64)
    (got,) = torch.autograd.grad(conv(x, weights), x, out)
    torch.testing.assert_close(got, weights.to_dense().T @ out @ conv.lin.weight)


@pytest.mark.parametrize("norm", [name for name in deep_gcn.NORMS if name != "group_norm"])
def test_the_plain_network_is_the_published_formula(norm: str) -> None:
    x, edges, dense = graph()
    model = deep(norm)
    mean = (dense + torch.eye(NODES)) / (dense.sum(1, keepdim=True) + 1)
    h = x
    for conv in model.convs[:-1]:
        h = normed(norm, mean @ h @ conv.lin.weight.T + conv.bias, dense).relu()
    expected = mean @ h @ model.convs[-1].lin.weight.T + model.convs[-1].bias
    logits, hidden = model.with_hidden(x, edges)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(hidden, h, atol=1e-6, rtol=1e-6)
    assert torch.equal(model(x, edges), logits)


def test_residuals_as_published() -> None:
    x, edges, dense = graph()
    model = deep("none", residual=2)
    mean = (dense + torch.eye(NODES)) / (dense.sum(1, keepdim=True) + 1)
    first, second, third = ((conv.lin.weight, conv.bias) for conv in model.convs[:-1])
    one = (mean @ x @ first[0].T + first[1]).relu()  # layer 0: nothing to add yet
    two = (mean @ one @ second[0].T + second[1]).relu()
    three = (mean @ two @ third[0].T + third[1]).relu() + one
    torch.testing.assert_close(model.with_hidden(x, edges)[1], three, atol=1e-6, rtol=1e-6)


def test_weights_are_drawn_as_published() -> None:
    torch.manual_seed(0)
    model = DeepGCN(500, CLASSES, layers=3, hidden=64, norms=[deep_gcn.build_norm("none", 64, scale=1.0)])
    for conv, width in zip(model.convs, (64, 64, CLASSES), strict=True):
        bound = width**-0.5
        assert 0.95 * bound < conv.lin.weight.abs().max().item() <= bound
        assert conv.bias.abs().max().item() <= bound
        assert conv.lin.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    other = DeepGCN(
        500, CLASSES, layers=3, hidden=64, norms=[deep_gcn.build_norm("none", 64, scale=1.0)], init="glorot"
    )
    assert other.convs[0].bias.abs().max().item() == 0


def test_one_norm_is_shared_but_for_those_that_keep_statistics() -> None:
    assert len(deep("contra_norm").norms) == 1
    assert len(deep("batch_norm").norms) == 3
    assert sum(p.numel() for p in deep("contra_norm").norms.parameters()) == 16


def test_group_norm_is_pyg_s() -> None:
    x, edges, _ = graph()
    model = deep("group_norm")
    assert type(model.norms[0].norm).__name__ == "DiffGroupNorm"
    assert model(x, edges).shape == (NODES, CLASSES)


def test_norms_only_every_few_layers() -> None:
    seen: list[int] = []
    model = deep("layer_norm", layers=6, norm_every=2)
    model.norms[0].register_forward_hook(lambda *_: seen.append(1))
    x, edges, _ = graph()
    model(x, edges)
    assert len(seen) == 2  # of five hidden layers, the second and the fourth


def test_sparse_features_give_the_same_as_dense_ones() -> None:
    x, edges, _ = graph()
    rare = (x * (torch.arange(FEATURES) == 2)).float()
    sparse = sparse_features(rare)
    assert sparse.layout == torch.sparse_csr
    assert sparse_features(torch.ones(3, 3)).layout == torch.strided
    model = deep("contra_norm").float()
    torch.testing.assert_close(model(sparse, edges), model(rare, edges))
    loss = model(sparse, edges).square().sum()
    torch.autograd.backward(loss)
    found = model.convs[0].lin.weight.grad.clone()
    model.zero_grad()
    torch.autograd.backward(model(rare, edges).square().sum())
    torch.testing.assert_close(found, model.convs[0].lin.weight.grad)


def test_dropout_of_sparse_features() -> None:
    torch.manual_seed(0)
    sparse = sparse_features(torch.eye(2000))
    assert dropout(sparse, 0.6, training=False) is sparse
    values = dropout(sparse, 0.6, training=True).values()
    assert set(values.unique().tolist()) == {0.0, 2.5}
    assert float((values == 0).float().mean()) == pytest.approx(0.6, abs=0.04)


def test_edges_are_dropped_in_training_only_and_contra_norm_still_knows_all() -> None:
    x, edges, _ = graph()
    model = deep("contra_norm", drop_edge=0.5, dropout=0.0)
    seen: list[int] = []
    model.norms[0].norm.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["edge_index"].shape[1]), with_kwargs=True
    )
    still = model(x, edges)
    assert torch.equal(model(x, edges), still)
    model.train()
    assert not torch.equal(model(x, edges), still)
    assert set(seen) == {edges.shape[1]}


@pytest.mark.parametrize(("alpha", "theta"), [(0.1, 0.5), (0.3, 0.0), (0.0, 1.0)])
def test_gcnii_is_its_formula(alpha: float, theta: float) -> None:
    x, edges, dense = graph()
    torch.manual_seed(0)
    options = {"layers": 4, "hidden": 6, "alpha": alpha, "theta": theta}
    model = GCNII(FEATURES, CLASSES, **options).double().eval()  # type: ignore[arg-type]
    whole = dense + torch.eye(NODES)
    spread = whole / (whole.sum(1)[:, None] * whole.sum(1)).sqrt()
    h = first = (x @ model.enter.weight.T + model.enter.bias).relu()
    for layer, conv in enumerate(model.convs, 1):
        support = (1 - alpha) * spread @ h + alpha * first
        beta = math.log(theta / layer + 1) if theta else 1.0
        h = ((1 - beta) * support + beta * support @ conv.weight1).relu()
    expected = h @ model.leave.weight.T + model.leave.bias
    torch.testing.assert_close(model(x, edges), expected, atol=1e-6, rtol=1e-6)


def test_gcnii_has_norms_where_they_are_asked_for() -> None:
    x, edges, _ = graph()

    def chosen(number: int) -> deep_gcn.Norm | None:
        return deep_gcn.build_norm("contra_norm", 6, scale=0.5, after="none") if number == 2 else None

    torch.manual_seed(0)
    plain = GCNII(FEATURES, CLASSES, layers=4, hidden=6).double().eval()
    torch.manual_seed(0)
    mended = GCNII(FEATURES, CLASSES, layers=4, hidden=6, norms=chosen).double().eval()
    assert list(mended.norms) == ["2"]
    assert not torch.allclose(plain(x, edges), mended(x, edges))


@pytest.mark.parametrize("kind", ["gcn", "gcnii"])
def test_diagnose_knows_them(kind: str) -> None:
    x, edges, _ = graph()
    model: nn.Module = deep("contra_norm") if kind == "gcn" else GCNII(FEATURES, CLASSES, layers=4, hidden=8).double()
    batch = {"x": x, "edge_index": edges}
    found = diagnose(model, [batch], plan=Plan(baseline=0))
    assert [layer.name for layer in found.layers] == ["embed", *(f"block {number}" for number in range(4))]
    assert "dirichlet_energy" in found.layers[1].measures
    short = diagnose(model, [batch], plan=Plan(baseline=0, embed=False))
    assert [layer.name for layer in short.layers] == [f"block {number}" for number in range(4)]
    assert short.layers[0].measures == found.layers[1].measures


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="layers"):
        deep("none", layers=0)
    with pytest.raises(UsageError, match="layer_norm"):
        deep_gcn.build_norm("layr", 8, scale=1.0)
