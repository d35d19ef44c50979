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
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(sys.modules, "dask", None)  # the help needs no optional library that the extra `all` lacks
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python examples/{script.name}" in shown
    # argparse cannot break a list of choices {a,b,…}
    broken = [line for line in shown.splitlines() if len(line) > 80 and "{" not in line]
    assert not broken, "a terminal of 80 columns breaks these lines"
