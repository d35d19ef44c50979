"""The example on text runs, with a tiny model of its own and with one that is given."""

import runpy
import sys
from pathlib import Path

import pytest
from tests.lab.tiny_text import tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "text.py"


@pytest.mark.parametrize("given", [False, True])
def test_it_prints_both_ways(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = [str(tiny_model(tmp_path))] if given else []
    monkeypatch.setattr(sys, "argv", ["text.py", *place])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line.split("│")[2:5] for line in printed.splitlines() if "│" in line}
    assert len(rows) == 4
    assert float(rows["with ContraNorm, before"][0]) < float(rows["unchanged, before"][0])
    assert all(float(rows[f"{name}, after"][2]) > 0 for name in ("unchanged", "with ContraNorm"))
