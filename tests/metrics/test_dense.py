import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from uncollapse.losses import gram_anchor_loss
from uncollapse.metrics import dense_structure, effective_rank, gram_drift
from uncollapse.metrics.dense import cluster


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kinds(b: int, n: int, d: int, count: int, noise: float = 0.02) -> tuple[Tensor, Tensor]:
    """Patches of `count` kinds that no clustering can confuse, and which kind each patch is."""
    label = torch.arange(n).remainder(count).repeat(b, 1)
    return normalize(torch.eye(d, dtype=torch.float64)[label] + noise * normal(b, n, d), dim=-1), label


def spread(rows: Tensor) -> float:
    sigma = torch.linalg.svdvals(rows - rows.mean(0))
    return float(sigma.sum()) / math.sqrt(max(len(rows) - 1, rows.shape[1]))


def separation(x: Tensor, label: Tensor, count: int, images: int) -> float:
    """The first part of the estimator, for known clusters, by loops."""
    b, _, d = x.shape
    alone = [sum(spread(x[i][label[i] == k]) for k in range(count)) / count for i in range(b)]
    between, grouped = [], []
    for start in range(0, b, images):
        rows, of = x[start : start + images].reshape(-1, d), label[start : start + images].reshape(-1)
        centers = [rows[of == k].mean(0) for k in range(count)]
        grouped += [spread(rows[of == k]) for k in range(count)]
        others = [
            min(float((row - centers[k]).norm()) for k in range(count) if k != own)
            for row, own in zip(rows, of.tolist(), strict=True)
        ]
        between.append(sum(others) / len(others))
    rows = x.reshape(-1, d)
    scale = float((rows - rows.mean(0)).norm(dim=-1).mean())
    inter, image, group = (sum(v) / len(v) for v in (between, alone, grouped))
    return (inter - (image + group) / 2) / scale


@pytest.mark.parametrize(("b", "images"), [(1, 8), (5, 2), (4, 4)])
def test_separation_of_known_clusters(b: int, images: int) -> None:
    x, label = kinds(b, 15, 6, 3)
    got = dense_structure(3 * x, global_clusters=3, images=images, rank=0.0)
    assert got.item() == pytest.approx(separation(x, label, 3, images), rel=1e-9)


def test_dimensions_are_the_effective_rank_of_one_patch_of_each_image() -> None:
    images = normal(5, 7)
    x = images[:, None].repeat(1, 4, 1)  # all patches of an image are equal, so any draw gives the same rows
    parts = dense_structure(x, rank=0.0), dense_structure(x, rank=2.0)
    expected = 2 * effective_rank(normalize(images, dim=-1)) / 5
    torch.testing.assert_close(parts[1] - parts[0], expected, rtol=1e-10, atol=0)


def test_higher_for_separate_clusters_and_for_more_dimensions() -> None:
    values = [dense_structure(kinds(4, 30, 6, 3, noise)[0], global_clusters=3, rank=0.0) for noise in (0.02, 0.2, 1.0)]
    assert values[0] > values[1] > values[2]
    flat = normal(6, 10, 8) * torch.tensor([1.0] * 2 + [0.01] * 6, dtype=torch.float64)
    whole = [(dense_structure(x, rank=1.0) - dense_structure(x, rank=0.0)).item() for x in (normal(6, 10, 8), flat)]
    assert whole[0] > 1.5 * whole[1]


def test_is_deterministic_and_depends_little_on_the_seed() -> None:
    x = normal(6, 20, 5)
    values = [dense_structure(x, seed=seed).item() for seed in range(5)]
    assert dense_structure(x).item() == values[0]
    assert max(values) - min(values) < 0.25 * values[0]  # few patches without any clusters


def test_degenerate_patches() -> None:
    same = torch.ones(3, 4, 5, requires_grad=True)
    value = dense_structure(same)
    value.backward()
    assert value.item() == pytest.approx(1 / 3, abs=1e-6)
    assert same.grad.isfinite().all()
    assert dense_structure(torch.zeros(3, 4, 5)).item() == 0
    assert dense_structure(torch.ones(1, 1, 4)).item() == pytest.approx(1)
    two = torch.eye(2).repeat(2, 3, 1)  # fewer kinds than clusters
    assert dense_structure(two).isfinite()


def test_cluster_finds_what_is_apart() -> None:
    x, label = kinds(1, 40, 5, 4)
    centers, found = cluster(x[0], 4, torch.Generator().manual_seed(0))
    assert len(centers) == 4
    same = label[0][:, None] == label[0]
    assert torch.equal(found[:, None] == found, same)
    assert len(cluster(torch.ones(5, 2), 3, torch.Generator())[0]) == 1


@pytest.mark.parametrize(("options", "word"), [({"images": 0}, "images"), ({"local_clusters": 0}, "local_clusters")])
def test_bad_options(options: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        dense_structure(normal(2, 3, 4), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(b, n, d\)"):
        dense_structure(normal(3, 4))


def naive_drift(x: Tensor, y: Tensor) -> float:
    a, b = normalize(x, dim=-1).tolist(), normalize(y, dim=-1).tolist()
    n, total = len(a), 0.0
    for i in range(n):
        for j in range(n):
            now, then = (math.fsum(p * q for p, q in zip(t[i], t[j], strict=True)) for t in (a, b))
            total += (now - then) ** 2
    return total / n**2


def test_drift_is_the_mean_over_pairs_and_the_loss() -> None:
    x, y = normal(3, 8, 4), normal(3, 8, 4, seed=1)
    expected = torch.tensor([naive_drift(a, b) for a, b in zip(x, y, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(gram_drift(x, y), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gram_drift(x, y).mean(), gram_anchor_loss(x, y), rtol=1e-12, atol=0)


def test_drift_with_a_mask_is_that_of_the_real_patches() -> None:
    x, y, mask = normal(2, 8, 4), normal(2, 8, 4, seed=1), torch.arange(8) < torch.tensor([[5], [0]])
    x[~mask] = torch.nan
    got = gram_drift(x, y, mask=mask)
    assert got.tolist() == [pytest.approx(naive_drift(x[0, :5], y[0, :5]), rel=1e-12), 0]


def test_drift_of_rotated_and_of_zero_patches() -> None:
    x, turn = normal(7, 4), torch.linalg.qr(normal(4, 4, seed=1))[0]
    assert gram_drift(x @ turn, 3 * x).item() == pytest.approx(0, abs=1e-28)
    assert gram_drift(torch.zeros(3, 4), torch.eye(4)[:3]).item() == pytest.approx(1 / 3)
    assert gram_drift(torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [-1.0]])).item() == pytest.approx(2)
    with pytest.raises(ValueError, match="same shape"):
        gram_drift(x, x[:3])
