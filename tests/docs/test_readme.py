"""The README and the documentation keep their word: their figures are those of results/."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import uncollapse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_citation_and_changelog_have_the_version() -> None:
    assert f"\nversion: {uncollapse.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    first, *released = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M)
    assert first == "Unreleased"
    assert not released or released[0] == uncollapse.__version__


@pytest.fixture
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_table_is_filled_in_and_used(tables: ModuleType) -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert {name for text in pages for name in tables.PLACE.findall(text)} == set(tables.TABLES)
    filled = "\n".join(
        tables.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page.name)))
        for page, text in zip(PAGES, pages, strict=True)
    )
    assert "<!-- printed" not in filled
    assert "<!-- table" not in filled
    for name in ("effective_rank", "contra_norm", "info_nce", "bert_v2"):
        assert f"| `{name}` |" in filled


def test_benchmark_table(tables: ModuleType, tmp_path: Path) -> None:
    tables.RESULTS = tmp_path
    assert tables.benchmarks() == ""
    target = {"name": "speed", "target": ">= 2", "measured": 2.3456, "unit": "x", "reached": True, "detail": "a|b"}
    result = {
        "targets": [target],
        "versions": {"torch": "2.13"},
        "date": "2026-01-02",
        "processor": "some CPU",
        "config": {"threads": 2},
    }
    (tmp_path / "benchmarks.json").write_text(json.dumps(result), encoding="utf-8")
    assert tables.benchmarks().splitlines() == [
        "| what | target | measured | reached | detail |",
        "| --- | --- | --- | --- | --- |",
        "| speed | >= 2 | 2.35 x | yes | a\\|b |",
        "",
        "Measured on 2026-01-02 with torch 2.13, on some CPU, 2 threads, by `make bench`.",
    ]
