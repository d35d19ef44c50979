"""What --json prints has the keys that the documentation names."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.lab import slope
from typer.main import get_command
from typer.testing import Result

from uncollapse.cli import app, demo
from uncollapse.lab.experiments.arena.config import Config
from uncollapse.lab.recipe import RECIPES

MAIN: Any = get_command(app)
PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
Run = Callable[..., Result]


def documented(command: str) -> set[str]:
    """Return the keys that the page names for a command."""
    (row,) = re.findall(rf"^\| [^|]*`{command}`[^|]*\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return set(re.findall(r"`([a-z_]+)`", row))


@pytest.fixture
def printed(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setitem(RECIPES._entries, "slope", slope.RECIPE)
    monkeypatch.setattr(slope, "runs", [])
    monkeypatch.setattr(slope, "interrupt_at", [])
    monkeypatch.chdir(tmp_path)

    def printed(*arguments: object) -> Any:
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.count("\n") == 1  # one line
        return json.loads(result.stdout)

    return printed


@pytest.mark.parametrize("name", sorted(MAIN.commands))
def test_every_command_has_json_with_documented_keys(name: str) -> None:
    command = MAIN.commands[name]
    recipes = [command.get_command(None, recipe) for recipe in RECIPES] if name in ("train", "tune") else [command]
    assert all("--json" in [flag for part in recipe.params for flag in part.opts] for recipe in recipes)
    assert documented(name)


def test_diagnoses(printed: Callable[..., Any], tmp_path: Path) -> None:
    numpy.save(tmp_path / "rows.npy", numpy.random.default_rng(0).normal(size=(64, 8)))
    found = printed("embeddings", "rows.npy")
    assert set(found) == documented("embeddings")
    for name in ("a.json", "b.json"):
        Path(name).write_text(json.dumps(found))
    assert set(printed("compare", "a.json", "b.json")) == documented("compare")
    for options in (["auto", "--dry-run"], ["center", "--out", "mended.npy", "--force"]):
        outcome = printed("embeddings", "rows.npy", "--mend", *options)
        assert set(outcome) == documented("embeddings --mend")
        assert (outcome["written"] is None) == (outcome["report"] is None) == ("--dry-run" in options)


def test_runs_and_tables(printed: Callable[..., Any]) -> None:
    (record,) = printed("train", "slope", "--epochs", 1)
    assert documented("train") <= set(record)
    (planned,) = printed("train", "slope", "--epochs", 1, "--dry-run")
    assert set(planned) == documented("train --dry-run")
    plan = printed("sweep", "slope", "--grid", "epochs=1,2", "--dry-run")
    assert set(plan) == documented("sweep") - {"ended"}
    assert set(printed("sweep", "slope", "--grid", "epochs=1")) == documented("sweep")  # which is there
    assert documented("table") <= set(printed("table", "circle", "--results", PAGE.parents[1] / "results"))


def test_plan_of_a_search(printed: Callable[..., Any]) -> None:
    pytest.importorskip("optuna")
    assert set(printed("tune", "gcn-depth", "--dry-run")) == documented("tune --dry-run")


@pytest.mark.parametrize("kind", ["cures", "metrics"])
def test_lists(printed: Callable[..., Any], kind: str) -> None:
    entries = printed("list", kind)
    assert {"contra_norm", "mean_cosine"} & {entry["name"] for entry in entries}
    assert all("paper" in entry for entry in entries)


def test_the_installation(printed: Callable[..., Any]) -> None:
    assert set(printed("doctor")) == documented("doctor")


def test_the_demo(printed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("torch_geometric", "accelerate", "plotly"):
        pytest.importorskip(library)
    monkeypatch.setattr(demo, "MINILM", "no_package_of_this_name")
    monkeypatch.setattr(
        demo, "demo_configs", lambda: [Config(depth=5, longer=0.02, lr=lr, seed=1) for lr in (0.01, 0.02)]
    )
    found = printed("demo", "--out", "there")
    assert set(found) | {key for row in found["rows"] for key in row} == documented("demo")
    assert found["minilm"] is None
    assert found["rows"][0]["gain"] is None
    assert Path(found["report"]).is_file()
    assert all(Path(row["diagnosis"]).is_file() for row in found["rows"])
