"""Potentials of point sets: known values, both estimators, and what the record has for pictures."""

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch

from uncollapse.lab.config.fields import build
from uncollapse.lab.experiments.sphere import potentials
from uncollapse.lab.experiments.sphere.potentials import Config
from uncollapse.metrics.hypersphere import uniformity, uniformity_optimum

TINY = Config(points=600, free=9, steps=30, draws=300, largest=64)


@pytest.fixture(scope="module")
def circle() -> dict[str, Any]:
    return potentials.RECIPE.run(TINY)


@pytest.mark.parametrize(
    ("n", "without", "with_self"),
    [
        (2, 0.00034, 0.50017),
        (3, 0.00248, 0.33499),
        (4, 0.01232, 0.25924),
        (8, 0.09413, 0.20736),
        (16, 0.15414, 0.20700),
        (100, 0.19899, 0.20700),
    ],
)
def test_polygons_have_the_known_potential(n: int, without: float, with_self: float) -> None:
    found = potentials.measure_potential(potentials.polygon(n), 2.0)
    assert found["potential"] == pytest.approx(without, abs=1e-5)
    assert found["potential_self"] == pytest.approx(with_self, abs=1e-5)
    assert found["log"] == pytest.approx(math.log(found["potential"]), abs=1e-5)
    assert found["log_self"] == pytest.approx(math.log(found["potential_self"]), abs=1e-5)


def test_with_self_is_what_the_metric_has_with_self_pairs() -> None:
    points = torch.stack([potentials.uniform_points(7, 3, torch.Generator().manual_seed(seed)) for seed in range(5)])
    found = potentials.with_self(uniformity(points), 7)
    torch.testing.assert_close(found, uniformity(points, exclude_self=False))
    torch.testing.assert_close(((7 * found.exp() - 1) / 6).log(), uniformity(points))  # as the other is got from it


def test_sets_come_in_the_order_of_their_potential(circle: dict[str, Any]) -> None:
    figures = circle["figures"]
    assert figures["optimum"] == pytest.approx(uniformity_optimum(2, 2.0), abs=1e-5)
    assert figures["optimised"] < figures["optimum"]  # a finite set without self pairs may lie below
    assert figures["uniform"] == pytest.approx(figures["optimum"], abs=0.02)
    assert figures["uniform"] < figures["clusters"] < figures["half"] < figures["cluster"] < 0
    assert figures["optimised"] == pytest.approx(figures["regular"], abs=1e-4)
    for name, facts in circle["sets"].items():
        assert facts["log"] == figures[name]
        assert facts["log_self"] >= figures["optimum"] - 1e-5


def test_what_is_kept_for_pictures(circle: dict[str, Any]) -> None:
    sets = circle["sets"]
    assert {name: facts["n"] for name, facts in sets.items()} == {
        "uniform": 600, "half": 600, "clusters": 600, "cluster": 600, "optimised": 9, "regular": 9
    }  # fmt: skip
    for facts in sets.values():
        points = torch.tensor(facts["points"])
        assert len(points) == (500 if facts["n"] == 600 else 9)
        torch.testing.assert_close(points.norm(dim=-1), torch.ones(len(points)), atol=2e-4, rtol=0)
        assert sum(facts["angles"]) == facts["n"]
    assert sum(sets["half"]["angles"][:36]) == 0  # below the axis
    assert len(json.dumps(circle)) < 60_000


def test_all_clusters_are_among_the_points_for_pictures() -> None:
    corners = potentials.simplex(4, 3)
    points = potentials.clustered_points(10_000, corners, torch.Generator().manual_seed(0), spread=0.01)
    kept = torch.tensor(potentials.describe_set(points, 2.0)["points"]).double()
    counts = (kept @ corners.T).argmax(1).bincount()
    assert counts.min() > 100
    assert counts.sum() == potentials.SHOWN


def test_few_points_beside_the_regular_set(circle: dict[str, Any]) -> None:
    few = {row["n"]: row for row in circle["few"]}
    assert tuple(few) == potentials.COUNTS
    for n, row in few.items():
        assert row["regular"] == potentials.measure_potential(potentials.polygon(n), 2.0)
        assert row["optimised"]["log"] >= row["regular"]["log"] - 1e-5  # the polygon is the best there is
        assert row["optimised"]["log"] == pytest.approx(row["regular"]["log"], abs=1e-3)


def test_the_bias_of_both_estimators(circle: dict[str, Any]) -> None:
    rows, optimum = circle["estimators"], uniformity_optimum(2, 2.0)
    assert [row["n"] for row in rows] == [2, 4, 8, 16, 32, 64]
    assert {row["draws"] for row in rows} == {300}
    assert rows[0]["without"]["mean"] == pytest.approx(-4, abs=0.5)  # −t·E‖u − v‖² = −2t
    for row in rows:
        without, with_self = row["without"], row["with"]
        assert with_self["least"] > optimum
        assert without["least"] >= -8 - 1e-6
        assert with_self["mean"] > without["mean"]
        # e^{L⁽²⁾} is unbiased, so that its logarithm is too low on average, and e^{L⁽¹⁾} is too high by (1 − G)/n
        assert without["mean"] < optimum + 4 * without["std"] / math.sqrt(300)
        expected = math.log(math.exp(optimum) + (1 - math.exp(optimum)) / row["n"])
        assert with_self["mean"] == pytest.approx(expected, abs=0.03 + 0.15 / row["n"])
    assert min(row["without"]["least"] for row in rows) < optimum - 1


def test_large_samples_are_drawn_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(potentials, "PAIRS", 1024)
    monkeypatch.setattr(potentials, "BATCH", 100)
    rows = list(potentials.measure_estimators(TINY, torch.Generator().manual_seed(0)))
    assert {row["n"]: row["draws"] for row in rows} == {2: 256, 4: 64, 8: 16, 16: 4, 32: 2, 64: 2}


def test_a_space_without_regular_sets() -> None:
    found = potentials.RECIPE.run(Config(dim=5, points=50, free=30, steps=5, draws=4, largest=4))
    assert "regular" not in found["sets"]
    assert [row["n"] for row in found["few"] if "regular" in row] == [2, 3, 4, 6]
    assert "angles" not in found["sets"]["uniform"]


def test_the_seed_decides_and_the_random_state_stays(circle: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    small = Config(points=20, free=4, steps=3, draws=3, largest=4)
    one, two, other = (potentials.RECIPE.run(build(Config, {**asdict(small), "seed": seed})) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert one["sets"] == two["sets"]
    assert one["estimators"] == two["estimators"]
    assert one["sets"]["uniform"] != other["sets"]["uniform"]


def test_the_record_says_how_to_repeat_it(circle: dict[str, Any]) -> None:
    assert json.loads(json.dumps(circle)) == circle
    assert Config(**circle["config"]) == TINY
    assert Config(largest=5000) == Config(largest=4096)  # powers of two are drawn
    assert potentials.name_of(TINY) == "m2-t2-seed0"


def test_grids_boards_and_quick() -> None:
    trials = [trial for grid in potentials.RECIPE.grids["all"] for cell in grid.cells(Config) for trial in cell.trials]
    assert [(trial.dim, trial.t) for trial in trials] == [(2, 2.0), (3, 2.0)]
    quick = build(Config, potentials.RECIPE.quick)
    assert potentials.cost(quick) < potentials.cost(Config()) / 3
    names = set(potentials.make_sets(TINY, torch.Generator().manual_seed(0))) | {"optimum"}
    assert {table.metric for table in potentials.RECIPE.tables.values()} <= names
