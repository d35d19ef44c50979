"""Points on the sphere: where they lie, the regular ones against their known cosines, the optimised against both."""

import math

import pytest
import torch
from torch import Generator, Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.experiments.sphere import potentials
from uncollapse.metrics.hypersphere import uniformity


def generator() -> Generator:
    return Generator().manual_seed(0)


def cosines(points: Tensor) -> Tensor:
    """Of all pairs, each once."""
    product = points @ points.T
    first, second = torch.triu_indices(len(points), len(points), 1)
    return product[first, second]


@pytest.mark.parametrize("dim", [2, 3, 7])
def test_all_points_have_length_one(dim: int) -> None:
    corners = potentials.simplex(dim + 1, dim)
    cluster = potentials.clustered_points(50, corners, generator())
    for points in (
        potentials.uniform_points(50, dim, generator()),
        potentials.half_sphere(50, dim, generator()),
        cluster,
        corners,
    ):
        assert points.shape[1] == dim
        assert points.dtype == torch.float64
        torch.testing.assert_close(points.norm(dim=-1), torch.ones(len(points), dtype=torch.float64))


def test_random_points_fill_the_sphere_and_half_of_it() -> None:
    whole, part = potentials.uniform_points(20_000, 3, generator()), potentials.half_sphere(20_000, 3, generator())
    assert float(whole.mean(0).abs().max()) < 0.02
    torch.testing.assert_close(whole.T @ whole / len(whole), torch.eye(3).double() / 3, atol=0.01, rtol=0)
    assert float(part[:, -1].min()) >= 0
    assert float(part[:, -1].mean()) == pytest.approx(0.5, abs=0.01)  # heights on the sphere are even
    assert float(part[:, :2].mean(0).abs().max()) < 0.02


def test_clusters_lie_around_their_centres() -> None:
    centres = potentials.simplex(4, 3)
    points = potentials.clustered_points(41, centres, generator(), spread=0.1)
    nearest = (points @ centres.T).argmax(1)
    assert nearest.tolist() == [at % 4 for at in range(41)]
    assert torch.equal(potentials.clustered_points(6, centres[:1], generator(), spread=0.0), centres[:1].expand(6, 3))


@pytest.mark.parametrize(("n", "dim"), [(2, 2), (3, 2), (2, 3), (4, 3), (5, 9), (10, 9)])
def test_corners_of_a_simplex_are_as_far_from_each_other_as_they_can_be(n: int, dim: int) -> None:
    corners = potentials.simplex(n, dim)
    assert corners.shape == (n, dim)
    torch.testing.assert_close(cosines(corners), torch.full((n * (n - 1) // 2,), -1 / (n - 1)).double())
    assert float(uniformity(corners, 2.0)) == pytest.approx(-4 * n / (n - 1))


def test_polygon_has_even_angles() -> None:
    points = potentials.polygon(5)
    angles = torch.atan2(points[:, 1], points[:, 0]) % (2 * math.pi)
    torch.testing.assert_close(angles, torch.arange(5).double() * 2 * math.pi / 5)


def test_the_icosahedron() -> None:
    found = cosines(potentials.icosahedron()).round(decimals=6)
    values, counts = found.unique(return_counts=True)
    assert values.tolist() == pytest.approx([-1, -1 / math.sqrt(5), 1 / math.sqrt(5)], abs=1e-6)
    assert counts.tolist() == [6, 30, 30]


def test_which_regular_set_is_given() -> None:
    def same(points: Tensor | None, other: Tensor) -> bool:
        return points is not None and torch.equal(points, other)

    assert same(potentials.regular_points(100, 2), potentials.polygon(100))
    assert same(potentials.regular_points(4, 3), potentials.simplex(4, 3))
    assert same(potentials.regular_points(12, 3), potentials.icosahedron())
    assert same(potentials.regular_points(50, 3), potentials.fibonacci(50))
    octahedron = potentials.regular_points(6, 3)
    assert octahedron is not None
    assert sorted(cosines(octahedron).tolist()) == [-1.0] * 3 + [0.0] * 12
    assert potentials.regular_points(50, 4) is None


def test_the_lattice_is_nearly_the_best() -> None:
    lattice = potentials.fibonacci(200)
    torch.testing.assert_close(lattice.norm(dim=-1), torch.ones(200).double())
    assert float(lattice.mean(0).abs().max()) < 2e-3
    drawn = potentials.uniform_points(200, 3, generator())
    assert float(uniformity(lattice)) < float(uniformity(drawn))


@pytest.mark.parametrize(("n", "dim"), [(2, 2), (5, 2), (4, 3), (6, 3)])
def test_a_cluster_that_minimizes_the_loss_becomes_the_regular_set(n: int, dim: int) -> None:
    start = potentials.clustered_points(n, potentials.simplex(2, dim)[:1], generator())
    found, regular = potentials.optimise_points(start, 2.0, 100), potentials.regular_points(n, dim)
    assert regular is not None
    torch.testing.assert_close(cosines(found).sort().values, cosines(regular).sort().values, atol=1e-4, rtol=0)


def test_optimising_leaves_its_start_as_it_was() -> None:
    start = potentials.uniform_points(6, 2, generator())
    copy = start.clone()
    found = potentials.optimise_points(start, 2.0, 1)
    assert torch.equal(start, copy)
    assert not found.requires_grad
    assert float(uniformity(found)) < float(uniformity(start))


def test_what_there_is_not() -> None:
    with pytest.raises(UsageError, match="2 to 4"):
        potentials.simplex(5, 3)
    with pytest.raises(UsageError, match="two points"):
        potentials.regular_points(1, 2)
