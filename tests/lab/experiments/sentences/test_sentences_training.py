"""Training on neighbouring sentences: pairs, batches, figures."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.lab.experiments.sentences.tiny_sentences import TINY, put_tiny

from uncollapse import alignment, uniformity
from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.contrastive.objectives import objective
from uncollapse.lab.experiments.sentences.config import build_encoders, load_data
from uncollapse.lab.experiments.sentences.training import PairTraining, neighbour_accuracy, neighbour_pairs


@pytest.fixture
def training(tmp_path: Path) -> PairTraining:
    data = load_data(TINY, Runtime(put_tiny(tmp_path)))
    return PairTraining(build_encoders(TINY, len(data.vocabulary)), TINY, data)


def test_pairs_are_neighbours_within_a_document_and_share_no_sentence() -> None:
    sizes = torch.tensor([2, 5, 3, 8, 2])
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    seen = set()
    for seed in range(20):
        found = neighbour_pairs(sizes, torch.Generator().manual_seed(seed))
        assert len(found) >= 1 + 2 + 1 + 3 + 1
        assert torch.equal(found[:, 1], found[:, 0] + 1)
        assert torch.equal(owner[found[:, 0]], owner[found[:, 1]])
        assert len(torch.unique(found)) == found.numel()
        seen |= set(map(tuple, found.tolist()))
    every = {(n, n + 1) for n in range(len(owner) - 1) if owner[n] == owner[n + 1]}
    assert seen == every


def test_batches_depend_on_the_seed_and_the_epoch_alone(training: PairTraining) -> None:
    first, again = ([batch.ids for batch in training.batches(1)] for _ in range(2))
    assert len(first) == len(training.batches(2)) == training.steps == 6
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = [batch.ids for batch in training.batches(2)]
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, other, strict=True))
    later = [batch.ids for batch in training.batches(1).after(4)]
    assert all(torch.equal(a, b) for a, b in zip(first[4:], later, strict=True))
    assert [len(batch) for batch in training.batches(1)] == [8] * 6


def test_no_sentence_is_twice_in_an_epoch(training: PairTraining) -> None:
    groups = torch.cat(list(training.batches(3).groups))
    assert len(torch.unique(groups)) == groups.numel()
    assert set((groups[:, 1] - groups[:, 0]).tolist()) == {-1, 1}  # both sides come first


def test_the_loss_is_the_objective_of_both_sides(training: PairTraining) -> None:
    batch = next(iter(training.batches(1)))
    x, y = training.encoders.first(batch.ids, batch.mask).split(8)
    torch.testing.assert_close(training.loss(training.encoders, batch), objective(TINY, x, y))


def test_figures_are_those_of_the_held_back_pairs(training: PairTraining) -> None:
    training.encoders.eval()
    with torch.no_grad():
        x, y = training.views(training.encoders)
    found = training.evaluate(training.encoders)
    assert x.shape == y.shape == (16, 4)
    assert found["alignment"] == pytest.approx(float(alignment(x, y)))
    assert found["uniformity"] == pytest.approx(float(uniformity(x) + uniformity(y)) / 2)
    halves = [float(objective(TINY, x[part], y[part])) for part in (slice(8), slice(8, 16))]
    assert found["objective"] == pytest.approx(sum(halves) / 2)


def test_neighbours_are_found_by_the_angle() -> None:
    angles = torch.arange(6) * math.pi / 3
    x = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert neighbour_accuracy(x, 5 * x) == 1
    assert neighbour_accuracy(x, x.roll(1, 0)) == 0
    assert neighbour_accuracy(x, torch.ones(6, 2)) == 0  # a collapse finds nobody
    y = x.clone()
    y[0], y[1] = x[1], x[0]
    assert neighbour_accuracy(x, y) == pytest.approx(4 / 6)


def test_layers_come_in_the_order_of_the_sentences(training: PairTraining) -> None:
    rows = training.data.tasks["mr"][0]
    every = training.layers(rows)
    chosen = torch.tensor([7, 3, 60])
    for name, found in training.layers(rows, chosen).items():
        torch.testing.assert_close(found, every[name][chosen])
    features, outputs = training.task_features("mr")
    assert torch.equal(features, every["block 1"])
    assert torch.equal(outputs, every["output"])


def test_features_that_are_not_finite_are_told(training: PairTraining) -> None:
    with torch.no_grad():
        training.encoders.first.embed.weight.fill_(math.nan)
    with pytest.raises(NotFiniteError, match="not finite"):
        training.task_features("mr")


def test_batches_that_are_too_large_are_told(training: PairTraining) -> None:
    with pytest.raises(UsageError, match="48 pairs"):
        PairTraining(training.encoders, replace(TINY, batch=64), training.data).task()
    with pytest.raises(UsageError, match="one step"):
        PairTraining(training.encoders, replace(TINY, batch=48, epochs=1), training.data).task()
