"""RevGAT against its formulas with loops over nodes in float64, and its reversible blocks against the plain network."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.cures import ContraNorm
from uncollapse.errors import UsageError
from uncollapse.lab.models.rev_gat import RevGAT, SenderAttention, sorted_edges
from uncollapse.pairwise.numerics import to_csr

pytest.importorskip("torch_geometric")
NODES, FEATURES, CLASSES, HIDDEN, HEADS = 12, 5, 4, 6, 3
Make = Callable[[], nn.Module]


def d_contra_norm() -> ContraNorm:
    return ContraNorm.preset("arxiv", HEADS * HIDDEN, 1.0)


def graph() -> tuple[Tensor, Tensor]:
    """Features and edges in both directions; the last node has no edge."""
    source = torch.Generator().manual_seed(0)
    dense = (torch.rand(NODES, NODES, generator=source) < 0.3).triu(1)
    dense[:, -1] = False
    x = torch.randn(NODES, FEATURES, generator=source, dtype=torch.float64)
    return x, (dense | dense.T).nonzero().T.contiguous()


def network(layers: int = 4, norm: Make = nn.Identity, **more: float) -> RevGAT:
    torch.manual_seed(1)
    model = RevGAT(FEATURES, CLASSES, layers=layers, hidden=HIDDEN, heads=HEADS, norm=norm, **more).double()
    for parameter in model.parameters():  # groups that start equal would hide a mistake
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def dense_neighbours(edge_index: Tensor) -> Tensor:
    """(n, n), row i: the nodes that i hears, itself among them."""
    dense = torch.eye(NODES, dtype=torch.float64)
    dense[edge_index[1], edge_index[0]] = 1.0
    return dense


def attend_by_hand(layer: SenderAttention, x: Tensor, dense: Tensor, degree: Tensor) -> Tensor:
    """Node by node and head by head, with a softmax over the neighbours."""
    values = (layer.value(x) * degree[:, None] ** -0.5).view(NODES, layer.heads, -1)
    out = torch.zeros_like(values)
    for node in range(NODES):
        near = dense[node].nonzero().squeeze(1)
        for head in range(layer.heads if len(near) else 0):
            scores = F.leaky_relu(values[near, head] @ layer.score[0, head], 0.2)
            out[node, head] = scores.softmax(0) @ values[near, head] * degree[node] ** 0.5
    return out.flatten(1) + layer.skip(x)


def matrix(dense: Tensor) -> Tensor:
    return to_csr(dense)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_attention_is_the_softmax_over_neighbours(scale: float) -> None:
    x, edges = graph()
    dense = dense_neighbours(edges)
    degree = dense.sum(1)
    torch.manual_seed(2)
    layer = SenderAttention(FEATURES, HIDDEN, HEADS).double()
    layer.score.data.mul_(scale)
    dense[3] = 0.0  # a node whose edges were all dropped
    found = layer(x, matrix(dense), degree.sqrt().unsqueeze(1))
    assert torch.allclose(found, attend_by_hand(layer, x, dense, degree), atol=1e-12)
    assert torch.allclose(found[3], layer.skip(x)[3])


def test_scores_that_are_far_apart_stay_finite() -> None:
    layer = SenderAttention(1, 1, 1)
    for weight, value in ((layer.value.weight, 1.0), (layer.score, 1.0), (layer.skip.weight, 0.0)):
        nn.init.constant_(weight, value)
    x = torch.tensor([[1e4], [0.0], [-1e4]], requires_grad=True)
    out = layer(x, matrix(torch.eye(3)), torch.ones(3, 1))
    out.sum().backward()
    assert out.flatten().tolist() == pytest.approx([1e4, 0.0, -1e4])
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("norm", [nn.Identity, d_contra_norm])
def test_the_network_in_evaluation(norm: Make) -> None:
    x, edges = graph()
    model = network(4, norm).eval()
    dense = dense_neighbours(edges)
    degree = dense.sum(1)

    def hidden(x: Tensor) -> Tensor:
        if norm is nn.Identity:
            return x
        unit = x / x.norm(dim=1, keepdim=True)
        return 2 * x - x @ (unit.T @ unit).softmax(1)  # D-ContraNorm, s = τ = 1

    found = hidden(attend_by_hand(model.enter, x, dense, degree))
    for block in model.blocks:
        first, second = found.chunk(2, 1)
        groups = [g.attention for g in block.convs]
        norms = [g.norm for g in block.convs]
        first = first + attend_by_hand(groups[0], norms[0](second).relu(), dense, degree)
        second = second + attend_by_hand(groups[1], norms[1](first).relu(), dense, degree)
        found = hidden(torch.cat([first, second], 1))
    logits = attend_by_hand(model.leave, model.last_norm(found).relu(), dense, degree) + model.bias
    assert torch.allclose(model(x, edges), logits, atol=1e-12)


@pytest.mark.parametrize("norm", [nn.Identity, d_contra_norm])
def test_reversible_blocks_have_the_gradients_of_plain_ones(norm: Make) -> None:
    x, edges = graph()
    reversible = network(5, norm)
    plain = deepcopy(reversible)
    for block in plain.blocks:
        block._fn_apply = lambda args, forward, inverse: forward(*args)
    found = []
    for model in (reversible, plain):
        torch.manual_seed(3)  # the same dropout and edges
        out = model.train()(x, edges)
        out.square().mean().backward()
        found.append([out, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def kept_bytes(layers: int, norm: Make) -> int:
    """Bytes that autograd keeps for the backward pass, and those of the blocks' outputs."""
    x, edges = graph()
    model, kept = network(layers, norm).train(), {}
    outputs: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: outputs.append(out))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x, edges).sum()
    kept |= {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in outputs}
    loss.backward()
    return sum(kept.values())


