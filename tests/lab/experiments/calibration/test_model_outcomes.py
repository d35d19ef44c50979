"""What a verdict was worth: cases from stored runs, hit rates, bounds fitted without the data they decide about."""

import json
from pathlib import Path
from typing import Any

import pytest

from uncollapse.lab.experiments.calibration import model_outcomes as outcomes
from uncollapse.lab.experiments.calibration.analysis import Rate, leave_one_out
from uncollapse.lab.experiments.calibration.model_outcomes import ModelCase

SCORES = (("none", 0.4), ("pair_norm", 0.6))


def record(norm: str, seed: int, test: float, validation: float = 0.5, **more: Any) -> dict[str, Any]:
    config = {"data": "cora", "layers": 8, "norm": norm, "residual": 0, "drop_edge": 0.0, "uniform": 0.0, "scale": 1.0}
    verdict = more.pop("verdict", "complete")
    layers = [{"name": f"block {i}", "robust_cosine": i / 10, "rank_share": 0.5} for i in range(8)]
    return {
        "recipe": "gcn-depth",
        "config": config | {"seed": seed} | more,
        "figures": {"test": test, "validation": validation},
        "diagnosis": {"before": {"verdict": "none"}, "after": {"verdict": verdict, "layers": layers}},
    }


def test_a_case_pairs_each_seed_with_the_cure_that_validation_chose() -> None:
    records = [record("none", seed, 0.4) for seed in range(3)]
    records += [record("pair_norm", seed, 0.6 + seed / 100, 0.7) for seed in range(3)]
    records += [record("layer_norm", seed, 0.9, 0.6) for seed in range(3)]  # better, but validation does not know
    records += [record("contra_norm", 0, 0.95, 0.9, scale=0.2)]  # a trial that was not chosen: fewer seeds
    found = outcomes.model_cases(records)
    assert [(case.seed, case.cure, round(case.gain, 2)) for case in found] == [
        (0, "pair_norm", 0.2),
        (1, "pair_norm", 0.21),
        (2, "pair_norm", 0.22),
    ]
    assert found[0].verdict == "complete"
    assert found[0].untrained == "none"
    assert found[0].cosine == 0.6  # before the logits


def test_other_data_and_other_settings_are_not_compared() -> None:
    others = [record("pair_norm", 0, 0.9, data="citeseer"), record("pair_norm", 0, 0.9, lr=1.0)]
    assert outcomes.model_cases([record("none", 0, 0.4), *others]) == []


def test_the_fresh_seeds_of_the_arena_count_and_its_rivals_do_not() -> None:
    def run(cure: str, seed: int, test: float, **more: Any) -> dict[str, Any]:
        made = record("none", seed, test)
        config = {"task": "gcn", "data": "cora", "depth": 16, "cure": cure, "scale": 1.0, "lr": 0.1, "seed": seed}
        return made | {"recipe": "arena", "config": config | {"blocks": 0, "longer": 1.0} | more}

    records = [run("none", seed, 0.3) for seed in (0, 1)] + [run("residual", seed, 0.7, lr=0.2) for seed in (0, 1)]
    records += [run("none", seed, 0.99, blocks=4) for seed in (0, 1)]
    found = outcomes.model_cases(records)
    assert [(case.seed, case.cure, round(case.gain, 2), case.depth) for case in found] == [(1, "residual", 0.4, 16)]


def test_the_verdict_after_a_tenth_counts_where_it_was_measured() -> None:
    records = [record(norm, seed, score) | {"file": f"{norm}{seed}"} for norm, score in SCORES for seed in (0, 1)]
    found = outcomes.model_cases(records, {"none1": "complete"})
    assert [case.early for case in found] == [None, "complete"]
    assert outcomes.hit_rates(found)["the verdict after a tenth of the training"] == Rate(1, 1, 0, 0)


def made(gain: float, cosine: float, share: float = 0.5, data: str = "a", verdict: str = "none") -> ModelCase:
    return ModelCase("graph networks", data, 8, 0, verdict, "none", cosine, share, "residual", gain)


def test_rates_count_only_clear_cases() -> None:
    found = [made(0.1, 0.99, verdict="complete"), made(0.01, 0.99, verdict="complete"), made(-0.1, 0.2), made(0.1, 0.2)]
    rates = outcomes.hit_rates(found)
    assert rates["the verdict after training"] == Rate(2, 3, 0, 1)
    assert rates["always act"] == Rate(2, 3, 1, 0)
    assert rates["never act"] == Rate(1, 3, 0, 2)


def test_bounds_are_fitted_without_the_data_set_that_they_decide_about() -> None:
    low = [made(0.1, 0.72), made(0.1, 0.75), made(-0.1, 0.6)]  # here acting helps from 0.7 on
    high = [made(-0.1, 0.75, data="b"), made(0.1, 0.96, data="b")]  # here only from 0.95 on
    assert outcomes.fit_bounds(low)[0] == 0.7
    assert outcomes.fit_bounds(high)[0] in (0.8, 0.85, 0.9, 0.95)
    assert leave_one_out([*low, *high], lambda case: case.data, outcomes.fit_rule) == Rate(2, 5, 1, 2)


def test_a_folder_is_read_and_summarized_by_verdict(tmp_path: Path) -> None:
    folder = tmp_path / "gcn-depth"
    folder.mkdir()
    for number, one in enumerate([record("none", 0, 0.4), record("pair_norm", 0, 0.6)]):
        (folder / f"{number}.json").write_text(json.dumps(one))
    found = outcomes.summarize(outcomes.read(tmp_path))
    expected = {"cases": 1, "sources": 1, "helped": 1, "hurt": 0, "median": pytest.approx(20.0)}
    assert found == {"graph networks": {"complete": expected}}
