"""Standings of the arena: gains by seed, at equal time, what is missing, and the gains that advice is taken from."""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import t as student

from uncollapse.diagnosis.reference_data import GAINS_FILE, Measured, find_measured
from uncollapse.lab.experiments.arena.config import Config, group_of, row_of
from uncollapse.lab.experiments.arena.pages import draw_plots, missing_table, unfinished_rows
from uncollapse.lab.experiments.arena.recipe import RECIPE, TABLE, collect_gains
from uncollapse.lab.experiments.arena.standings import Standing, build_standings, measured_gains
from uncollapse.lab.runs.results import Results
from uncollapse.lab.tables.markdown import to_markdown
from uncollapse.lab.tables.paper_table import build_cells
from uncollapse.lab.tables.table_page import render_page

ROOT = Path(__file__).parents[4]
SCORES = {"none": 0.3, "residual": 0.6, "shallower": 0.8, "more epochs": 0.4, "contra_norm": 0.5}
ROWS: dict[str, dict[str, Any]] = {
    "none": {},
    "residual": {"cure": "residual"},
    "shallower": {"blocks": 2},
    "more epochs": {"longer": 3.0},
    "contra_norm": {"cure": "contra_norm", "scale": 0.5},
}


def record(seed: int, row: str, *, lr: float = 0.01, seconds: float = 10.0, **settings: Any) -> dict[str, Any]:
    config = Config(**ROWS[row] | {"seed": seed, "lr": lr} | settings)
    score = SCORES[row] + 0.01 * math.sin(7 * seed + len(row))
    layers = [{"name": f"block {i}", "effective_rank": 10.0 - i} for i in range(3)]
    return {
        "recipe": "arena",
        "seed": seed,
        "date": "2026-11-18T00:00:00+00:00",
        "config": vars(config),
        "figures": {"validation": score - abs(math.log(lr / 0.01)) / 10, "test": score},
        "diagnosis": {when: {"verdict": "complete", "layers": layers} for when in ("before", "after")},
        "cost": {"processor_seconds": seconds, "saved_megabytes": 1.0},
    }


def sweep(row: str, seeds: int = 6, **settings: Any) -> Iterator[dict[str, Any]]:
    """Yield two trials with seed 0 and the better one with fresh seeds."""
    for lr in (0.01, 0.05):
        yield record(0, row, lr=lr, **settings)
    for seed in range(1, seeds + 1):
        yield record(seed, row, **settings)


@pytest.fixture
def records() -> list[dict[str, Any]]:
    seconds = {"more epochs": 30.0, "contra_norm": 20.0}
    return [each for row in SCORES for each in sweep(row, seconds=seconds.get(row, 10.0))]


def by_row(records: list[dict[str, Any]]) -> dict[str, Standing]:
    return {each.row: each for each in build_standings(TABLE, records)}


def test_runs_with_other_settings_do_not_enter_the_time(records: list[dict[str, Any]]) -> None:
    others = list(sweep("more epochs", seeds=5, longer=8.0, seconds=80.0))  # fewer runs than the usual ones
    with_others, alone = by_row(records + others), by_row(records)
    assert with_others["more epochs"] == alone["more epochs"]
    assert with_others["contra_norm"].gain_in_time == alone["contra_norm"].gain_in_time


def test_gains_are_over_fresh_seeds_at_equal_steps_and_at_equal_time(records: list[dict[str, Any]]) -> None:
    found = by_row(records)
    tests = {(row_of(r["config"]), r["seed"]): 100 * r["figures"]["test"] for r in records}
    gain = [tests["contra_norm", seed] - tests["none", seed] for seed in range(1, 7)]
    assert found["contra_norm"].gain is not None
    assert found["contra_norm"].gain.paired.mean == pytest.approx(statistics.fmean(gain))
    half = [(tests["none", seed] + tests["more epochs", seed]) / 2 for seed in range(1, 7)]  # 20 is between 10 and 30
    in_time = [tests["contra_norm", seed] - half[seed - 1] for seed in range(1, 7)]
    assert found["contra_norm"].gain_in_time is not None
    assert found["contra_norm"].gain_in_time.mean == pytest.approx(statistics.fmean(in_time))
    assert found["none"].gain is found["none"].gain_in_time is None
    assert found["residual"].gain_in_time is not None
    assert found["residual"].gain is not None
    assert found["residual"].gain_in_time.mean == pytest.approx(found["residual"].gain.paired.mean)  # no slower
    assert found["shallower"].ranks == (9.0, 9.0)  # of what enters the last convolution
    assert list(found["none"].rates) == [0.01, 0.05]


def test_without_longer_runs_there_is_no_gain_at_equal_time(records: list[dict[str, Any]]) -> None:
    left = [r for r in records if r["config"]["longer"] == 1]
    assert all(each.gain_in_time is None for each in build_standings(TABLE, left))
    assert all(each.gain is None for each in build_standings(TABLE, [r for r in left if row_of(r["config"]) != "none"]))


