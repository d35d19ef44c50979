"""What explains how good encoders are."""

import json
import math
from typing import Any

import numpy
import pytest

from uncollapse.lab.experiments.contrastive.predictors import (
    ACCURACY,
    Correlation,
    comparable_groups,
    correlate_with_accuracy,
    correlation_record,
    information_in_training,
    partial_correlations,
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


def ranks(values: list[float]) -> list[float]:
    """Mean ranks, counted by hand."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def residuals(y: list[float], z: list[float]) -> list[float]:
    """What a line through z leaves of y."""
    mean_y, mean_z = sum(y) / len(y), sum(z) / len(z)
    slope = sum((a - mean_y) * (b - mean_z) for a, b in zip(y, z, strict=True)) / sum((b - mean_z) ** 2 for b in z)
    return [a - mean_y - slope * (b - mean_z) for a, b in zip(y, z, strict=True)]


def naive_partial(y: list[float], x: list[float], z: list[float]) -> float:
    """Correlation of the residuals of ranks: the definition of a partial correlation."""
    a, b = residuals(ranks(x), ranks(z)), residuals(ranks(y), ranks(z))
    return sum(i * j for i, j in zip(a, b, strict=True)) / math.sqrt(sum(i * i for i in a) * sum(j * j for j in b))


@pytest.mark.parametrize("ties", [False, True])
def test_partial_correlations_are_those_of_residuals(ties: bool) -> None:
    draw = numpy.random.default_rng(3).normal(size=(15, 3))
    rows = draw.round(0) if ties else draw
    records = [encoder(a, u, 0.0, 0.3 * a - u + noise) for a, u, noise in rows]
    align, spread, accuracy = (
        [record["figures"][name] for record in records] for name in ("alignment", "uniformity", ACCURACY)
    )
    first, second = partial_correlations(records)
    assert (first.name, second.name) == ("alignment given uniformity", "uniformity given alignment")
    assert first.value == pytest.approx(naive_partial(accuracy, align, spread), abs=1e-12)
    assert second.value == pytest.approx(naive_partial(accuracy, spread, align), abs=1e-12)


def test_intervals_are_percentiles_of_a_loop_over_resamples() -> None:
    draw = numpy.random.default_rng(5).normal(size=(12, 3))
    columns = {"alignment": draw[:, 0], "uniformity": draw[:, 1], ACCURACY: draw[:, 0] - draw[:, 1] + 0.5 * draw[:, 2]}
    records = [encoder(a, u, 0.0, acc) for a, u, acc in zip(*columns.values(), strict=True)]
    values = []
    for places in numpy.random.default_rng(0).integers(0, 12, (4000, 12)):
        y, x, z = (columns[name][places].tolist() for name in (ACCURACY, "alignment", "uniformity"))
        values.append(naive_partial(y, x, z))
    found = partial_correlations(records)[0]
    assert (found.low, found.high) == pytest.approx(tuple(numpy.quantile(values, (0.025, 0.975))), abs=1e-9)
    assert found.low < found.value < found.high
    assert found == partial_correlations(records)[0]


def test_partial_correlations_that_are_not_defined_are_left_out() -> None:
    assert partial_correlations(made(4)) == []
    assert partial_correlations([encoder(a, -a, a, a * a) for a in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]) == []
    assert partial_correlations([encoder(a, a % 3, a, 0.5) for a in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]) == []


def test_the_json_of_a_table_has_both_kinds_of_correlations() -> None:
    found = json.loads(json.dumps(correlation_record([*made(), encoder(1, -1, 1, 0.5, epochs=3)]), allow_nan=False))
    (group,) = found["groups"]  # of a single encoder there is none
    assert (group["data"], group["encoders"]) == ("a", 12)
    assert [one["name"] for one in group["correlations"]] == [one.name for one in correlate_with_accuracy(made())]
    assert [one["value"] for one in group["partial_correlations"]] == [
        one.value for one in partial_correlations(made())
    ]
