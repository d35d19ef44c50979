"""The example of losses on inner tokens, and its results."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example_saves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["diverse_patch.py", "--epochs", "1", "--depth", "2", "--out", str(out)])
    runpy.run_path(str(ROOT / "examples" / "diverse_patch.py"), run_name="__main__")
    runs = {run["way"]: run for run in json.loads(out.read_text(encoding="utf-8"))["runs"]}
    assert len(runs) == 4
    others = [run["mean_cosine"] for way, run in runs.items() if way != "plain"]
    assert max(others) < runs["plain"]["mean_cosine"]


def test_saved_results_agree_with_the_page() -> None:
    saved = json.loads((ROOT / "results" / "diverse_patch.json").read_text(encoding="utf-8"))
    plain, *others = saved["runs"]
    assert plain["way"] == "plain"
    assert all(run["mean_cosine"] < plain["mean_cosine"] for run in others)
    assert all(run["effective_rank"] > plain["effective_rank"] for run in others)
