"""The README and the documentation keep their word: their figures are those of results/."""

import json
import re
from pathlib import Path

import pytest
from website import render, tables

import uncollapse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_citation_and_changelog_have_the_version() -> None:
    assert f"\nversion: {uncollapse.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    first, *released = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert first == "Unreleased"
    assert not released or released[0] == uncollapse.__version__


def test_every_table_is_filled_in_and_used() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert {name for text in pages for name in render.TABLE.findall(text)} == set(tables.TABLES)
    filled = "\n".join(render.fill(text, page.name) for page, text in zip(PAGES, pages, strict=True))
    assert "<!-- " not in filled
    for name in ("effective_rank", "contra_norm", "info_nce", "bert_v2"):
        assert f"| `{name}` |" in filled


def test_benchmark_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.benchmarks("benchmarks") == "Not run yet."
    target = {"name": "speed", "target": ">= 2", "measured": 2.3456, "unit": "x", "reached": True, "detail": "a|b"}
    result = {
        "targets": [target],
        "versions": {"torch": "2.13"},
        "date": "2026-01-02",
        "processor": "some CPU",
        "config": {"threads": 2},
    }
    (tmp_path / "benchmarks.json").write_text(json.dumps(result), encoding="utf-8")
    assert tables.benchmarks("benchmarks").splitlines() == [
        "| what | target | measured | reached | detail |",
        "| --- | --- | --- | --- | --- |",
        "| speed | >= 2 | 2.35 x | yes | a\\|b |",
        "",
        "Measured on 2026-01-02 with torch 2.13, on some CPU, 2 threads, by `make bench`.",
    ]


def test_a_target_below_another_is_shown_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    speed = {"name": "speed", "target": "≥ 2", "measured": 2.3456, "unit": "x", "reached": True}
    memory = {"name": "  its memory", "target": "≤ 1", "measured": 1234.0, "unit": "MiB", "reached": False}
    other = {"name": "other", "target": "–", "measured": 1.0, "unit": "s", "reached": None}
    machine = {"processor": "some CPU", "config": {"cores": 2}}
    for name, date, found in (("a", "2026-01-02", [speed, memory, other]), ("b", "2026-01-04", [])):
        content = {**machine, "date": date, "targets": found}
        (tmp_path / f"benchmarks_{name}.json").write_text(json.dumps(content), encoding="utf-8")
    assert tables.targets().splitlines()[2:] == [
        "| speed | ≥ 2 x | 2.35 | yes |",
        "| speed: its memory | ≤ 1 MiB | 1,234 | **missed** |",
        "",
        "Measured on some CPU (2 cores), 2026-01-02 to 2026-01-04.",
    ]


def test_every_target_of_the_project_is_shown() -> None:
    """One line each, reached or missed, as long as the benchmarks' results are stored."""
    shown = [line.split(" | ") for line in tables.targets().splitlines()]
    found = {(cells[0].removeprefix("| "), cells[1]) for cells in shown if len(cells) == 4}
    wanted = {
        "diagnose MiniLM-L6, 8 batches of 32×128": "≤ 1.15 × the time",
        "diagnose MiniLM-L6, 8 batches of 32×128: with attention maps": "≤ 1.5 × the time",
        "diagnose MiniLM-L6, 8 batches of 32×128: with a random model on the first batch": "≤ 1.3 × the time",
        "diagnose DeiT-S, 8 batches of 32×3×224×224": "≤ 1.15 × the time",
        "diagnose an encoder of 12×768, 8 batches of 16×50": "≤ 1.15 × the time",
        "contra_norm 8192×64": "≥ 3.3 × as fast",
        "contra_norm 19717×32": "≥ 6 × as fast",
        "uniform_loss 768×128": "≥ 3 × as fast",
        "ContraNorm at every norm, CIFAR-10's model, 12 blocks, bf16": "≤ 1.25 × the time",
        "embeddings: rate": "≥ 300000 rows/s",
        "import uncollapse": "≤ 0.1 s",
        "uncollapse --help": "≤ 0.3 s",
    }
    for sizes in ("64×197×192", "64×197×384", "32×128×768"):
        wanted[f"contra_norm {sizes}"] = "≥ 1.4 × as fast"
        wanted[f"contra_norm {sizes}, beside a busy process"] = "≥ 1 × as fast"
    assert set(wanted.items()) - found == set()
    assert any(name.startswith("contra_norm 2708×32, neighbours excluded") for name, _ in found)
    assert any(name.endswith("over features (v2)") for name, _ in found)
