"""The page of the hypersphere shows what was run, and says what was not."""

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from website.pages import hypersphere

from uncollapse.lab.experiments.contrastive import circle
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.tables.significance import compare

DOCS = Path(__file__).parents[2] / "docs"
NOT_RUN = "Not run yet."
JUDGES = [table.metric for table in contrast.RECIPE.tables.values()]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setattr(hypersphere, "IMAGES", tmp_path)
    show(monkeypatch, hypersphere)
    return hypersphere


def show(monkeypatch: pytest.MonkeyPatch, page: ModuleType, **records: list[dict[str, Any]]) -> None:
    monkeypatch.setattr(page.results, "records", lambda recipe: tuple(records.get(recipe, ())))


def encoder(accuracy: float, seed: int = 0, **settings: Any) -> dict[str, Any]:
    config = contrast.Config(**contrast.RECIPE.presets["small"], data="cifar10", seed=seed, **settings)
    figures = {"alignment": 1 - accuracy, "uniformity": -3 * accuracy, "information": 2.0, "optimum": -3.94}
    figures |= dict.fromkeys([*JUDGES, *(name.replace("test", "validation") for name in JUDGES)], accuracy)
    layers = [{"name": name, "mean_cosine": 0.5, "effective_rank": 9.0} for name in ("fc7", "output")]
    about = {"recipe": "contrast", "config": json.loads(json.dumps(asdict(config))), "seed": seed, "figures": figures}
    return {**about, "diagnosis": {"after": {"verdict": "none", "layers": layers}}}


def both_ways(seeds: bool = True) -> list[dict[str, Any]]:
    """All trials of the grid, the second of each best, and the other seeds of these."""
    runs = [encoder(0.5 + 0.01 * (tau == 0.19), temperature=tau) for tau in (0.07, 0.19, 0.5, 1.0)]
    runs += [encoder(0.6 + 0.01 * (align == 1), contrast=0.0, align=align, uniform=1.0) for align in (0.5, 1.0, 2.0)]
    if seeds:
        runs += [encoder(0.51 + 0.02 * seed, seed, temperature=0.19) for seed in (1, 2)]
    return runs


def test_without_results_all_is_said_to_be_not_run(page: ModuleType) -> None:
    assert [row[1] for row in page.circle_table()[1]] == [NOT_RUN] * 3
    assert [row[1] for row in page.seeds_table()[1]] == [NOT_RUN] * 2
    assert page.explained_table()[1] == page.partial_table()[1] == [(NOT_RUN,)]
    assert page.leak_table()[1][0][0] == NOT_RUN
    assert page.collapse_table()[1][0][0] == NOT_RUN
    assert page.encoder_table()[1] == page.limits()[1] == []
    assert page.plot("scatter", "") == NOT_RUN


def test_the_two_ways_are_compared_with_what_was_best_on_validation(
    page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, page, contrast=both_ways())
    infonce, both = page.seeds_table()[1]
    assert infonce[:3] == ("InfoNCE alone", "C(τ=0.19)", "3")
    assert infonce[3].replace("\u00a0", " ") == "53.00 ± 2.00"
    assert both[:4] == ("alignment and uniformity", "A(α=2) + U(t=2)", "1", "61.00")


def test_the_two_ways_are_compared_by_seed(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences over common seeds, with Student's interval, the exact test, and Holm's correction for the table."""
    seeds = [encoder(0.58 + 0.01 * seed, seed, contrast=0.0, align=1.0, uniform=1.0) for seed in (1, 2)]
    show(monkeypatch, page, contrast=[*both_ways(), *seeds])
    head, rows = page.differences_table()
    assert head == ("test", "comparison", "mean", "95 % interval", "seeds", "p", "Holm p")
    assert len(rows) == len(JUDGES)
    low, high = compare({0: 61.0, 1: 59.0, 2: 60.0}, {0: 51.0, 1: 53.0, 2: 55.0}).interval
    assert rows[0][2:] == ("+7.00", f"{low:+.2f} … {high:+.2f}".replace("-", "−"), "3", "0.25", "1")
    show(monkeypatch, page, contrast=both_ways(seeds=False))
    assert [row[2:] for row in page.differences_table()[1]] == [("+10.00", "–", "1", "–", "–")] * len(JUDGES)
    show(monkeypatch, page)
    assert page.differences_table()[1] == []


def test_encoders_are_listed_best_first_with_their_seeds_joined(
    page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = encoder(0.9)
    other["config"]["epochs"] = 3  # of another training: not comparable
    show(monkeypatch, page, contrast=[*both_ways(), other])
    _, rows = page.encoder_table()
    assert len(rows) == 7
    assert rows[0][0] == "A(α=2) + U(t=2)"
    assert [row[3] for row in rows if row[0] == "C(τ=0.19)"] == ["3"]
    head, explained = page.explained_table()
    assert head[0] == "9 encoders"
    assert explained[2][:2] == ("alignment + uniformity", "-1.00 (R² 1.00)")


def test_two_ways_to_fail_and_one_not_to(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"alignment alone": (1.0, 0.0), "uniformity alone": (0.0, 1.0), "both": (1.0, 1.0)}
    runs = [encoder(0.1, contrast=0.0, align=a, uniform=u) for a, u in weights.values()]
    show(monkeypatch, page, contrast=[*runs, encoder(0.3)])
    assert [row[0] for row in page.collapse_table()[1]] == list(weights)


def test_circles_stand_beside_the_papers(page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(json.dumps(asdict(circle.Config(**circle.RECIPE.presets["small"]))))
    figures = {"validation": 0.25, "test": 0.26, "alignment": 0.3, "uniformity": -1.5}
    quick = {"config": config | {"epochs": 1}, "figures": figures | {"test": 0.9}}
    show(monkeypatch, page, circle=[{"config": config, "figures": figures}, quick])
    rows = {row[0]: row for row in page.circle_table()[1]}
    assert rows["contrastive"][1:4] == ("25.00", "26.00", "28.60")
    assert rows["supervised"][1] == NOT_RUN


def test_all_that_the_page_asks_for_is_there(page: ModuleType) -> None:
    asked = [
        line.split()[2]
        for line in (DOCS / "hypersphere.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("<!-- table:")
    ]
    assert len(asked) > 15
    known = {*page.TEXTS, *page.PARTS_OF_PAGE, "hypersphere_speed"}
    assert set(asked) <= known
