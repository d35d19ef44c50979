"""The example of an experiment stores a result per seed, prints their table, and trains nothing twice."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_recipe.py"


def test_two_seeds_of_two_optimizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["own_recipe.py", "--seeds", "2", "--folder", str(tmp_path)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    results = {path: path.read_bytes() for path in (tmp_path / "results" / "parity").glob("*.json")}
    assert len(results) == 4
    first = capsys.readouterr().out
    assert "### adam" in first
    assert "2 cells run" in first
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert {path: path.read_bytes() for path in results} == results
    assert capsys.readouterr().out == first
