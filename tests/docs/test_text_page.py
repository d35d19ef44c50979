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


def test_cures_of_albert_are_compared_with_none_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only runs with the chosen settings count; each difference has its interval, and all share Holm's correction."""

    def trial(way: str, seed: int, score: float, lr: float = 3e-4) -> dict[str, Any]:
        return {"way": way, "seed": seed, "config": {"lr": lr}, "figures": {"dev": score, "dev_pearson": score}}

    runs = [trial("none", 0, 0.1, lr=1e-4), *(trial("none", seed, 0.9) for seed in range(3))]
    runs += [trial("contra_norm", seed, 0.9 - 0.01 * (seed + 1)) for seed in range(3)]
    result = {"summary": {way: {"lr": 3e-4} for way in ("none", "contra_norm")}, "runs": runs}
    monkeypatch.setattr(text, "_read", lambda name: result)
    head, rows = text.albert_differences()
    assert head[:4] == ("correlation", "comparison", "mean", "95 % interval")
    assert [row[:3] for row in rows] == [(kind, "contra_norm − none", "−2.00") for kind in ("Spearman", "Pearson")]
    assert rows[0][3:] == ("−4.48 … +0.48", "3", "0.25", "0.5")


def test_embeddings_are_compared_with_none_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(way: str, seed: int, score: float) -> dict[str, Any]:
        return {"way": way, "seed": seed, **{part: {"spearman": score} for part in ("dev", "test")}}

    trained = [trial("none", 0, 0.8), trial("contra_norm", 0, 0.81), trial("none", 1, 0.7)]
    monkeypatch.setattr(text, "_read", lambda name: {"trained": trained})
    assert [row[:5] for row in text.embedding_differences()[1]] == [
        (part, "contra_norm − none", "+0.0100", "–", "1") for part in ("dev", "test")
    ]
