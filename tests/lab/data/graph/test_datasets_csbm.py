"""The random graph has what was asked for."""

from typing import Any

import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.data.graph.datasets import csbm, to_undirected


@pytest.mark.parametrize(
    ("classes", "homophily", "degree"), [(2, 0.1, 5.0), (3, 0.7, 8.0), (7, 1.0, 3.0), (5, 0.0, 4.0)]
)
def test_degree_homophily_and_classes(classes: int, homophily: float, degree: float) -> None:
    _, edges, y = csbm(20_000, classes, homophily=homophily, degree=degree, features=2)
    same = (y[edges[0]] == y[edges[1]]).float().mean()
    assert same == pytest.approx(homophily, abs=0.01)
    counts = y.bincount()
    assert len(counts) == classes
    assert counts.max() - counts.min() <= 1
    both = to_undirected(edges, 20_000)
    assert both.shape[1] / 20_000 == pytest.approx(degree, rel=0.01)
    # other classes are met equally often
    if homophily < 1:
        outside = ((y[edges[1]] - y[edges[0]]) % classes).bincount(minlength=classes)[1:] / edges.shape[1]
        assert torch.allclose(outside, torch.full_like(outside, (1 - homophily) / (classes - 1)), atol=0.02)


def test_features_have_the_length_of_the_signal_and_unit_noise() -> None:
    x, _, y = csbm(30_000, 3, features=16, signal=2.0)
    means = torch.stack([x[y == label].mean(0) for label in range(3)])
    assert torch.allclose(means.norm(dim=1), torch.tensor(2.0), atol=0.1)
    assert torch.allclose((x - means[y]).var(0), torch.ones(16), atol=0.05)


def test_the_seed_says_everything() -> None:
    first, again, other = csbm(seed=1), csbm(seed=1), csbm(seed=2)
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_neighbours_help_where_features_alone_do_not_suffice() -> None:
    x, edges, y = csbm()
    both = to_undirected(edges, len(y))
    smooth = torch.eye(len(y))
    smooth[both[0], both[1]] = 1.0
    smooth = smooth / smooth.sum(1, keepdim=True)

    def accuracy(x: torch.Tensor) -> float:
        means = torch.stack([x[y == label].mean(0) for label in range(3)])
        return float((torch.cdist(x, means).argmin(1) == y).float().mean())

    assert accuracy(x) < 0.88
    assert accuracy(smooth @ x) > accuracy(x) + 0.05


def test_large_graphs_take_no_square_of_memory() -> None:
    x, edges, y = csbm(200_000, 10, features=4)  # the square would be 40 GB even in bits of a byte
    assert (len(x), edges.shape[1], int(edges.max()) < 200_000, len(y)) == (200_000, 800_000, True, 200_000)


@pytest.mark.parametrize(
    "wrong",
    [{"nodes": 2}, {"classes": 0}, {"features": 0}, {"homophily": 1.2}, {"degree": -1.0}, {"degree": float("nan")}],
)
def test_sizes_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="csbm needs"):
        csbm(**wrong)


def test_smallest_graphs() -> None:
    x, edges, y = csbm(1, 1, degree=0)
    assert (x.shape, edges.shape, y.tolist()) == ((1, 32), (2, 0), [0])
    _, edges, _ = csbm(3, 3, homophily=0.0)
    assert bool((edges[0] != edges[1]).all())
