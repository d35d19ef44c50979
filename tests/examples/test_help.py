"""Each example that is a script explains itself with --help, and runs nothing."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = [
    path
    for path in sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_shows_how_to_start_it(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert f"python examples/{script.name}" in capsys.readouterr().out
