"""What a frozen encoder knows."""

import pytest
import torch
from torch import Tensor

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.experiments.contrastive.training import knn_probe, linear_probe

pytest.importorskip("sklearn")


def clusters(count: int, seed: int, apart: float = 4.0) -> tuple[Tensor, Tensor]:
    labels = torch.arange(count) % 3
    noise = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return noise + apart * torch.eye(6)[labels], labels


def test_what_is_apart_is_told_apart() -> None:
    train, judged = clusters(300, 0), {"test": clusters(90, 1)}
    assert linear_probe(train, judged, epochs=200)["test"] > 0.95
    assert knn_probe(train, judged)["test"] > 0.95


def test_what_is_alike_is_guessed() -> None:
    train, judged = clusters(300, 0, apart=0.0), {"test": clusters(300, 1, apart=0.0)}
    assert linear_probe(train, judged, epochs=10)["test"] == pytest.approx(1 / 3, abs=0.12)
    assert knn_probe(train, judged)["test"] == pytest.approx(1 / 3, abs=0.12)


def test_neighbours_are_those_of_a_loop() -> None:
    (x, labels), (z, wanted) = clusters(60, 0, apart=1.0), clusters(30, 1, apart=1.0)
    right = 0
    for row, label in zip(z, wanted, strict=True):
        nearest = (x - row).norm(dim=1).argsort()[:5]
        votes = torch.bincount(labels[nearest], minlength=3)
        right += int(votes.argmax()) == int(label)  # of equal votes the first class, as scikit-learn has it
    assert knn_probe((x, labels), {"test": (z, wanted)})["test"] == pytest.approx(right / 30)


def test_a_probe_depends_on_its_seed_and_leaves_ours_alone() -> None:
    train, judged = clusters(90, 0, apart=0.5), {"validation": clusters(90, 1, 0.5), "test": clusters(90, 2, 0.5)}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = linear_probe(train, judged, seed=1, epochs=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert first == linear_probe(train, judged, seed=1, epochs=3)
    assert first.keys() == {"validation", "test"}


def test_it_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert linear_probe(clusters(90, 0), {"test": clusters(30, 1)}, epochs=300)["test"] > 0.8


def test_features_that_are_not_finite_and_too_few_rows_are_told() -> None:
    broken = (torch.full((9, 2), torch.nan), torch.arange(9) % 3)
    with pytest.raises(NotFiniteError, match="not finite"):
        linear_probe(broken, {})
    with pytest.raises(UsageError, match="5 neighbors"):
        knn_probe(clusters(4, 0), {})


def test_rows_may_differ_from_epoch_to_epoch() -> None:
    train, judged = clusters(90, 0), {"test": clusters(90, 1)}
    asked: list[int] = []

    def rows_of(epoch: int) -> tuple[Tensor, Tensor]:
        asked.append(epoch)
        return train

    assert linear_probe(rows_of, judged, epochs=5) == linear_probe(train, judged, epochs=5)
    assert asked == [0, 1, 2, 3, 4]
