"""The early alarm: how runs are labelled and bounds chosen, and what is stored of it."""

import json
from pathlib import Path
from typing import Any

from experiments import early_alarm
from uncollapse.monitoring.rules import EARLY_COSINE, EARLY_SHARE

RESULTS = Path(__file__).parents[2] / "results"


def run(kind: str, score: float, share: float, cosine: float = 0.5) -> dict[str, Any]:
    measured = [{"rank_share": 1.0}, {"rank_share": share, "robust_cosine": cosine}]
    return {"config": {"kind": kind}, "figures": {"test": score, "chance": 0.1}, "measured": measured, "seed": 0}


def test_runs_are_dead_closer_to_chance_than_to_the_best_and_bounds_separate_them() -> None:
    records = [run("a", 0.9, 0.6), run("a", 0.51, 0.7), run("a", 0.49, 0.3), run("b", 0.2, 0.9, 0.99995)]
    records += [run("b", 0.6, 0.8, 0.98)]
    runs = early_alarm.labelled(records)
    assert [dead for _, dead in runs] == [False, False, True, True, False]
    assert early_alarm.choose(runs) == (0.4, 0.9999)  # the smallest share, and the largest cosine, that find both
    assert early_alarm.count(runs, 0.4, 0.9999) == {"dead": 2, "hits": 2, "alive": 3, "false_alarms": 0}
    assert early_alarm.count(runs, 0.65, 2.0) == {"dead": 2, "hits": 1, "alive": 3, "false_alarms": 1}


def test_the_shipped_bounds_are_those_that_the_stored_runs_choose() -> None:
    records = json.loads((RESULTS / "early_alarm" / "runs.json").read_text(encoding="utf-8"))
    runs = early_alarm.labelled(records)
    first, others = early_alarm.split(runs, True), early_alarm.split(runs, False)
    assert len(first) + len(others) == len(records)
    assert early_alarm.choose(first) == (EARLY_SHARE, EARLY_COSINE)
    summary = json.loads((RESULTS / "early_alarm" / "summary.json").read_text(encoding="utf-8"))
    assert summary["held_out"] == early_alarm.count(others, EARLY_SHARE, EARLY_COSINE)


def test_runs_after_the_choice_are_held_out_whatever_their_seed() -> None:
    dates = ("2026-11-18T08:00", early_alarm.SETTLED)
    runs = [(run("a", 0.9, 0.6) | {"seed": seed, "date": date}, False) for date in dates for seed in (0, 1)]
    assert early_alarm.split(runs, True) == runs[:1]
    assert early_alarm.split(runs, False) == runs[1:]


def test_the_named_causes_are_the_known_ones() -> None:
    cases = json.loads((RESULTS / "causes.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) >= 9
    assert all(case["right"] for case in cases), [case["name"] for case in cases if not case["right"]]