def test_seconds_of_different_processors_are_not_compared(records: list[dict[str, Any]]) -> None:
    moved = [r | {"processor": "another"} if r["config"]["cure"] == "contra_norm" else r for r in records]
    found = by_row(moved)
    assert found["contra_norm"].gain is not None
    assert found["contra_norm"].gain_in_time is None
    assert found["residual"].gain_in_time is not None
    assert by_row([r | {"processor": "another"} for r in records])["contra_norm"].gain_in_time is not None


def test_a_row_that_takes_longer_than_the_longest_plain_training_says_so(records: list[dict[str, Any]]) -> None:
    slow = [
        r | {"cost": r["cost"] | {"processor_seconds": 90.0}} if r["config"]["scale"] == 0.5 else r for r in records
    ]
    assert RECIPE.details is not None
    costs = RECIPE.details(slow, slow)[0]
    column = costs.head.index("plain s")
    shown = {row[2].partition(" (")[0]: row[column] for row in costs.rows}
    assert shown["contra_norm"] == "30.0"
    assert shown["residual"] == shown["more epochs"] == ""
    assert by_row(records)["contra_norm"].plain_seconds is None


def test_a_choice_at_an_end_of_what_was_tried_is_marked(records: list[dict[str, Any]]) -> None:
    assert by_row(records)["residual"].choice == "lr 0.01 (lowest)"
    beyond = record(0, "residual", lr=0.002)
    assert by_row([*records, beyond])["residual"].choice == "lr 0.01"
    assert by_row([*records, beyond])["residual"].trials == 3


def test_trials_alone_are_no_result(records: list[dict[str, Any]]) -> None:
    for trials in ([record(0, "none")], [record(0, "none"), record(0, "none", lr=0.05)]):
        assert build_standings(TABLE, trials) == []
        (cell,) = build_cells(TABLE, trials)
        assert (cell.run, cell.mean, cell.trials) == (False, None, len(trials))
        assert f"only trials so far ({len(trials)})" in to_markdown(TABLE, trials)


def test_rows_that_lack_runs_are_labelled_and_give_no_advice() -> None:
    grids = {"csbm": RECIPE.grids["csbm"]}
    done = [
        record(config["seed"], row_of(config), **{k: v for k, v in config.items() if k != "seed"})
        for grid in grids["csbm"]
        for cell in grid.cells(Config)
        if row_of(vars(cell.trials[0])) in ROWS
        for config in map(vars, cell.trials)
    ]
    best = {
        row: max((r for r in done if row_of(r["config"]) == row), key=lambda r: r["figures"]["validation"])
        for row in ROWS
    }
    seeds = [
        record(seed, row, **{k: v for k, v in of["config"].items() if k != "seed"})
        for row, of in best.items()
        for seed in range(1, 7)
    ]
    (entry,) = measured_gains(TABLE, [*done, *seeds], unfinished_rows(grids, [*done, *seeds]))["measured"]
    assert len(entry["gains"]) == 4
    cut = [r for r in done if (row_of(r["config"]), r["config"]["lr"]) != ("residual", 0.05)]
    (entry,) = measured_gains(TABLE, [*cut, *seeds], unfinished_rows(grids, [*cut, *seeds]))["measured"]
    assert "residual" not in [gain["row"] for gain in entry["gains"]]
    labels = [each.label for each in build_standings(TABLE, [*cut, *seeds], unfinished_rows(grids, [*cut, *seeds]))]
    assert "residual (8 of 9 trials)" in labels
    assert "none" in labels


def test_seeds_that_did_not_stay_finite_are_counted_and_give_no_advice(records: list[dict[str, Any]]) -> None:
    lost = [r | {"figures": {}} if (r["seed"], row_of(r["config"])) == (3, "residual") else r for r in records]
    assert by_row(lost)["residual"].failed == (3,)
    (entry,) = measured_gains(TABLE, lost)["measured"]
    assert "residual" not in [gain["row"] for gain in entry["gains"]]
    assert "| 5, 1 not finite |" in to_markdown(TABLE, lost)


def test_a_shallower_or_longer_run_with_a_cure_has_a_row_of_its_own(records: list[dict[str, Any]]) -> None:
    mixed = [record(seed, "residual", blocks=2, longer=3.0) for seed in range(1, 7)]
    found = by_row([*records, *mixed])
    assert found["shallower"].scores == by_row(records)["shallower"].scores
    assert "residual, shallower, more epochs" in found
    assert measured_gains(TABLE, [*records, *mixed])["measured"] == measured_gains(TABLE, records)["measured"]


