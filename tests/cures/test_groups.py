"""The pairs that a graph leaves out, and when they are remembered."""

import gc

import pytest
import torch

from uncollapse import contra_norm
from uncollapse.cures import groups as module
from uncollapse.cures.groups import neighbours


def test_both_directions_once_without_self_loops_sorted() -> None:
    edges = torch.tensor([[3, 0, 1, 1, 2, 0], [0, 3, 2, 2, 2, 1]])
    found = neighbours(edges, 4)
    assert found.T.tolist() == [[0, 1], [0, 3], [1, 0], [1, 2], [2, 1], [3, 0]]
    assert neighbours(torch.zeros(2, 0, dtype=torch.long), 4).shape == (2, 0)
    assert neighbours(torch.zeros(2, 0, dtype=torch.long), 0).shape == (2, 0)


def test_the_same_edges_are_prepared_once() -> None:
    edges = torch.tensor([[0, 1], [1, 2]])
    first = neighbours(edges, 3)
    assert neighbours(edges, 3) is first
    assert neighbours(edges, 5) is not first  # other nodes
    assert neighbours(edges.clone(), 3) is not first


def test_edges_that_change_in_place_are_prepared_again() -> None:
    torch.manual_seed(0)
    x, edges = torch.randn(5, 3), torch.tensor([[0, 1], [1, 2]])
    before = contra_norm(x, 0.5, edge_index=edges)
    edges[1, 1] = 4
    after = contra_norm(x, 0.5, edge_index=edges)
    torch.testing.assert_close(after, contra_norm(x, 0.5, edge_index=torch.tensor([[0, 1], [1, 4]])))
    assert not torch.equal(before, after)


def test_nothing_is_held_once_the_edges_are_gone() -> None:
    edges = torch.tensor([[0], [1]])
    neighbours(edges, 2)
    assert module._last is not None
    del edges
    gc.collect()
    assert module._last is None


def test_edges_of_inference_mode() -> None:
    with torch.inference_mode():
        edges = torch.tensor([[0], [1]])
        assert neighbours(edges, 2).tolist() == [[0, 1], [1, 0]]


def test_bad_edges_are_refused_and_not_remembered() -> None:
    edges = torch.tensor([[0], [7]])
    for _ in range(2):
        with pytest.raises(ValueError, match="0 to 2"):
            neighbours(edges, 3)
