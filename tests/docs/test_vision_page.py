"""The page of vision shows what was run, with how sure it is, and says what was not."""

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from website.pages import vision, vision_plots

from uncollapse.lab.experiments.vit.recipe import DIVERSE, NAME, RECIPE, Config, name_of

NOT_RUN = "not run yet"


@pytest.fixture
def visions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setattr(vision, "IMAGES", tmp_path)
    monkeypatch.setattr(vision, "RESULTS", tmp_path)
    show(monkeypatch, vision)
    return vision


def show(monkeypatch: pytest.MonkeyPatch, visions: ModuleType, *records: dict[str, Any]) -> None:
    monkeypatch.setattr(visions, "vit", lambda: records)


def made(test: float | None, depth: int = 24, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A result with two blocks worth of measures."""
    given = {**RECIPE.presets["small"], "data": "cifar10", "cure": "none", **changes}
    config = Config(**given, depth=depth, seed=seed)
    measured = {"attention_std": 0.02, "effective_rank": 9.0}
    blocks = [{"name": f"block {at}", "mean_cosine": 0.5 + 0.1 * at, **measured} for at in range(2)]
    layers: list[dict[str, Any]] = [{"name": "embed", "mean_cosine": 0.1}, *blocks]
    figures = {"validation": test, "test": test, "dataset_rank": 3.0, **layers[-1]}
    diagnosis = {"before": {"layers": layers}, "after": {"layers": layers}}
    about = {"recipe": NAME, "config": asdict(config), "seed": seed, "figures": figures}
    return {**about, "diagnosis": diagnosis, "spectrum": [0.5, 0.3, 0.15, 0.05]}


def test_without_results_all_is_said_to_be_not_run(visions: ModuleType) -> None:
    _, rows = visions.compared("cifar10", 24)
    assert [row[:2] for row in rows] == [(way, NOT_RUN) for way in ("none", "contra_norm", "DiversePatch")]
    assert len(visions.compared("cifar10", 12)[1]) == 9
    assert visions.says("cifar10", 24) == ""
    assert visions.plot("layers_24", "") == "Not run yet."
    assert visions.dimensions()[1] == visions.tuned()[1] == []


def test_a_row_for_each_way(visions: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = [made(0.5 + 0.01 * seed, seed=seed) for seed in range(3)]
    runs += [made(0.55, seed=0, cure="contra_norm"), made(0.9, seed=1, lr=5e-4), made(0.6, 12)]
    show(monkeypatch, visions, *runs)
    cost = {"name": "ContraNorm at every norm, CIFAR-10's model, 24 blocks, bf16", "measured": 1.256}
    (tmp_path / "benchmarks_vision.json").write_text(json.dumps({"targets": [cost]}), encoding="utf-8")
    rows = {row[0]: [cell.replace("\u00a0", " ") for cell in row[1:]] for row in visions.compared("cifar10", 24)[1]}
    assert rows["none"] == ["51.00 ± 1.00 (3)", "0.600 ± 0.000", "0.0200 ± 0.0000", "9.0 ± 0.0", "1 ×"]
    assert rows["contra_norm"] == ["55.00 (1)", "0.600", "0.0200", "9.0", "1.26 ×"]
    assert rows["DiversePatch"][0] == NOT_RUN
    said = visions.says("cifar10", 24).replace("\u00a0", " ")
    assert r"| cifar10 | 24 | contra\_norm − none | +5.00 | – | 1 | – | – |" in said


def test_the_papers_numbers_stand_alone_until_theirs_is_run(visions: ModuleType) -> None:
    head, rows = visions.papers()
    assert head[2:] == ("12 blocks", "16 blocks", "24 blocks")
    assert ("DiversePatch: DeiT-B on ImageNet", "contrast loss + mixing loss", "82.90", "", "83.30") in rows
    assert ("ContraNorm: DeiT-T on ImageNet-100", "contra_norm", "79.34", "80.44", "81.28") in rows


def test_dimensions_that_hold_most(visions: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [visions.held([0.5, 0.3, 0.15, 0.05], share) for share in (0.4, 0.5, 0.51, 0.9, 1.0)] == [1, 1, 2, 3, 4]
    show(monkeypatch, visions, made(0.5), made(0.5, 12, **dict.fromkeys(DIVERSE, 1.0)))
    assert [row[1:] for row in visions.dimensions()[1]] == [
        ("none", "1", "3", "3", "4", "3.0"),
        ("DiversePatch", "1", "3", "3", "4", "3.0"),
    ]


def test_what_goes_on_from_a_kept_model_stands_beside_it(visions: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made(0.5)
    folder = f"runs/vit/{visions._kept_as(first)}/model"
    assert folder.startswith(f"runs/vit/{name_of(Config(**first['config']))}--")
    show(monkeypatch, visions, first, made(0.6, cure="contra_norm", start=folder), made(0.6, start="elsewhere/model"))
    one, other = visions.tuned()[1]
    assert one[:3] == ("none, then contra_norm for 10 epochs at 0.001", "0", "50.00 → 60.00")
    assert other[0].startswith("another model, then none")
    assert other[2] == "– → 60.00"
    assert "60.00" not in str(visions.compared("cifar10", 24)[1])  # another experiment


def test_plots(visions: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert list(vision_plots.draw()) == []
    show(monkeypatch, visions, made(0.5), made(0.5, seed=1), made(None, cure="contra_norm"), made(0.5, 12))
    names = [path.name for path in vision_plots.draw()]
    assert names == ["vision_layers_24.svg", "vision_spectrum_24.svg", "vision_layers_12.svg"]
    assert "images/vision_layers_24.svg" in visions.plot("layers_24", "")
    assert visions.plot("layers_tiny", "") == "Not run yet."
