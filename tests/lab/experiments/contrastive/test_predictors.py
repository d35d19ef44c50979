"""What explains how good encoders are."""

import math
from typing import Any

import numpy
import pytest

from uncollapse.lab.experiments.contrastive.encoder_plots import (
    ACCURACY,
    Correlation,
    comparable_groups,
    correlate_with_accuracy,
    information_in_training,
)

pytest.importorskip("scipy")


def encoder(near: float, spread: float, information: float, accuracy: float, **settings: Any) -> dict[str, Any]:
    figures = {"alignment": near, "uniformity": spread, "information": information, ACCURACY: accuracy}
    return {
        "config": {"data": "a", "epochs": 2, "contrast": 1.0, "align": 1.0, "seed": 0} | settings,
        "figures": figures,
    }


def made(count: int = 12) -> list[dict[str, Any]]:
    draw = numpy.random.default_rng(0).uniform(size=(count, 3))
    return [encoder(a, -u, i, 0.5 - 0.2 * a + 0.1 * u, seed=at) for at, (a, u, i) in enumerate(draw)]


def test_what_was_put_in_is_found() -> None:
    found = {one.name: one for one in correlate_with_accuracy(made())}
    weighed = found["both, weighted"]
    assert (weighed.spearman, weighed.r_squared) == pytest.approx((1.0, 1.0))
    assert all(weighed.r_squared > one.r_squared for one in found.values() if one is not weighed)
    assert found["alignment + uniformity"].spearman < -0.5
    assert -1 <= found["InfoMax: log(M + 1) − loss"].spearman <= 1


def test_ranks_are_spearmans() -> None:
    records = [encoder(a, 0.5 * a * a, a, accuracy) for a, accuracy in ((1.0, 0.9), (2.0, 0.5), (3.0, 0.6), (4.0, 0.1))]
    # places 4, 2, 3, 1 against 1, 2, 3, 4: 1 − 6·Σd²/(n(n² − 1)) = 1 − 6·18/60
    assert [one.spearman for one in correlate_with_accuracy(records)] == pytest.approx([-0.8] * 3 + [0.8, -0.8])


def test_equal_accuracies_explain_nothing() -> None:
    records = [encoder(a, -a, a, 0.5) for a in (1.0, 2.0, 3.0)]
    assert all(abs(one.r_squared) < 1e-12 and one.spearman == 0 for one in correlate_with_accuracy(records))


def test_encoders_that_differ_in_more_are_kept_apart() -> None:
    records = [*made(4), encoder(1, -1, 1, 0.5, epochs=3), encoder(1, -1, 1, 0.5, contrast=0.5, dim=8)]
    lacking = encoder(1, -1, 1, 0.5)
    del lacking["figures"]["information"]
    assert [len(group) for group in comparable_groups([*records, lacking])] == [5, 1]


def test_infonce_is_read_by_its_own_loss_too() -> None:
    settings = {"temperature": 0.5, "negatives": "cross", "align": 0.0, "uniform": 0.0, "batch": 256}
    records = [encoder(a, -a, a, a, **settings) | {"epochs": [{"loss": 5 - a}]} for a in (0.1, 0.3, 0.2)]
    assert information_in_training(records[0]) == pytest.approx(math.log(256) - 4.9)
    halved = encoder(1, -1, 1, 1, **settings | {"contrast": 0.5, "negatives": "both"}) | {"epochs": [{"loss": 2.0}]}
    assert information_in_training(halved) == pytest.approx(math.log(511) - 4.0)
    assert correlate_with_accuracy(records)[-1] == Correlation(
        "InfoMax, from the training loss", 1.0, pytest.approx(1.0)
    )
    mixed = encoder(1, -1, 1, 1, **settings | {"align": 1.0}) | {"epochs": [{"loss": 2.0}]}
    assert information_in_training(mixed) is None
    assert len(correlate_with_accuracy([*records, mixed])) == 5
