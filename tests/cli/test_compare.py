"""uncollapse compare."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import Result

import uncollapse as uc
from uncollapse import report
from uncollapse.cli import console

Run = Callable[..., Result]


@pytest.fixture
def pair(run: Run, tmp_path: Path) -> tuple[Path, Path]:
    x = torch.randn(8, 24, 16, generator=torch.Generator().manual_seed(0))
    uc.diagnose_activations([x, x], labels=uc.Labels("model")).save(tmp_path / "before.json")
    uc.diagnose_activations([x, torch.ones_like(x)], labels=uc.Labels("model")).save(tmp_path / "after.json")
    return tmp_path / "before.json", tmp_path / "after.json"


def test_table_words_and_report(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    result = run("compare", *pair)
    assert result.exit_code == 0, result.stderr
    first, second = (line for line in result.stdout.splitlines() if line.startswith("  model ("))
    assert first.split()[:3] == ["model", "(before)", "none"]
    assert second.split()[:3] == ["model", "(after)", "complete"]
    assert "model (before) → model (after)" in result.stdout
    before, after = (replace(uc.Diagnosis.load(path), model=f"model ({path.stem})") for path in pair)
    for words in report.difference(before, after):
        assert f" · {words}\n" in result.stdout
    assert result.stdout.endswith("Written: uncollapse-comparison.html\n")
    assert (tmp_path / "uncollapse-comparison.html").stat().st_size > 1e5


@pytest.mark.parametrize("width", [60, 72, 80, 90, 100])
def test_no_number_is_cut_on_a_narrow_terminal(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(
        console, "stdout_console", lambda: Console(width=width, force_terminal=True, color_system=None, highlight=False)
    )
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    for name in ("a", "b"):
        uc.diagnose_rows([rows], labels=uc.Labels(name)).save(tmp_path / f"{name}.json")
    shown = run("compare", tmp_path / "a.json", tmp_path / "b.json").stdout
    ends = [line.split()[-1] for line in shown.splitlines() if line.startswith(("  a ", "  b "))]
    assert ends == [f"{uc.Diagnosis.load(tmp_path / 'a.json').layers[0]['dataset_rank_share']:.3f}"] * 2
    assert max(map(len, shown.splitlines())) <= width


def test_json(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    result = run("compare", *pair, "--json")
    content = json.loads(result.stdout)
    assert [d["verdict"] for d in content["diagnoses"]] == ["none", "complete"]
    assert content["diagnoses"][1]["last_block"] == "layer 1"
    assert content["diagnoses"][1]["measures"]["mean_cosine"] == pytest.approx(1)
    assert list(content["differences"]) == ["model (after)"]
    assert list(tmp_path.glob("*.html")) == []
    result = run("compare", *pair, "--json", "--out", "both.html")
    assert json.loads(result.stdout) == content
    assert (tmp_path / "both.html").exists()


def test_the_same_file_twice(run: Run, pair: tuple[Path, Path]) -> None:
    content = json.loads(run("compare", pair[0], pair[0], "--json").stdout)
    assert [d["model"] for d in content["diagnoses"]] == ["model (before)", "model (before) #2"]


def test_what_cannot_be_compared(run: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    state = json.loads(pair[0].read_text(encoding="utf-8"))
    (tmp_path / "newer.json").write_text(json.dumps({**state, "schema": 99}), encoding="utf-8")
    (tmp_path / "other.json").write_text("[1, 2]", encoding="utf-8")
    for file, words in {
        "newer": "schema 99",
        "other": "not a readable diagnosis",
        "models": "No such file or directory; pass",
    }.items():
        result = run("compare", pair[0], f"{file}.json")
        assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
        assert words in result.stderr
    (tmp_path / "report.html").write_text("<html>", encoding="utf-8")
    assert "it is not JSON; pass a diagnosis.json" in run("compare", pair[0], "report.html").stderr
    assert run("compare", pair[0]).exit_code == 2
    assert run("compare", *pair, "--out", tmp_path).exit_code == 2
