"""The random graph in the shape of ogbn-arxiv."""

import time
from typing import Any

import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.data.graph.datasets import arxiv_like, load_graph, to_undirected
from uncollapse.lab.data.graph.random_graphs import _popular_members


def test_degree_homophily_and_classes() -> None:
    x, edges, y = arxiv_like(20_000, homophily=0.4)
    assert x.shape == (20_000, 128)
    assert y.bincount().tolist() == [500] * 40
    assert edges.shape[1] == round(20_000 * 1_166_243 / 169_343)
    assert (y[edges[0]] == y[edges[1]]).float().mean() == pytest.approx(0.4, abs=0.01)


def test_citations_have_a_power_law_tail_and_references_do_not() -> None:
    """Hill's estimate of the exponent from the most cited papers: 1 + k / Σ log(d_i/d_k)."""
    for tail in (2.3, 3.0):
        _, edges, y = arxiv_like(50_000, features=1, tail=tail)
        cited = edges[1].bincount(minlength=len(y)).double().sort(descending=True).values
        top = cited[:500]
        hill = 1 + len(top) / float((top / top[-1]).log().sum())
        assert hill == pytest.approx(tail, abs=0.3)
        assert int(edges[0].bincount().max()) < 30 < int(cited[0])
    assert float((cited == 0).double().mean()) > 0.1


def test_popular_nodes_are_drawn_in_proportion_within_their_class() -> None:
    y = torch.tensor([1, 0, 1, 0, 1])
    popularity = torch.tensor([1.0, 2.0, 3.0, 6.0, 0.0], dtype=torch.float64)
    goal = torch.arange(2).repeat_interleave(20_000)
    drawn = _popular_members(y, goal, popularity, torch.Generator().manual_seed(0))
    assert torch.equal(y[drawn], goal)
    shares = drawn.bincount(minlength=5) / 20_000
    assert torch.allclose(shares, torch.tensor([0.25, 0.25, 0.75, 0.75, 0.0]), atol=0.02)


def test_the_seed_says_everything() -> None:
    first, again, other = arxiv_like(300, seed=1), arxiv_like(300, seed=1), arxiv_like(300, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_size_of_arxiv_takes_seconds() -> None:
    began = time.process_time()
    _, edges, y = arxiv_like(169_343, features=4)
    assert edges.shape == (2, 1_166_243)
    assert int(edges.max()) < len(y) == 169_343
    assert time.process_time() - began < 30


def test_as_a_data_set() -> None:
    graph = load_graph("arxiv_like", drawn={"nodes": 2000})
    shares = [float(mask.float().mean()) for mask in (graph.train, graph.validation, graph.test)]
    assert shares == pytest.approx([0.54, 0.18, 0.28], abs=0.01)
    assert graph.classes == 40
    _, edges, _ = arxiv_like(2000)
    assert torch.equal(graph.edge_index, to_undirected(edges, 2000))


@pytest.mark.parametrize("wrong", [{"nodes": 20}, {"tail": 2.0}, {"tail": float("nan")}, {"homophily": -0.1}])
def test_sizes_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="arxiv_like needs"):
        arxiv_like(**wrong)


def test_smallest_graphs() -> None:
    x, edges, y = arxiv_like(1, 1, degree=0)
    assert (x.shape, edges.shape, y.tolist()) == ((1, 128), (2, 0), [0])
    _, edges, _ = arxiv_like(3, 3, homophily=0.0)
    assert bool((edges[0] != edges[1]).all())
