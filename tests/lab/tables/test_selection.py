"""Which values win, and which results are alike."""

import math
from typing import Any

import pytest
from tests.lab.made_up import result

from uncollapse.errors import UsageError
from uncollapse.lab.tables.selection import common_settings, field_of, main_settings, metric_of, select_best


def of(*scores: float | None) -> dict[int, dict[str, Any]]:
    """Results of the seeds 0, 1, …"""
    return {seed: result(None, validation=score, seed=seed) for seed, score in enumerate(scores)}


@pytest.mark.parametrize(
    ("runs", "best"),
    [
        ({(0.1,): of(0.5), (0.2,): of(0.7), (0.3,): of(0.6)}, (0.2,)),
        ({(0.2,): of(0.7), (0.1,): of(0.7)}, (0.1,)),  # of equals, the smaller
        ({("b",): of(0.7), (9.0,): of(0.7), ("a",): of(0.7)}, (9.0,)),  # numbers before words
        ({(0.1,): of(None), (0.2,): of(-3.0), (0.3,): of(-2.0)}, (0.3,)),  # not finite is worse than any number
        ({(0.1,): of(math.nan), (0.2,): of(-3.0)}, (0.2,)),
        ({(0.1,): of(0.9, None), (0.2,): of(0.2, 0.3)}, (0.2,)),  # one seed that failed makes its values the worst
        ({(0.1,): of(0.5, 0.5), (0.2,): of(0.4, 0.4, 0.99)}, (0.1,)),  # only seeds that all were run with count
    ],
)
def test_the_best_on_validation(runs: Any, best: tuple[Any, ...]) -> None:
    assert select_best(runs, "validation") == best


def test_results_that_were_run_alike() -> None:
    """The most usual settings count, then the most runs; never the metric."""
    usual = [result(0.1, seed=seed) for seed in range(2)]
    others = [result(0.9, seed=seed, epochs=300) for seed in range(3)]
    known = usual[0]["config"] | {"widths": (32,)}
    assert main_settings([*others, *usual], {"seed"}, known) == ({}, usual)
    more = [result(0.9, seed=seed, epochs=400) for seed in range(2)]
    assert main_settings([*more, *others], {"seed"}, known) == ({"epochs": 300}, others)


def test_of_equally_common_settings_those_of_the_protocol() -> None:
    cells = [[result(0.1, epochs=epochs, clip=clip) for epochs in (100, 200, 300)] for clip in (None, None, 1.0)]
    assert common_settings(cells, ())["epochs"] == 100
    found = common_settings(cells, (), {"epochs": 200, "clip": 1.0})
    assert (found["epochs"], found["clip"]) == (200, None)  # which is the more common


def test_metrics_and_fields_of_a_result() -> None:
    record = result(math.inf, validation=0.25, norm="contra", scale=0.0, widths=(8, 4))
    assert metric_of(record, "validation") == 0.25
    assert metric_of(record, "test") is metric_of(record, "nothing") is None
    assert field_of(record, "widths") == (8, 4)
    assert field_of(record, "norm+scale+layers") == "contra, layers 2"
    with pytest.raises(UsageError, match="'depth'"):
        field_of(record, "depth")
