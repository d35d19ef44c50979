"""The limit of InfoNCE on encoders: which settings count, what is trained, and the record."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import build, command_line, identity
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.sphere import asymptotics
from uncollapse.lab.experiments.sphere.asymptotics import ENCODERS, TRAINED, Config
from uncollapse.lab.tables.paper_table import build_cells
from uncollapse.metrics.hypersphere import uniformity_optimum

SPHERE = Config(dim=3, anchors=20, draws=4, largest=1024, fit_from=64)
DIGITS: dict[str, Any] = {"data": "digits", "width": 0.02, "dim": 4, "side": 16, "epochs": 1, "batch": 300}
MEASURED: dict[str, Any] = {"anchors": 20, "draws": 4, "largest": 256, "fit_from": 16}


@pytest.fixture(scope="module")
def sphere() -> dict[str, Any]:
    return asymptotics.RECIPE.run(SPHERE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("run")
    runtime = Runtime(checkpoints=folder / "checkpoints", save_seconds=0.0)
    found = asymptotics.RECIPE.run(Config(encoder="align+uniform", **DIGITS, **MEASURED), runtime)
    return found | {"left": list(folder.rglob("step-*"))}


def test_points_on_the_sphere_have_both_rates(sphere: dict[str, Any]) -> None:
    figures = sphere["figures"]
    assert figures["limit"] == pytest.approx(uniformity_optimum(3, 1.0), abs=1e-5)
    assert figures["bias_slope"] == pytest.approx(-1, abs=0.05)
    assert figures["fluctuation_slope"] == pytest.approx(-0.5, abs=0.05)
    assert figures["bias_times_negatives"] == pytest.approx(figures["bias_constant"], rel=0.05)
    assert sphere["terms"] == sphere["references"]["uniform"]
    assert [row["negatives"] for row in sphere["curve"]] == [2**power for power in range(11)]
    for row in sphere["curve"]:
        assert row["value"] == pytest.approx(figures["limit"] + row["bias"], abs=1e-4)
    for name in ("bias", "fluctuation"):
        found = sphere["slopes"][name]
        assert found["low"] < found["value"] == figures[f"{name}_slope"] < found["high"]


def test_references_are_the_two_ends() -> None:
    found = asymptotics.references(8, 0.5)
    assert found["collapsed"] == {"alignment": -2.0, "uniformity": 2.0, "limit": 0.0}
    assert found["uniform"]["alignment"] == -2.0
    assert found["uniform"]["limit"] == pytest.approx(-1.7559, abs=1e-4)


def test_a_cold_temperature_is_far_from_its_limit() -> None:
    found = asymptotics.RECIPE.run(replace(SPHERE, dim=128, temperature=0.05, anchors=4))
    assert found["constants"]["positive"] > 1e6  # the positive outweighs all negatives that there are
    assert found["figures"]["bias_slope"] > -0.3


def test_an_encoder_at_its_start() -> None:
    pytest.importorskip("sklearn")
    found = asymptotics.RECIPE.run(Config(encoder="random", **DIGITS, **MEASURED))
    assert found["data"]["validation"] == 150
    assert "trained" not in found
    assert found["terms"]["limit"] > found["references"]["uniform"]["limit"]
    assert found["figures"]["bias_slope"] == pytest.approx(-1, abs=0.1)


def test_a_trained_encoder(trained: dict[str, Any]) -> None:
    told = trained["trained"]
    assert told["config"]["contrast"] == 0
    assert (told["config"]["align"], told["config"]["uniform"]) == (1.0, 1.0)
    assert told["config"]["epochs"] == 1
    assert {"alignment", "uniformity"} <= told["figures"].keys()
    # ‖x − y‖² = 2 − 2x·y: the first term is the alignment that its training found
    assert trained["terms"]["alignment"] == pytest.approx(told["figures"]["alignment"] - 2, abs=1e-3)
    assert trained["figures"]["fluctuation_slope"] == pytest.approx(-0.5, abs=0.1)
    assert trained["left"] == []  # no checkpoint of the training stays


def test_the_record_is_json_and_says_how_to_repeat_it(sphere: dict[str, Any], trained: dict[str, Any]) -> None:
    for found in (sphere, {name: value for name, value in trained.items() if name != "left"}):
        told = json.loads(json.dumps(found))
        assert build(Config, told["config"]) == Config(**found["config"])
        assert (told["recipe"], told["seed"]) == ("asymptotics", 0)


@pytest.mark.parametrize("encoder", TRAINED)
def test_what_an_encoder_is_trained_for(encoder: str) -> None:
    config = Config(encoder=encoder, temperature=0.2, dim=16, epochs=3, seed=4)
    found = asymptotics.trained_config(config)
    weights = {name: getattr(found, name) for name in ("contrast", "align", "uniform")}
    assert {name for name, weight in weights.items() if weight} == set(encoder.split("+"))
    assert set(weights.values()) <= {0.0, 1.0}
    assert found.temperature == (0.2 if encoder == "contrast" else 0.5)  # elsewhere it does nothing
    assert (found.dim, found.epochs, found.seed) == (16, 3, 4)


def test_settings_that_do_nothing_make_no_other_run() -> None:
    plain = Config(encoder="sphere", dim=8, seed=1)
    assert Config(encoder="sphere", dim=8, seed=1, data="cifar10", epochs=3, width=0.1) == plain
    random = Config(encoder="random", data="cifar10", width=0.1)
    assert Config(encoder="random", data="cifar10", width=0.1, epochs=3, lr=1.0, batch=9) == random
    assert identity("asymptotics", Config(encoder="random", data="digits")) != identity("asymptotics", random)
    assert Config(largest=70_000, fit_from=600) == Config(largest=65_536, fit_from=1024)  # powers of two are measured
    assert command_line("asymptotics", plain) == "uncollapse train asymptotics --dim 8 --seed 1"


def test_too_few_negatives_for_a_slope() -> None:
    with pytest.raises(UsageError, match="4096"):
        Config(largest=2048)
    with pytest.raises(UsageError, match="encoder"):
        build(Config, {"encoder": "supervised"})


def test_the_sphere_needs_no_data() -> None:
    assert asymptotics.RECIPE.same_data(SPHERE, Runtime(data_root=Path("nowhere")), {})
    assert asymptotics.RECIPE.same_data(
        Config(encoder="random", data="nowhere"), Runtime(data_root=Path("nowhere")), {"data": {"fingerprint": "a"}}
    )


def test_rows_of_the_boards() -> None:
    grid = [trial for grid in asymptotics.RECIPE.grids["all"] for cell in grid.cells(Config) for trial in cell.trials]
    assert {trial.encoder for trial in grid} == set(ENCODERS)
    assert len(grid) == 12
    assert {asymptotics.row_of(asdict(trial)) for trial in grid} == set(ENCODERS)
    other = Config(encoder="random", data="digits", **{k: v for k, v in asymptotics.SMALL.items() if k != "data"})
    assert asymptotics.row_of(json.loads(json.dumps(asdict(other)))) == "random, data digits"
    records = [
        {"config": json.loads(json.dumps(asdict(trial))), "seed": 0, "figures": {"bias_slope": -1.0}} for trial in grid
    ]
    made = build_cells(asymptotics.RECIPE.tables["bias"], records)
    assert sum(cell.run for cell in made) == 12
    assert not any(cell.unusual or cell.left_out for cell in made)


def test_names_costs_and_quick() -> None:
    quick = build(Config, asymptotics.RECIPE.quick)
    assert quick.data == "digits"
    assert asymptotics.name_of(Config()) == "sphere-tau0.5-d128-seed0"
    assert asymptotics.name_of(quick) == "digits-contrast-tau0.5-d32-seed0"
    assert asymptotics.cost(quick) > asymptotics.cost(replace(quick, encoder="random"))


def test_the_random_state_stays(sphere: dict[str, Any]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    again = asymptotics.RECIPE.run(SPHERE)
    assert torch.equal(torch.get_rng_state(), before)
    assert again["curve"] == sphere["curve"]
    assert asymptotics.RECIPE.run(replace(SPHERE, seed=1))["curve"] != sphere["curve"]
