"""The page of deep graph networks compares what was run alike, and the page of claims leaves nothing out."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from website.pages import graphs

from uncollapse.lab.recipe import RECIPES

DOCS = Path(__file__).parents[2] / "docs"
RECIPE = RECIPES["gcn-depth"]


def run(test: float, **settings: Any) -> dict[str, Any]:
    config = RECIPE.config(**{"data": "cora", "layers": 32, "norm": "none", **settings})
    figures = {"validation": test, "test": test}
    return {"recipe": RECIPE.name, "config": asdict(config), "seed": config.seed, "figures": figures}


def show(monkeypatch: pytest.MonkeyPatch, *records: dict[str, Any]) -> None:
    monkeypatch.setattr(graphs, "records", lambda: records)


def test_a_residual_stands_next_to_the_same_networks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without = [run(0.1, layers=16, seed=0), run(0.9, layers=2), run(0.3, layers=16, data="citeseer")]
    mended = run(0.6, layers=16, norm="contra_norm", identity=False)
    show(monkeypatch, *without, mended, run(0.7, layers=16, residual=1))
    text = graphs.table("residual").replace("\u00a0", " ")
    assert "| residual 1 | 70.00 (1) |" in text
    assert "| cora | 16 | contra\\_norm − residual 1 | −10.00 |" in text
    assert "citeseer" not in text
    assert "90.00" not in text


def test_lines_of_the_deep_network_are_of_the_runs_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Eq. 9 with the chosen scale, not those of the released form."""
    counted = [run(0.5, norm="contra_norm", identity=False, scale=1.0, seed=seed) for seed in (0, 1)]
    worse = run(0.4, norm="contra_norm", identity=False, scale=0.2)
    released = run(0.9, norm="contra_norm", scale=1.0)
    show(monkeypatch, released, worse, *counted)
    cells = {(c.row, c.column): c for c in graphs.build_cells(graphs.TABLE_3, graphs.records())}
    cell = cells["contra_norm", 32]
    assert graphs._runs_of(cell) == counted
    assert graphs._name_of(cell) == "ContraNorm"
    (alone,) = [c for c in graphs.build_cells(graphs.TABLE_3, [released]) if c.run]
    assert graphs._name_of(alone) == "ContraNorm, as released"


@pytest.mark.parametrize(
    "words", ["All of GLUE", "PubMed", "RTE it never learns", "NYU", "--grid brown", "86.0", "ogbn-arxiv"]
)
def test_what_was_dropped_is_said_to_be(words: str) -> None:
    lines = (DOCS / "limits.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if words in line]
    assert row.endswith(("| command only |", "| stand-in |"))
