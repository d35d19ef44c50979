import math

import pytest
import torch
from torch import Tensor

from uncollapse.metrics import dirichlet_energy, graph, group_distance_ratio, mean_average_distance

EDGES = torch.tensor([[0, 0, 1, 2, 3], [1, 2, 2, 3, 4]])  # node 5 is alone
NORMALIZE = ["degree", "norm", None]


def nodes(n: int = 6, d: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def neighbours(edges: Tensor, n: int) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(n)]
    for i, j in edges.T.tolist():
        if i != j:
            found[i].add(j)
            found[j].add(i)
    return found


def naive_energy(x: Tensor, edges: Tensor, normalize: str | None) -> float:
    near, total = neighbours(edges, len(x)), 0.0
    for i in range(len(x)):
        for j in near[i]:
            a, b = x[i], x[j]
            if normalize == "degree":
                a, b = a / math.sqrt(1 + len(near[i])), b / math.sqrt(1 + len(near[j]))
            total += 0.5 * float(((a - b) ** 2).sum())
    return total / (float((x**2).sum()) if normalize == "norm" else len(x))


def naive_mad(x: Tensor, edges: Tensor) -> float:
    means = []
    for i, near in enumerate(neighbours(edges, len(x))):
        distances = [1 - float(torch.cosine_similarity(x[i], x[j], dim=0)) for j in near]
        means += [sum(distances) / len(distances)] if distances else []
    return sum(means) / len(means)


def naive_ratio(x: Tensor, labels: Tensor) -> float:
    classes = labels.unique().tolist()

    def distance(a: int, b: int) -> list[float]:
        rows, columns = (labels == a).nonzero().flatten(), (labels == b).nonzero().flatten()
        return [float((x[i] - x[j]).norm()) for i in rows for j in columns if i != j]

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(values)

    between = [mean(distance(a, b)) for a in classes for b in classes if a < b]
    within = [mean(distance(a, a)) for a in classes if len(distance(a, a)) > 0]
    return mean(between) / mean(within)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_dirichlet_energy(normalize) -> None:  # type: ignore[no-untyped-def]
    x = nodes()
    expected = pytest.approx(naive_energy(x, EDGES, normalize), rel=1e-12)
    assert float(dirichlet_energy(x, EDGES, normalize=normalize)) == expected
    assert torch.autograd.gradcheck(lambda x: dirichlet_energy(x, EDGES, normalize=normalize), x.requires_grad_())


def test_energy_is_the_laplacian_quadratic_form() -> None:
    x, n = nodes(), 6
    adjacency = torch.zeros(n, n, dtype=x.dtype)
    adjacency[EDGES[0], EDGES[1]] = adjacency[EDGES[1], EDGES[0]] = 1
    laplacian = torch.diag(adjacency.sum(1)) - adjacency
    expected = torch.trace(x.T @ laplacian @ x)
    torch.testing.assert_close(dirichlet_energy(x, EDGES, normalize=None) * n, expected)
    torch.testing.assert_close(dirichlet_energy(x, EDGES, normalize="norm"), expected / x.norm() ** 2)


