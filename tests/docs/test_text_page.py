"""The page of text compares runs that differ in the cure alone."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from website.pages import text

from uncollapse.lab.recipe import RECIPES

DOCS = Path(__file__).parents[2] / "docs"
DEPTH = RECIPES["bert-depth"]


def run(cure: str, depth: int, lr: float, seed: int = 0) -> dict[str, Any]:
    config = DEPTH.config(task="sst2", cure=cure, depth=depth, lr=lr, seed=seed)
    layers = {name: [[lr] * depth] for name in ("feature_variance", "effective_rank")}
    return {"recipe": DEPTH.name, "config": asdict(config), "seed": seed, "figures": {"dev": 0.5}, "layers": layers}


def test_the_deepest_pair_has_one_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy run with a smaller rate is not what ContraNorm at the larger one is compared with."""
    plain, mended = run("none", 48, 5e-4), run("contra_norm", 48, 5e-4)
    others = [run("none", 48, 1e-4), run("none", 48, 5e-4, 1), run("contra_norm", 24, 5e-4), run("none", 72, 5e-4)]
    for records in ([*others, plain, mended], [mended, plain, *others]):
        monkeypatch.setattr(text, "depth", lambda records=records: records)
        assert text.deepest_pair() == {"none": plain, "contra_norm": mended}
        assert {cell for row in text.deepest()[1][::2] for cell in row[3:]} == {f"{5e-4:.1f}"}
    monkeypatch.setattr(text, "depth", lambda: [run("none", 48, 1e-4), mended])
    assert text.deepest_pair() == {}
    assert text.deepest() == ((), [])