def test_memory_does_not_grow_with_depth() -> None:
    few, many = kept_bytes(4, nn.Identity), kept_bytes(12, nn.Identity)
    hidden = NODES * HEADS * HIDDEN * 8
    assert many - few < hidden  # of eight layers more, not even the output of one
    with_norm = kept_bytes(12, d_contra_norm) - kept_bytes(4, d_contra_norm)
    assert with_norm > 8 * hidden  # D-ContraNorm keeps its input


def test_a_reversible_block_leaves_what_hooks_read_in_evaluation() -> None:
    x, edges = graph()
    model, seen = network(4).eval(), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    with torch.no_grad():
        model(x, edges)
    assert all(each.untyped_storage().nbytes() for each in seen)


def test_edges_are_dropped_one_by_one_in_training_only() -> None:
    x, edges = graph()
    ordered = sorted_edges(edges, NODES)
    total = ordered.shape[1]
    assert total == edges.shape[1] + NODES
    model = network(2, edge_drop=0.3).train()
    drawn = [model.neighbours(ordered, x).to_dense() for _ in range(200)]
    assert {int(each.sum()) for each in drawn} == {total - int(0.3 * total)}
    whole = dense_neighbours(edges)
    assert all(bool((each <= whole).all()) for each in drawn)
    assert torch.allclose(torch.stack(drawn).mean(0), 0.7 * whole, atol=0.15)  # each edge alike, self-loops too
    assert any(not torch.equal(each, each.T) for each in drawn)
    assert torch.equal(model.eval().neighbours(ordered, x).to_dense(), whole)
    assert torch.equal(network(2, edge_drop=0.0).train().neighbours(ordered, x).to_dense(), whole)


def test_each_layer_draws_its_own_edges_and_degrees_stay() -> None:
    x, edges = graph()
    model, seen = network(4, edge_drop=0.3).train(), []
    for layer in (model.enter, *model.blocks, model.leave):
        layer.register_forward_hook(lambda module, args, out: seen.append((args[1].to_dense(), args[2])))
    model(x, edges)
    assert len(seen) == 4
    assert len({tuple(kept.flatten().tolist()) for kept, _ in seen}) == 4
    assert all(torch.equal(root, dense_neighbours(edges).sum(1, keepdim=True).sqrt()) for _, root in seen)


def test_directed_edges_go_from_sender_to_receiver() -> None:
    receiver, sender = sorted_edges(torch.tensor([[2, 0], [1, 2]]), 3)
    assert list(zip(receiver.tolist(), sender.tolist(), strict=True)) == [(0, 0), (1, 1), (1, 2), (2, 0), (2, 2)]


@pytest.mark.parametrize(
    ("features", "layers", "count"),
    [(768 + 40, 2, 1_304_912), (128 + 40, 5, 2_098_256)],  # as GIANT and RevGAT report them
)
def test_the_published_numbers_of_parameters(features: int, layers: int, count: int) -> None:
    with torch.device("meta"):
        model = RevGAT(features, 40, layers=layers, norm=lambda: ContraNorm.preset("arxiv", 768, 1.0))
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("layers", "hidden"), [(1, 8), (3, 7)])
def test_sizes_that_cannot_be(layers: int, hidden: int) -> None:
    with pytest.raises(UsageError, match="even"):
        RevGAT(4, 2, layers=layers, hidden=hidden)
