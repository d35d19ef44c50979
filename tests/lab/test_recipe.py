"""Contract tests over the registry of recipes: complete, consistent, and each runs once in a tiny size."""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from uncollapse.errors import UsageError
from uncollapse.lab import experiments
from uncollapse.lab.config.fields import build
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.recipe import MODULES, RECIPES
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import run_one
from uncollapse.lab.tables.markdown import to_markdown
from uncollapse.lab.tables.paper_table import build_cells


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_complete(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.name == name
    assert "arXiv" in recipe.paper
    fields = {field.name: field for field in dataclasses.fields(recipe.config())}
    assert "seed" in fields
    assert all(field.metadata["help"].endswith(".") for field in fields.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.config().seed = 1
    assert re.fullmatch(r"[A-Za-z0-9._-]+", recipe.name_of(recipe.config()))
    assert recipe.cost(recipe.config()) > 0


@pytest.mark.parametrize("name", RECIPES)
def test_tables_and_grids_name_fields_of_the_recipe(name: str) -> None:
    recipe = RECIPES[name]
    fields = {field.name for field in dataclasses.fields(recipe.config)}
    assert recipe.tables
    for table in recipe.tables.values():
        assert table.named <= fields
        for number in table.published:
            fixed = {name: value for name, value in number.cell.items() if table.row_of is None or name != table.rows}
            build(recipe.config, fixed)  # a UsageError if a value is not allowed; a row in words is none
    for grids in recipe.grids.values():
        assert all(grid.cells(recipe.config) for grid in grids)


# Tables whose rows are not compared: their values are checked against theory, or they have one row
NOT_COMPARED = {*(("asymptotics", name) for name in RECIPES["asymptotics"].tables)}
NOT_COMPARED |= {*(("potentials", name) for name in RECIPES["potentials"].tables)}
NOT_COMPARED |= {("calibration", "auto"), ("arxiv", "teacher")}
TABLES = [(name, table) for name in RECIPES for table in RECIPES[name].tables]


@pytest.mark.parametrize(("name", "which"), TABLES)
def test_rows_of_a_table_are_compared_seed_by_seed(name: str, which: str) -> None:
    assert bool(RECIPES[name].tables[which].contrasts) is ((name, which) not in NOT_COMPARED)


@pytest.mark.parametrize(("name", "which"), TABLES)
def test_plots_call_nothing_as_the_code_does(name: str, which: str) -> None:
    table = RECIPES[name].tables[which]
    for number in table.published:
        group, row, _ = (number.cell[axis] for axis in table.axes)
        assert str(group) in table.names
        assert str(row) in table.names or "_" not in str(row)


TINY: dict[str, dict[str, Any]] = {  # on top of the quick settings
    "gcn-depth": {"layers": 3, "hidden": 8, "epochs": 2},
    "arxiv": {"nodes": 180, "layers": 3, "hidden": 4, "epochs": 2, "teacher_epochs": 1},
    "vit-digits": {"depth": 2, "dim": 16, "heads": 2, "epochs": 1, "batch": 400},
    "vit": {"depth": 1, "width": 24, "heads": 2, "examples": 60, "epochs": 2, "batch": 20},
    "circle": {"epochs": 1, "examples": 60, "batch": 20},
    "potentials": {"points": 50, "free": 4, "steps": 2, "draws": 2, "largest": 8},
    "asymptotics": {"encoder": "sphere", "anchors": 4, "draws": 2, "largest": 64, "fit_from": 4},
    "contrast": {"epochs": 1, "examples": 60, "batch": 20},
    "moco": {"epochs": 1, "examples": 60, "batch": 20, "queue": 32, "probe_epochs": 1},
    "depth-probe": {"epochs": 1, "examples": 12},
    "sentences": {"epochs": 1, "vocabulary": 200, "embedding": 8, "width": 8, "dim": 4},
    "glue": {"epochs": 1},
    "bert-depth": {"epochs": 1, "depth": 2},
    "arena": {"depth": 4, "longer": 0.02, "seed": 1},  # seed 0 only chooses
}


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_run(name: str, tmp_path: Path) -> None:
    """It gives a record of its config that is JSON, is found again, and appears in its tables."""
    recipe, results = RECIPES[name], Results(tmp_path / "results")
    assert recipe.quick is not None
    config = build(recipe.config, {**recipe.quick, **TINY[name]})
    runtime = Runtime(device="cpu", checkpoints=tmp_path / "run", save_seconds=0.0)
    record, new = run_one(recipe, config, results, runtime)
    assert new
    assert json.loads(json.dumps(record)) == record
    assert (record["recipe"], record["seed"], record["threads"]) == (name, config.seed, 1)
    assert build(recipe.config, record["config"]) == config
    assert record["seconds"] >= 0
    assert record["figures"]
    assert not list(tmp_path.glob("run/*step-*"))  # the result is saved: checkpoints are removed
    assert run_one(recipe, config, results, runtime) == (record, False)
    assert recipe.same_data(config, runtime, record)
    shown = [table for table in recipe.tables.values() if any(cell.run for cell in build_cells(table, [record]))]
    assert shown
    assert all(to_markdown(table, [record]) for table in recipe.tables.values())


def test_every_recipe_with_quick_settings_has_a_tiny_run() -> None:
    assert set(TINY) == {name for name, recipe in RECIPES.items() if recipe.quick is not None}


def test_every_module_that_has_a_recipe_is_registered() -> None:
    folder = Path(experiments.__file__).parent
    files = {path for path in folder.rglob("*.py") if "\nRECIPE = " in path.read_text("utf-8")}
    assert {".".join(path.relative_to(folder).with_suffix("").parts) for path in files} == set(MODULES.values())


@pytest.mark.parametrize(
    ("known", "here", "same"),
    [("a", "a", True), ("a", "b", False), ("a", None, True), (None, "b", True), ("a", UsageError("not here"), True)],
)
def test_results_of_other_data_are_not_taken_for_these(known: str | None, here: Any, same: bool) -> None:
    """Data that is not here, or a record without a fingerprint, is not other data."""

    def fingerprint(config: Any, runtime: Runtime) -> Any:
        if isinstance(here, Exception):
            raise here
        return here

    recipe = replace(RECIPES["gcn-depth"], fingerprint=fingerprint)
    assert recipe.same_data(recipe.config(), Runtime(), {"data": {"fingerprint": known}}) is same
    assert replace(recipe, fingerprint=None).same_data(recipe.config(), Runtime(), {"data": {"fingerprint": known}})


def test_a_typo_in_a_field_is_an_error() -> None:
    recipe = RECIPES["potentials"]
    with pytest.raises(TypeError, match="table"):
        replace(recipe, table={})


def test_an_unknown_recipe_names_the_others() -> None:
    with pytest.raises(KeyError, match="vit-digits"):
        RECIPES["vit-digit"]


def test_no_library_of_a_recipe_is_imported_before_it_runs() -> None:
    code = (
        "import sys, uncollapse.lab.recipe; "
        "print([m for m in ('timm', 'sklearn', 'torch_geometric', 'torchvision', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
