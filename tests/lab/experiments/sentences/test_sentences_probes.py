"""Logistic regressions on frozen rows."""

import pytest
import torch
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.experiments.sentences.training import (
    majority_accuracy,
    probe_accuracy,
    scale_to_sphere,
    standardise,
)

pytest.importorskip("sklearn")


def task(noise: float, count: int = 60) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 2
    rows = torch.randn(count, 3, generator=source)
    rows[:, 0] = 2.0 * labels - 1 + noise * rows[:, 0]
    return rows, labels


def test_what_can_be_read_off_is_learnt() -> None:
    rows, labels = task(noise=0.1)
    assert probe_accuracy(standardise(rows), labels) == 1
    assert probe_accuracy(standardise(rows), labels, tests=20) == 1


def test_labels_of_the_judged_sentences_are_not_used() -> None:
    rows, labels = task(noise=0.1)
    wrong = labels.clone()
    wrong[-20:] = 1 - wrong[-20:]
    assert probe_accuracy(standardise(rows), wrong, tests=20) == 0
    noise = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    assert probe_accuracy(noise, labels) < 0.7


def test_the_folds_are_the_same_each_time() -> None:
    rows, labels = task(noise=2.0)
    assert probe_accuracy(rows, labels) == probe_accuracy(rows, labels)


def test_standardised_features_have_unit_deviation_and_constant_ones_are_nothing() -> None:
    rows = torch.tensor([[1.0, 5.0], [3.0, 5.0], [8.0, 5.0]])
    found = standardise(rows)
    torch.testing.assert_close(found.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.std(0), torch.tensor([1.0, 0.0], dtype=torch.float64))


def test_a_collapse_stays_one_on_the_sphere_but_not_when_standardised() -> None:
    rows, labels = task(noise=0.1)
    collapsed = torch.tensor([5.0, 5.0, 5.0]) + 1e-3 * rows
    assert probe_accuracy(standardise(collapsed), labels) == 1
    assert probe_accuracy(scale_to_sphere(collapsed), labels) < 0.8
    torch.testing.assert_close(scale_to_sphere(rows).square().sum(1), torch.full((60,), 3.0, dtype=torch.float64))


def test_what_a_silent_encoder_has() -> None:
    labels = torch.tensor([1, 1, 1, 0, 2, 1, 0, 0])
    assert majority_accuracy(labels) == 0.5
    assert majority_accuracy(labels, tests=3) == pytest.approx(1 / 3)


def test_too_few_sentences_for_ten_folds_are_told() -> None:
    with pytest.raises(UsageError, match="folds"):
        probe_accuracy(torch.zeros(21, 2), torch.tensor([0] * 9 + [1] * 12))
