"""What a sweep has to do."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from tests.lab.sweep_recipe import registered

from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import Results, build_record
from uncollapse.lab.runs.run_queue import RunQueue


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with registered(monkeypatch) as module:
        yield module


def queue(tiny: ModuleType, folder: Path, *grids: Grid) -> RunQueue:
    cells = [cell for grid in grids for cell in grid.cells(tiny.Config)]
    return RunQueue(tiny.RECIPE, cells, Results(folder))


def keep(tiny: ModuleType, folder: Path, config: object, seconds: float = 1.0, validation: float = 0.5) -> None:
    kept = build_record(tiny.NAME, config, seconds, (), figures={"validation": validation})
    Results(folder).save(tiny.RECIPE, config, kept)


def test_each_run_once_and_cheapest_first(tiny: ModuleType, tmp_path: Path) -> None:
    made = queue(tiny, tmp_path, Grid({"size": (3, 1)}), Grid({"size": (1, 2)}))
    assert (made.total, len(made.records)) == (3, 0)
    assert [config.size for config in made.list_missing()] == [1, 2, 3]
    assert [made.take().size for _ in range(3)] == [1, 2, 3]
    assert made.take() is None


def test_what_is_there_is_not_missing_and_mends_the_guess(tiny: ModuleType, tmp_path: Path) -> None:
    for size, seconds in ((1, 4.0), (2, 6.0), (3, 60.0)):
        keep(tiny, tmp_path, tiny.Config(size), seconds)
    made = queue(tiny, tmp_path, Grid({"size": (1, 2, 3, 10)}))
    assert made.list_missing() == [tiny.Config(10)]
    assert made.seconds_open() == 40.0  # ratios 4, 3 and 20


def test_a_result_that_came_meanwhile_is_not_run(tiny: ModuleType, tmp_path: Path) -> None:
    made = queue(tiny, tmp_path, Grid({"size": (1, 2)}))
    keep(tiny, tmp_path, tiny.Config(1))
    assert made.take() == tiny.Config(2)
    assert len(made.records) == 1


def test_other_seeds_open_when_their_cell_is_complete(tiny: ModuleType, tmp_path: Path) -> None:
    made = queue(tiny, tmp_path, Grid({"size": (1, 2), "scale": (1, 2), "seed": (0, 1, 2)}, choose=("scale",)))
    assert (len(made.open), made.later, made.total) == (4, 4, 8)
    assert made.seconds_open() == 2 * (1 + 2) + 2 * (1 + 2)
    for config in (tiny.Config(1, 1.0), tiny.Config(1, 2.0)):
        assert made.take() == config
        keep(tiny, tmp_path, config, validation=config.scale)
        assert made.look_up(config)
    assert (made.later, made.total) == (2, 8)
    assert [made.take() for _ in range(2)] == [tiny.Config(1, 2.0, seed=seed) for seed in (1, 2)]
    made.fail(made.take(), "broken")
    assert made.later == 2
    again = queue(tiny, tmp_path, Grid({"size": (1,), "scale": (1, 2), "seed": (0, 1, 2)}, choose=("scale",)))
    assert [config.seed for config in again.list_missing()] == [1, 2]


def test_what_was_chosen(tiny: ModuleType, tmp_path: Path) -> None:
    grid = Grid({"size": (1, 2), "scale": (1, 2)}, choose=("scale",))
    made = queue(tiny, tmp_path, grid, Grid({"size": (3,)}))
    assert made.choices() == []
    for config in (tiny.Config(1, 1.0), tiny.Config(1, 2.0), tiny.Config(2, 1.0)):
        keep(tiny, tmp_path, config, validation=config.scale)
    made = queue(tiny, tmp_path, grid, Grid({"size": (3,)}))
    assert [(cell.choose, best) for cell, best in made.choices()] == [(("scale",), tiny.Config(1, 2.0))]


def test_runs_whose_names_are_the_same_have_labels_that_are_not(tiny: ModuleType, tmp_path: Path) -> None:
    made = queue(tiny, tmp_path, Grid({"slow": (0, 1)}))
    labels = [made.label(config) for config in made.list_missing()]
    assert len(set(labels)) == 2
    assert {label.partition("--")[0] for label in labels} == {"none-size1-s1-seed0"}


def test_what_was_taken_can_be_put_back(tiny: ModuleType, tmp_path: Path) -> None:
    made = queue(tiny, tmp_path, Grid({"size": (1, 2)}))
    first = made.take()
    made.put_back(first)
    assert made.take() == first
    assert not made.look_up(replace(first, seed=9))
