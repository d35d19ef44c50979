"""The deep graph network: weights of the edges, norms, training, record."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from uncollapse import ContraNorm, contra_norm, diagnose
from uncollapse.lab.recipes import deep_gcn

pytest.importorskip("torch_geometric")
TINY = deep_gcn.Config(depth=4, hidden=8, epochs=3, graph="karate")


def test_edges_weigh_as_the_mean_over_neighbours_and_self() -> None:
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    edges, weights = deep_gcn.mean_over_neighbours(edge_index, 4)
    dense = torch.zeros(4, 4).index_put((edges[1], edges[0]), weights)  # row: the node that receives
    third = 1 / 3
    expected = torch.tensor([[0.5, 0.5, 0, 0], [third, third, third, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1.0]])
    torch.testing.assert_close(dense, expected)


@pytest.mark.parametrize("norm", deep_gcn.NORMS)
def test_forward_is_the_published_formula(norm: str) -> None:
    config = replace(TINY, norm=norm, depth=3, scale=0.5)
    graph, model = deep_gcn.load(config), deep_gcn.DeepGCN(34, 4, config).eval()
    edges, weights = deep_gcn.mean_over_neighbours(graph.edge_index, 34)
    mean = torch.zeros(34, 34).index_put((edges[1], edges[0]), weights)
    x = graph.x
    for conv in model.convs[:-1]:
        x = mean @ (x @ conv.lin.weight.T) + conv.bias
        if norm == "contra":
            x = contra_norm(x, 0.5, identity=True, edge_index=graph.edge_index)
        if norm != "none":
            x = nn.functional.layer_norm(x, (8,))
        x = x.relu()
    expected = mean @ (x @ model.convs[-1].lin.weight.T) + model.convs[-1].bias
    torch.testing.assert_close(model(graph.x, graph.edge_index), expected)


def test_one_norm_is_shared_by_all_layers() -> None:
    layers = {norm: deep_gcn.DeepGCN(34, 4, replace(TINY, norm=norm)) for norm in deep_gcn.NORMS}
    assert all(len(model.convs) == 4 for model in layers.values())
    sizes = {norm: sum(p.numel() for p in model.norm.parameters()) for norm, model in layers.items()}
    assert sizes == {"none": 0, "layer": 16, "contra": 16}
    assert isinstance(layers["contra"].norm, ContraNorm)


def test_unknown_names_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"norm must be one of \('none', 'layer', 'contra'\), got 'batch'"):
        deep_gcn.run(replace(TINY, norm="batch"))
    with pytest.raises(ValueError, match="neither a graph known by name"):
        deep_gcn.run(replace(TINY, graph="no-such-graph"))
    file = tmp_path / "graph.pt"
    torch.save({"x": torch.eye(3), "edge_index": torch.tensor([[0], [1]])}, file)
    with pytest.raises(ValueError, match="does not say which nodes are for training"):
        deep_gcn.run(replace(TINY, graph=str(file)))


@pytest.mark.parametrize("norm", deep_gcn.NORMS)
def test_it_learns(norm: str) -> None:
    epochs: list[int] = []
    config = replace(TINY, norm=norm, depth=2, hidden=16, dropout=0.0, lr=0.02, epochs=60)
    model, record = deep_gcn.train(config, epochs.append)
    assert epochs == list(range(1, 61))
    assert not model.training
    assert record["losses"][-1] < 0.5 * record["losses"][0]
    assert record["accuracy"]["train"] == 1
    assert record["accuracy"]["test"] > 0.6  # four groups, one labelled node in each


def test_the_seed_decides_and_the_random_state_stays() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, two = deep_gcn.run(TINY), deep_gcn.run(TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert (one["losses"], one["accuracy"]) == (two["losses"], two["accuracy"])
    assert deep_gcn.run(replace(TINY, seed=1))["losses"] != one["losses"]


def test_the_record_is_json_and_says_how_to_repeat_it() -> None:
    record = deep_gcn.run(TINY)
    assert json.loads(json.dumps(record)) == record
    assert deep_gcn.Config(**record["config"]) == TINY
    assert record["versions"].keys() == {"python", "torch", "uncollapse", "torch_geometric"}
    assert len(record["losses"]) == 3


def test_accuracy_is_over_nodes_that_training_did_not_see() -> None:
    graph = deep_gcn.load(TINY)
    graph.val_mask = torch.zeros(34, dtype=torch.bool).index_fill(0, torch.arange(5), True) & ~graph.train_mask

    class Oracle(nn.Module):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            answers = nn.functional.one_hot(graph.y, 4)
            return answers.roll(1, 1).where(graph.val_mask[:, None], answers).float()

    assert deep_gcn.accuracies(Oracle(), graph) == {"train": 1.0, "validation": 0.0, "test": 1.0}


def test_a_deep_one_is_known_to_diagnose() -> None:
    config = replace(TINY, depth=5)
    graph = deep_gcn.load(config)
    found = diagnose(deep_gcn.DeepGCN(34, 4, config), [graph], baseline=0)
    assert [layer.name for layer in found.layers] == ["embed", *(f"block {i}" for i in range(5))]
    assert [layer.dim for layer in found.layers] == [34, 8, 8, 8, 8, 4]
    assert "dirichlet_energy" in found.layers[1].measures
