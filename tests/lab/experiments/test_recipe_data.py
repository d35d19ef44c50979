"""The TOML files of recipes: how they are read, and what is refused."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from uncollapse.lab.config.fields import config_field
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.recipe_data import RecipeData
from uncollapse.lab.tables.paper_table import Contrast

PACKAGE = "made_up_experiment"
GRIDS = """
[bases.slow]
epochs = 300
[presets.paper]
base = "slow"
norm = "contra_norm"
falls = [0.5, 0.75]
[quick]
base = "paper"
epochs = 2
[[variants.cures]]
norm = "none"
[[variants.cures]]
norm = "contra_norm"
scale = [0.1, 0.2]
choose = ["scale"]
by = "loss"
[[grids.small]]
base = "paper"
variants = "cures"
layers = [2, 4]
seed = [0, 1]
[[grids.rates]]
falls = [[0.5], [0.5, 0.75]]
[grids.all]
join = ["small", "rates"]
"""
PAPER = """
[shared]
groups = "data"
rows = "norm"
columns = "layers"
[tables.depth]
title = "Depth"
where = { epochs = 300 }
metric = "dev"
choose = ["scale"]
protocol = "paper"
open = ["scale"]
claim = "contra_norm"
contrasts = [{ rival = "none" }, { row = "contra_norm", rival = "none", columns = [4] }]
names = { cora = "Cora" }
[tables.depth.published]
source = "Table 3"
runs = 5
columns = [2, 4]
[tables.depth.published.cells.cora]
none = ["81.75 ± 0.51", 72]
contra_norm = [79.75, ""]
[tables.plain]
title = "Plain"
"""


@dataclass(frozen=True)
class Config:
    data: str = config_field("cora", "The graph.")
    norm: str = config_field("none", "The norm.", choices=("none", "contra_norm"))
    scale: float = config_field(1.0, "Its scale.")
    layers: int = config_field(2, "Layers.", minimum=1)
    epochs: int = config_field(200, "Epochs.", minimum=1)
    falls: tuple[float, ...] = config_field((), "Falls of the learning rate.")
    seed: int = config_field(0, "Seed.")


Read = Callable[..., RecipeData]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def read_both(grids: str = GRIDS, paper: str = PAPER) -> RecipeData:
        (folder / "grids.toml").write_text(grids, encoding="utf-8")
        (folder / "paper.toml").write_text(paper, encoding="utf-8")
        return recipe_data.read(PACKAGE, Config)

    yield read_both
    sys.modules.pop(PACKAGE, None)


def test_settings_build_on_others(read: Read) -> None:
    data = read()
    assert data.presets == {"paper": {"epochs": 300, "norm": "contra_norm", "falls": (0.5, 0.75)}}
    assert data.quick == {**data.presets["paper"], "epochs": 2}


def test_grids(read: Read) -> None:
    plain, chosen = read().grids["small"]
    assert [t.norm for cell in plain.cells(Config) for t in cell.trials] == ["none"] * 4
    assert {t.epochs for cell in plain.cells(Config) for t in cell.trials} == {300}
    assert (chosen.choose, chosen.by) == (("scale",), "loss")
    assert [(c.trials[0].layers, len(c.trials), c.seeds) for c in chosen.cells(Config)] == [(2, 2, (1,)), (4, 2, (1,))]
    (rates,) = read().grids["rates"]
    assert rates.values["falls"] == ((0.5,), (0.5, 0.75))
    assert read().grids["all"] == (plain, chosen, rates)


def test_tables(read: Read) -> None:
    depth, plain = read().tables.values()
    assert [(n.cell["norm"], n.cell["layers"], n.mean, n.std, n.source, n.runs) for n in depth.published] == [
        ("none", 2, 81.75, 0.51, "Table 3", 5),
        ("none", 4, 72.0, None, "Table 3", 5),
        ("contra_norm", 2, 79.75, None, "Table 3", 5),
    ]
    assert (depth.claim, depth.names) == ("contra_norm", {"cora": "Cora"})
    assert depth.contrasts == (Contrast("none"), Contrast("none", "contra_norm", (4,)))
    assert (plain.claim, plain.contrasts) == (None, ())
    assert depth.protocol["falls"] == (0.5, 0.75)
    assert "scale" not in depth.protocol
    assert (depth.where, depth.choose) == ({"epochs": 300}, ("scale",))
    assert (plain.where, plain.protocol, plain.published) == ({}, {}, ())


def test_absent_files_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipe_data.read("tests", Config) == RecipeData()


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("epochs = 300\n[pre", "epoch = 300\n[pre", "epochs"),  # an unknown field, with the one that is meant
        ("epochs = 300\n[pre", 'epochs = "300"\n[pre', "300"),  # text for a number
        ("epochs = 300\n[pre", "epochs = 0\n[pre", "epochs"),
        ('base = "slow"', 'base = "slwo"', "slow"),
        ('variants = "cures"', 'variants = "cure"', "cures"),
        ('join = ["small"', 'join = ["smal"', "small"),
        ("join =", "joined =", "join"),
        ('choose = ["scale"]', 'choose = ["data"]', "data"),
        ("falls = [[0.5]", "falls = [true", "falls"),
        ("[quick]", "[quik]", "quik"),
    ],
)
def test_wrong_grids(read: Read, old: str, new: str, match: str) -> None:
    assert old in GRIDS
    with pytest.raises(ValueError, match=rf"grids\.toml.*{match}"):
        read(grids=GRIDS.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('none = ["81.75 ± 0.51", 72]', "none = [81.75]", "2 columns, but 1 cells"),
        ('"81.75 ± 0.51"', '"81.75 +- 0.51"', "81.75"),
        ("contra_norm = [79.75", "contranorm = [79.75", "contra_norm"),
        ("columns = [2, 4]", 'columns = [2, "4"]', "layers"),
        ("epochs = 300", "epoch = 300", "epochs"),
        ('protocol = "paper"', 'protocol = "papers"', "paper"),
        ('protocol = "paper"', "protocol = { layers = 0 }", "layers"),
        ('choose = ["scale"]', 'choose = ["scales"]', "scale"),
        ('title = "Depth"', "title = 1", "title"),
        ('title = "Depth"', 'titel = "Depth"', "titel|title"),
        ('rows = "norm"', 'rows = "norm+scales"', "scale"),
        ('{ rival = "none" }', '{ rival = "nothing" }', "contrasts.*none"),
        ('{ rival = "none" }', '{ row = "none" }', "rival"),
        ("columns = [4] }", 'columns = ["4"] }', "contrasts.*layers"),
        ("runs = 5", 'runs = "5"', "runs"),
        ('claim = "contra_norm"', 'claim = "contra"', "contra_norm"),
    ],
)
def test_wrong_tables(read: Read, old: str, new: str, match: str) -> None:
    assert old in PAPER
    with pytest.raises(ValueError, match=rf"paper\.toml.*(?:{match})"):
        read(paper=PAPER.replace(old, new, 1))
