"""Grids: products, their text, and what is chosen."""

from dataclasses import dataclass
from typing import Any

import pytest

from uncollapse.errors import UsageError
from uncollapse.lab.runs.grids import Grid, parse_grid


@dataclass(frozen=True)
class Config:
    data: str = "cora"
    layers: int = 2
    sample: int | None = None
    scale: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0


def figures(*values: float | None) -> list[dict[str, Any]]:
    return [{"figures": {"validation": value}} for value in values]


def test_all_combinations_in_the_order_of_the_fields() -> None:
    cells = Grid({"data": ("cora", "pubmed"), "layers": (2, 4), "seed": (0, 1)}).cells(Config)
    assert [cell.trials for cell in cells] == [
        (Config(data, layers, seed=seed),) for data in ("cora", "pubmed") for layers in (2, 4) for seed in (0, 1)
    ]
    assert all(cell.followers([]) == () for cell in cells)


def test_fixed_fields_are_shared() -> None:
    cells = Grid({"seed": (0, 1)}).cells(Config, {"layers": "8"})
    assert [cell.trials for cell in cells] == [(Config(layers=8),), (Config(layers=8, seed=1),)]


def test_a_fixed_field_narrows_a_grid_that_has_it() -> None:
    grid = Grid({"layers": (2, 4), "scale": (0.2, 1.0), "seed": (0, 1)}, choose=("scale",))
    (cell,) = grid.cells(Config, {"layers": "4"})
    assert (cell, grid.cells(Config, {"layers": 8})) == (grid.cells(Config)[1], [])
    for name in ("scale", "seed"):
        with pytest.raises(UsageError, match=f"{name}.*choice"):
            grid.cells(Config, {name: 1})
    assert Grid({"seed": (0, 1)}).cells(Config, {"seed": 1}) == Grid({"seed": (1,)}).cells(Config)


def test_chosen_fields_are_tried_with_the_first_seed_in_each_cell() -> None:
    grid = Grid({"layers": (2, 4), "scale": (0.2, 1.0), "seed": (3, 4, 5)}, choose=("scale",))
    cells = grid.cells(Config, {"data": "pubmed"})
    assert [cell.trials for cell in cells] == [
        tuple(Config("pubmed", layers, scale=scale, seed=3) for scale in (0.2, 1.0)) for layers in (2, 4)
    ]
    assert cells[1].followers(figures(0.3, 0.4)) == tuple(Config("pubmed", 4, scale=1.0, seed=s) for s in (4, 5))
    assert cells[0].followers(figures(0.4, 0.3)) == tuple(Config("pubmed", 2, scale=0.2, seed=s) for s in (4, 5))


def test_the_choice_may_take_several_seeds() -> None:
    grid = Grid({"scale": (0.2, 1.0), "seed": (0, 1, 2, 3)}, choose=("scale",), seeds_to_choose=2)
    (cell,) = grid.cells(Config)
    assert cell.trials == tuple(Config(scale=scale, seed=seed) for seed in (0, 1) for scale in (0.2, 1.0))
    rest = tuple(Config(scale=1.0, seed=seed) for seed in (2, 3))
    assert cell.followers(figures(0.5, 0.4, 0.5, 0.7)) == rest  # the mean over both seeds; the first alone prefers 0.2
    assert cell.followers(figures(0.9, 0.4, None, 0.1)) == rest  # a run that did not stay finite is the worst
    with pytest.raises(UsageError, match="seeds_to_choose"):
        Grid({"scale": (0.2, 1.0)}, choose=("scale",), seeds_to_choose=0)


def test_of_equals_the_smaller_value_wins_and_no_number_never_does() -> None:
    (cell,) = Grid({"scale": ("10", "9.5", "2"), "seed": (0, 1)}, choose=("scale",)).cells(Config)
    assert cell.followers(figures(0.5, 0.5, None)) == (Config(scale=9.5, seed=1),)
    assert cell.followers(figures(None, None, None)) == (Config(scale=2.0, seed=1),)
    assert cell.followers([{"figures": {}}] * 3) == (Config(scale=2.0, seed=1),)  # none stayed finite: no usage error


def test_two_chosen_fields_compete_together() -> None:
    grid = Grid({"scale": (1, 2), "layers": (2, 4), "seed": (0, 1)}, choose=("layers", "scale"))
    (cell,) = grid.cells(Config)
    assert len(cell.trials) == 4
    best = [trial for trial in cell.trials if trial == Config(scale=1.0, layers=4)]
    ranked = [{"figures": {"validation": float(trial in best)}} for trial in cell.trials]
    assert cell.followers(ranked) == (Config(scale=1.0, layers=4, seed=1),)


def test_an_unknown_metric_cannot_choose() -> None:
    (cell,) = Grid({"scale": (1, 2), "seed": (0, 1)}, choose=("scale",), by="dev").cells(Config)
    with pytest.raises(UsageError, match=r"'dev'.*validation"):
        cell.followers(figures(0.1, 0.2))


def test_the_same_value_twice_is_one_run() -> None:
    (cell,) = parse_grid("scale=.5,0.5,1 seed=0,1,1", Config, ("scale",)).cells(Config)
    assert [trial.scale for trial in cell.trials] == [0.5, 1.0]
    assert cell.seeds == (1,)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("layers=2,4 seed=0-3", {"layers": ["2", "4"], "seed": ["0", "1", "2", "3"]}),
        ("data=web-1,2-4", {"data": ["web-1", "2-4"]}),  # a range of integers only
        ("sample=none,1-2", {"sample": ["none", "1", "2"]}),
        ("weight-decay=1e-4 'data=a b'", {"weight_decay": ["1e-4"], "data": ["a b"]}),
        ("seed=7-7", {"seed": ["7"]}),
    ],
)
def test_a_grid_from_text(text: str, values: dict[str, list[str]]) -> None:
    assert parse_grid(text, Config).values == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "The grid is empty"),
        ("layers", "such as 'layers=2,4 seed=0-4', got 'layers'"),
        ("layers=", "got 'layers='"),
        ("layer=2", "There is no setting 'layer'. Did you mean 'layers'"),
        ("layers=2 layers=4", "names layers twice"),
        ("seed=4-0", "write 0-4"),
        ("data='cora", "cannot be read"),
    ],
)
def test_a_text_that_is_no_grid(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_grid(text, Config)


def test_a_value_of_the_wrong_type_is_told_when_cells_are_made() -> None:
    with pytest.raises(UsageError, match="layers"):
        parse_grid("layers=two", Config).cells(Config)


def test_a_grid_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"data.*combine"):
        Grid({"data": "cora"})
    with pytest.raises(UsageError, match=r"'scale'.*layers"):
        Grid({"layers": (2,), "seed": (0, 1)}, choose=("scale",))
    with pytest.raises(UsageError, match="'seed'"):
        Grid({"layers": (2,), "seed": (0, 1)}, choose=("seed",))