@pytest.mark.parametrize("parts", [1, 2])
def test_directions_repeats_and_loops_do_not_matter(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    if parts == 2:
        monkeypatch.setattr(graph, "EDGES", 3)
    x = nodes()
    loops = torch.arange(6).repeat(2, 1)
    for edges in (
        EDGES.flip(0),
        torch.cat([EDGES, EDGES.flip(0)], 1),
        torch.cat([EDGES, EDGES, loops], 1),
        EDGES.int(),
    ):
        for normalize in ("degree", "norm", None):
            value = dirichlet_energy(x, edges, normalize=normalize)
            assert float(value) == pytest.approx(naive_energy(x, EDGES, normalize), rel=1e-12)
        assert float(mean_average_distance(x, edges)) == pytest.approx(naive_mad(x, EDGES), rel=1e-12)


def test_energy_of_constant_nodes() -> None:
    same = torch.full((6, 3), 0.7)
    assert float(dirichlet_energy(same, EDGES, normalize=None)) == 0
    assert float(dirichlet_energy(same, EDGES, normalize="norm")) == 0
    assert float(dirichlet_energy(same, EDGES)) > 0  # its zeros are the nodes in proportion to √(1+d)
    degrees = torch.tensor([len(near) for near in neighbours(EDGES, 6)])
    assert float(dirichlet_energy((1 + degrees).sqrt()[:, None], EDGES)) == pytest.approx(0, abs=1e-13)


def test_norm_is_free_of_scale() -> None:
    x = nodes().float()
    for size in (1e-25, 1e25):
        value = dirichlet_energy(x * size, EDGES, normalize="norm")
        torch.testing.assert_close(value, dirichlet_energy(x, EDGES, normalize="norm"), rtol=1e-5, atol=0)
    zero = torch.zeros(6, 2, requires_grad=True)
    value = dirichlet_energy(zero, EDGES, normalize="norm")
    value.backward()
    assert float(value.detach()) == 0
    assert zero.grad is not None
    assert bool((zero.grad == 0).all())


def test_mean_average_distance() -> None:
    x = nodes()
    assert float(mean_average_distance(x, EDGES)) == pytest.approx(naive_mad(x, EDGES), rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: mean_average_distance(x, EDGES), x.requires_grad_())
    assert float(mean_average_distance(torch.full((6, 3), 0.7), EDGES)) == pytest.approx(0, abs=1e-7)
    assert float(mean_average_distance(torch.zeros(6, 3), EDGES)) == 1


def test_two_graphs_joined() -> None:
    a, b = nodes(), nodes(seed=1)
    both, edges = torch.cat([a, b]), torch.cat([EDGES, EDGES + 6], 1)
    for metric in (dirichlet_energy, mean_average_distance):
        torch.testing.assert_close(metric(both, edges), (metric(a, EDGES) + metric(b, EDGES)) / 2)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_without_edges(n: int) -> None:
    x, none = torch.ones(n, 3), torch.zeros(2, 0, dtype=torch.long)
    for normalize in ("degree", "norm", None):
        assert float(dirichlet_energy(x, none, normalize=normalize)) == 0
    assert float(mean_average_distance(x, none)) == 0
    if n:
        assert float(mean_average_distance(x, torch.zeros(2, 1, dtype=torch.long))) == 0


@pytest.mark.parametrize("metric", [dirichlet_energy, mean_average_distance])
def test_bad_edges(metric) -> None:  # type: ignore[no-untyped-def]
    x = nodes()
    with pytest.raises(ValueError, match="0 and 6"):
        metric(x, torch.tensor([[0], [6]]))
    with pytest.raises(ValueError, match="-1"):
        metric(x, torch.tensor([[-1], [0]]))
    with pytest.raises(ValueError, match=r"\(2, E\)"):
        metric(x, EDGES.T)
    with pytest.raises(ValueError, match="float32"):
        metric(x, EDGES.float())
    with pytest.raises(ValueError, match=r"\(n, d\)"):
        metric(x[None], EDGES)


def test_bad_normalize() -> None:
    with pytest.raises(ValueError, match='"degree", "norm"'):
        dirichlet_energy(nodes(), EDGES, normalize="volume")  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [[0, 1, 0, 1, 2, 2, 0], [5, 5, -3, -3, -3, 9, 5], [1, 1, 1, 1, 1, 1, 0]])
@pytest.mark.parametrize("tile", [1, 20, 1 << 20])
def test_group_distance_ratio(monkeypatch: pytest.MonkeyPatch, labels: list[int], tile: int) -> None:
    monkeypatch.setattr(graph, "TILE", tile)
    x, given = nodes(7), torch.tensor(labels)
    assert float(group_distance_ratio(x, given)) == pytest.approx(naive_ratio(x, given), rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: group_distance_ratio(x, given), x.requires_grad_())


def test_group_distance_ratio_does_not_depend_on_order_or_scale() -> None:
    x, labels = nodes(9), torch.arange(9) % 3
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    expected = group_distance_ratio(x, labels)
    torch.testing.assert_close(group_distance_ratio(x[order] * 1e3 + 5, labels[order]), expected)


def test_group_distance_ratio_keeps_no_matrix_of_all_pairs(monkeypatch: pytest.MonkeyPatch, watched) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(graph, "TILE", 1 << 12)
    x, labels = nodes(300, 2).requires_grad_(), torch.arange(300) % 4
    with watched as sizes:
        group_distance_ratio(x, labels).backward()
    assert 0 < sizes.largest <= 1 << 12
    assert 0 < sizes.kept < 300 * 300


def test_group_distance_ratio_of_collapsed_classes() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    x = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    assert float(group_distance_ratio(x, labels)) == math.inf
    assert float(group_distance_ratio(torch.ones(4, 2), labels)) == 0


def test_bad_labels() -> None:
    x = nodes(4)
    for labels in ([0, 1, 2, 3], [0, 0, 0, 0]):
        with pytest.raises(ValueError, match="two classes"):
            group_distance_ratio(x, torch.tensor(labels))
    with pytest.raises(ValueError, match=r"labels.*\(4,\)"):
        group_distance_ratio(x, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"labels.*integers"):
        group_distance_ratio(x, torch.ones(4))
