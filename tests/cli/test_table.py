"""uncollapse table."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import Result

from uncollapse.cli import console
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results
from uncollapse.lab.tables.paper_table import Details, PaperTable, Published

Run = Callable[..., Result]


@dataclass(frozen=True)
class Config:
    data: str = "cora"
    norm: str = "none"
    layers: int = 2
    seed: int = 0


PLACES = (("none", 2, 81.75, 0.51), ("none", 16, 23.88, 3.06), ("contra", 16, 79.75, 0.33))
PAPER = tuple(Published({"data": "cora", "norm": norm, "layers": n}, mean, std) for norm, n, mean, std in PLACES)
RECIPE = SimpleNamespace(
    name="made-up",
    plots=None,
    details=None,
    statistics=lambda records: {"results": len(records)},
    config=Config,
    name_of=lambda config: f"{config.data}-{config.norm}-L{config.layers}-seed{config.seed}",
    tables={
        "depth": PaperTable("Depth", {}, "data", "norm", "layers", published=PAPER),
        "shallow": PaperTable("Shallow", {"layers": 2}, "data", "norm", "layers"),
    },
    grids={"all": None},
)


@pytest.fixture
def table(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command where the made-up recipe is a recipe."""
    monkeypatch.setitem(RECIPES._entries, "made-up", RECIPE)
    return lambda *arguments: run("table", *arguments)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    ran = {Config("cora", "contra", 16): 0.80, Config("cora", "contra", 16, seed=1): 0.81, Config(): 0.8}
    for config, test in ran.items():
        record = {"recipe": "made-up", "config": asdict(config), "seed": config.seed, "figures": {"test": test}}
        Results(tmp_path / "results").save(RECIPE, config, record)
    return tmp_path / "results"


def test_on_the_terminal(table: Run, filled: Path) -> None:
    result = table("made-up")
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "Depth"
    at = lines.index("data cora")
    assert lines[at + 2] == "norm \\ layers 2 16"
    assert lines[at + 4 : at + 6] == ["none 80.00 (1) –", "81.75 ± 0.51 23.88 ± 3.06"]
    assert lines[at + 7 : at + 9] == ["contra – ✓ 80.50 ± 0.71 (2)", "79.75 ± 0.33"]
    assert lines[-1] == "2 of 3 cells run. 1 of 2 above the paper's."
    ours, paper = (next(x for x in result.stdout.splitlines() if words in x) for words in ("80.50", "79.75"))
    assert ours.index("80.50") == paper.index("79.75")


def test_a_narrow_terminal_gets_the_columns_one_below_the_other(
    table: Run, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "WIDE", 45)
    lines = table("made-up").stdout.splitlines()
    assert [line.strip() for line in lines].count("data cora") == 2
    assert any("contra" in line and "✓ 80.50 ± 0.71 (2)" in line for line in lines)


def test_further_tables_know_all_results_although_some_are_shown(
    table: Run, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, row = (
        ("grid", "data", "layers", "begun", "not begun"),
        ("all", "cora", "2", "none (1 of 9)", "residual+contra_norm_features"),
    )

    def details(records: list[object], every: list[object]) -> list[Details]:
        return [Details("Missing", f"{len(records)} of {len(every)} are shown.", head, [row], words=5)]

    monkeypatch.setattr(RECIPE, "details", details)
    monkeypatch.setattr(console, "WIDE", 45)
    shown = " ".join(table("made-up", "--set", "norm=none").stdout.split())
    assert "1 of 3 are shown." in shown
    assert (
        "· all, cora, 2: begun none (1 of 9); not begun residual+contra_norm_features" in shown
    )  # not one row of commas


def test_further_tables_that_are_too_wide_become_one_per_place(
    table: Run, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(data, "16", "initial_residual", "+50.23", "+42.39 … +58.06") for data in ("cora", "citeseer")]
    head = ("data", "layers", "comparison", "mean", "95 % interval")
    monkeypatch.setattr(RECIPE, "details", lambda records, every: [Details("Gain", "In points.", head, rows, words=3)])
    monkeypatch.setattr(console, "WIDE", 60)
    lines = [" ".join(line.split()) for line in table("made-up").stdout.splitlines()]
    assert ["data cora, layers 16" in lines, "data citeseer, layers 16" in lines] == [True, True]
    assert lines.count("initial_residual +50.23 +42.39 … +58.06") == 2
    monkeypatch.setattr(console, "WIDE", 100)
    assert "cora 16 initial_residual +50.23 +42.39 … +58.06" in " ".join(table("made-up").stdout.split())


def test_another_board_and_another_folder(table: Run, filled: Path) -> None:
    moved = filled.rename(filled.with_name("elsewhere"))
    result = table("made-up", "shallow", "--results", moved)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Shallow\n")
    assert "contra" not in result.stdout


def test_markdown_alone_and_in_a_file(table: Run, filled: Path, tmp_path: Path) -> None:
    alone = table("made-up", "--markdown", "-")
    assert alone.stdout.startswith("## Depth\n")
    assert "**80.50 ± 0.71 (2)**" in alone.stdout
    filed = table("made-up", "--markdown", "new/table.md")
    assert filed.stdout.endswith("Written: new/table.md\n")
    assert (tmp_path / "new" / "table.md").read_text(encoding="utf-8") == alone.stdout


def test_json_alone_with_files_beside_it(table: Run, filled: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = table("made-up", "--json", "--html", "table.html", "--markdown", "table.md")
    assert result.exit_code == 0, result.stderr
    stated = json.loads(result.stdout)
    assert stated["statistics"]["results"] > 1
    assert (stated["title"], stated["unit"], len(stated["cells"])) == ("Depth", "percent", 4)
    assert result.stderr == "Written: table.md\nWritten: table.html\n"
    assert "<svg" in (tmp_path / "table.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("made-upp",), "No recipe is named 'made-upp'. Did you mean 'made-up'?"),
        (("made-up", "deep"), "made-up has no table named 'deep'. Did you mean 'depth'? There are: depth, shallow."),
        (("made-up", "--results", "nowhere"), "There are no results of made-up in nowhere. Make some with "),
        (("made-up", "--results", "nowhere"), "`uncollapse train made-up` or `uncollapse sweep made-up --grid all`."),
        (("made-up", "--json", "--markdown", "-"), "--json and --markdown - both print"),
        (("made-up", "--markdown", "models.py/table.md"), "cannot be written: "),
        (("made-up", "--html", "."), ". is a folder; --html takes the name of a file."),
    ],
)
def test_mistakes(table: Run, filled: Path, arguments: tuple[str, ...], words: str) -> None:
    result = table(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_broken_result_is_told_in_a_line(table: Run, filled: Path) -> None:
    next((filled / "made-up").glob("cora-none-*.json")).write_text("{")
    result = table("made-up")
    assert result.exit_code == 0
    assert result.stderr.startswith("Note: ")
    assert "does not count" in result.stderr
    assert result.stdout.splitlines()[-1].startswith("1 of 3 cells run")


def test_a_table_without_results_says_how_to_make_some(table: Run, tmp_path: Path) -> None:
    config = Config("cora", "contra", 16)
    record = {"recipe": "made-up", "config": asdict(config), "seed": config.seed, "figures": {"test": 0.8}}
    Results(tmp_path / "results").save(RECIPE, config, record)
    result = table("made-up", "shallow")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "0 cells run."
    assert "No result of made-up in results belongs to this table." in result.stderr
    assert "uncollapse sweep made-up --grid NAME" in result.stderr
    assert table("made-up").stderr == ""
