"""The recipe depth-probe, on rendered scenes and on a .mat file of them that the test makes."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from uncollapse.errors import UsageError
from uncollapse.lab.data.image.depth_maps import render_scenes
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.depth_probe import recipe as depth_probe
from uncollapse.lab.experiments.depth_probe.recipe import Config
from uncollapse.lab.tables.paper_table import build_cells

h5py: Any = pytest.importorskip("h5py")
pytest.importorskip("accelerate")

TINY = Config(data="rendered", examples=60, width=0.1, side=32, map_side=8, head_width=16, layer="conv4", batch=8)
SAME = ("figures", "epochs", "ended", "data")  # of a record, whatever happened on the way


def outcome(config: Config, **runtime: Any) -> dict[str, Any]:
    record = depth_probe.RECIPE.run(config, Runtime(device="cpu", **runtime))
    return {name: record[name] for name in SAME}


def mat(path: Path, count: int, nearer: float = 1.0) -> Path:
    """A file in NYU's layout: (n, 3, width, height) and (n, width, height)."""
    scenes = render_scenes(count, 32, 32)
    with h5py.File(path, "w") as file:
        file["images"] = scenes.images.transpose(-1, -2).numpy()
        file["depths"] = nearer * scenes.depths.transpose(-1, -2).numpy()
    return path


def test_it_learns() -> None:
    found = outcome(replace(TINY, epochs=12))
    figures = found["figures"]
    assert figures["mse"] < 0.5 * found["epochs"][0]["mse"]
    assert figures["mse_metres"] == pytest.approx(figures["mse"] * found["data"]["std_metres"] ** 2, rel=1e-4)
    assert (found["data"]["train"], found["data"]["test"]) == (48, 12)
    json.dumps(found)


def test_a_file_in_nyus_layout_gives_the_same_as_its_scenes(tmp_path: Path) -> None:
    mat(tmp_path / "nyu.mat", 20)
    config = replace(TINY, examples=0, epochs=1, map_side=32)
    by_file = outcome(replace(config, data="nyu.mat"), data_root=tmp_path)
    made = outcome(replace(config, examples=20))
    assert by_file["figures"] == made["figures"]
    assert by_file["data"]["name"] == "nyu.mat"


def test_ctrl_c_and_on_to_the_same_end(tmp_path: Path) -> None:
    def press(done: int, total: int, figures: Any) -> None:
        if done == 8:
            os.kill(os.getpid(), signal.SIGINT)

    config = replace(TINY, epochs=2)
    with pytest.raises(KeyboardInterrupt, match="epoch 2"):
        outcome(config, checkpoints=tmp_path, progress=press)
    assert outcome(config, checkpoints=tmp_path) == outcome(config)


def test_other_scenes_in_the_same_place_are_noticed(tmp_path: Path) -> None:
    path = mat(tmp_path / "nyu.mat", 4)
    config = replace(TINY, data="nyu.mat", examples=4, holdout=0.5, epochs=1)
    runtime = Runtime(device="cpu", data_root=tmp_path)
    record = depth_probe.RECIPE.run(config, runtime)
    assert depth_probe.RECIPE.same_data(config, runtime, record)
    mat(path, 4, nearer=0.5)
    assert not depth_probe.RECIPE.same_data(config, runtime, record)
    path.unlink()
    assert depth_probe.RECIPE.same_data(config, runtime, record)
    with pytest.raises(UsageError, match="nyu_depth"):
        depth_probe.RECIPE.run(config, runtime)


def test_the_papers_numbers_stand_beside_and_are_not_judged() -> None:
    record = {"recipe": "depth-probe", "config": vars(Config()), "seed": 0, "figures": {"mse": 0.1}}
    found = build_cells(depth_probe.RECIPE.tables["mse"], [record])
    (ours,) = (cell for cell in found if cell.run)
    assert (ours.row, ours.published, ours.reached) == ("random", None, None)
    assert ours.mean == pytest.approx(0.1)
    assert sorted(cell.published.mean for cell in found if cell.published) == [0.7014, 0.7024, 0.7575, 0.7592]


def test_the_name_of_a_run_is_that_of_a_file() -> None:
    config = replace(TINY, start="~/runs/a b+c--1f/model", data="nyu/labeled.mat", seed=4)
    assert depth_probe.name_of(config) == "nyu_labeled.mat-runs_a_b_c_1f_model-conv4-seed4"
    assert depth_probe.cost(Config()) > depth_probe.cost(TINY) > 0