def test_missing_runs_are_listed_by_place() -> None:
    (cell,) = RECIPE.grids["csbm"][-1].cells(Config)
    grids = {"csbm": RECIPE.grids["csbm"][-1:]}
    assert missing_table(grids, []).rows == [("csbm", "gcn, csbm", "16", "–", "more epochs")]
    trials = [record(0, "more epochs", **{k: v for k, v in vars(t).items() if k != "seed"}) for t in cell.trials]
    assert missing_table(grids, trials[:4]).rows[0][3] == "more epochs (4 of 9 trials)"
    seeds = [record(seed, "more epochs", longer=8.0) for seed in range(1, 7)]
    assert missing_table(grids, [*trials, *seeds[:2]]).rows[0][3] == "more epochs (2 of 6 seeds)"
    assert missing_table(grids, [*trials, *seeds]).rows == []


def test_a_partly_filled_arena_has_its_tables_and_plots(records: list[dict[str, Any]]) -> None:
    assert RECIPE.details is not None
    details = RECIPE.details(records[:-3], records[:-3])
    text = to_markdown(TABLE, records[:-3], details=details)
    assert "none (2 of 9 trials)" in text
    assert "gcn, csbm" in text
    plots = list(draw_plots(TABLE, records[:-3]))
    assert [plot.title.partition(": ")[2] for plot in plots] == [
        "score over seconds",
        "rank and gain",
        "learning rates",
    ]
    page = render_page(TABLE, build_cells(TABLE, records), plots, details)
    assert all(each.title in page for each in (*details, *plots))


def test_advice_has_the_best_lower_bound_first_of_intervals_that_hold_together(
    records: list[dict[str, Any]],
) -> None:
    (entry,) = measured_gains(TABLE, records)["measured"]
    assert [gain["row"] for gain in entry["gains"]] == ["shallower", "residual", "contra_norm", "more epochs"]
    assert (entry["kind"], entry["depth"], entry["data"], entry["cause"]) == ("graph network", 16, ["csbm"], "complete")
    assert entry["gains"][0]["code"] == "# build it with 2 blocks"
    assert entry["gains"][1]["code"] == 'uc.attach(model, "residual", layers="1:-1")'
    assert entry["gains"][2]["code"].startswith('uc.attach(model, "contra_norm", layers=":-1", preset="gnn"')
    found = {each.row: each for each in build_standings(TABLE, records)}
    for gain in entry["gains"]:
        of = found[gain["row"]].gain
        assert of is not None
        together = student.interval(1 - 0.05 / len(entry["gains"]), of.paired.n - 1, loc=of.paired.mean)
        half = (together[1] - of.paired.mean) * of.paired.std / of.paired.n**0.5
        assert (gain["low"], gain["high"]) == pytest.approx((gain["mean"] - half, gain["mean"] + half), abs=0.02)


def test_rows_are_averaged_over_datasets_that_have_all_of_them(records: list[dict[str, Any]]) -> None:
    cora = [r | {"config": r["config"] | {"data": "cora"}} for r in records]
    few = [r | {"config": r["config"] | {"data": "citeseer"}} for r in records if row_of(r["config"]) == "none"]
    (entry,) = measured_gains(TABLE, [*records, *cora, *few])["measured"]
    assert entry["data"] == ["csbm", "cora"]
    (alone,) = measured_gains(TABLE, records)["measured"]
    assert entry["gains"] == alone["gains"]  # the same numbers twice
    assert measured_gains(TABLE, [r for r in records if r["seed"] < 3])["measured"] == []  # too few seeds


def test_the_shipped_gains_are_those_of_the_results() -> None:
    stored = json.loads((ROOT / "src/uncollapse/diagnosis" / GAINS_FILE).read_text(encoding="utf-8"))
    assert stored == collect_gains(Results(ROOT / "results").all(RECIPE))
    assert all(set(entry) == set(Measured.__dataclass_fields__) for entry in stored["measured"])


def test_the_demo_has_the_settings_that_were_chosen_on_another_graph() -> None:
    found = by_row([r for r in Results(ROOT / "results").all(RECIPE) if group_of(r["config"]) == "gcn, csbm"])
    for config in (cell.trials[0] for grid in RECIPE.grids["demo"] for cell in grid.cells(Config)):
        settings = vars(config)
        assert {name: settings[name] for name in ("lr", "scale", "blocks")} == found[row_of(settings)].chosen


def test_the_demo_fails_without_advice_and_the_advice_holds_over_six_seeds() -> None:
    found = by_row([r for r in Results(ROOT / "results").all(RECIPE) if group_of(r["config"]) == "gcn, csbm 1"])
    assert found["none"].mean < 40
    assert all(len(each.scores) == 6 for each in found.values())
    measured = find_measured("graph network", 16, found["none"].verdicts[1])
    assert measured is not None
    advised = [gain.row for gain in measured.helpful[:2]]
    assert set(advised) <= set(found)  # so that the demo shows them
    for row in advised:
        gain = found[row].gain
        assert gain is not None
        assert gain.paired.interval is not None
        assert gain.paired.interval[0] > 50
