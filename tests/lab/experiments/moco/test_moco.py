"""The recipe moco, with 60 of scikit-learn's digits: it learns, and goes on where it was stopped."""

import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from uncollapse.backbones import torchvision_ops
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.depth_probe.config import load_encoder
from uncollapse.lab.experiments.moco import recipe as moco
from uncollapse.lab.experiments.moco.config import MomentumConfig
from uncollapse.lab.experiments.moco.recipe import Config
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import run_one
from uncollapse.lab.tables.paper_table import build_cells

torchvision_ops.declare()
pytest.importorskip("timm")
pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

TINY = Config(
    data="digits",
    examples=60,
    holdout=0.4,
    encoder="small_alexnet",
    width=0.03,
    dim=8,
    side=16,
    queue=50,  # batches of 20 do not divide it
    ema=0.9,
    epochs=2,
    batch=20,
    lr=0.12,
    contrast=1.0,
    align=1.0,
    uniform=1.0,
    probe_epochs=2,
    probe_batch=30,
    probe_lr=1.0,
    judged="whole",
)
SAME = ("figures", "epochs", "ended", "diagnosis", "data")  # of a record, whatever happened on the way
STEPS = 6  # of the training; four of the classifier follow


def outcome(config: Config = TINY, **runtime: Any) -> dict[str, Any]:
    record = moco.RECIPE.run(config, Runtime(device="cpu", **runtime))
    return {name: record[name] for name in SAME}


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return outcome()


def pressed(at: int) -> Any:
    """Ctrl-C after so many steps, of training and classifier together."""
    count = 0

    def press(done: int, total: int, figures: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGINT)

    return press


def test_what_a_record_has(whole: dict[str, Any]) -> None:
    sizes = {name: whole["data"][name] for name in ("learned", "train", "validation", "test")}
    assert sizes == {"learned": 60, "train": 60, "validation": 24, "test": 300}
    figures = whole["figures"]
    assert {"alignment", "uniformity", "test_top5", "validation_top5", "test_fc7_knn", "test_output_knn"} <= set(
        figures
    )
    assert 0 <= figures["test"] <= figures["test_top5"] <= 1
    assert figures["test_fc7_knn"] > 0.2  # chance is 0.1
    assert figures["alignment"] == pytest.approx(whole["epochs"][-1]["alignment"], rel=1e-5)
    assert whole["diagnosis"]["after"]["layers"][0]["name"] == "conv1"
    json.dumps(whole)


@pytest.mark.parametrize("at", [4, STEPS + 3])
def test_ctrl_c_and_on_to_the_same_end(tmp_path: Path, whole: dict[str, Any], at: int) -> None:
    """In the training, and in that of the linear classifier."""
    with pytest.raises(KeyboardInterrupt, match="epoch 2"):
        outcome(checkpoints=tmp_path, progress=pressed(at))
    folder = tmp_path if at < STEPS else tmp_path / "linear"
    step = at if at < STEPS else at - STEPS
    assert [path.name for path in folder.glob("step-*")] == [f"step-{step:09d}"]
    assert outcome(checkpoints=tmp_path) == whole
    assert not (tmp_path / "linear").exists()


def test_groups_and_no_held_out_images() -> None:
    config = replace(TINY, examples=40, holdout=0.0, groups=4, epochs=1, probe_epochs=1)
    found = outcome(config)
    assert "validation" not in found["data"]
    assert {"test", "test_fc7_knn", "leak", "alignment"} <= found["figures"].keys()
    assert 0 <= found["figures"]["leak"] <= 1
    assert not any("validation" in name for name in found["figures"])


def test_the_encoder_that_is_kept_is_the_one_that_was_judged(tmp_path: Path) -> None:
    config = replace(TINY, epochs=1, probe_epochs=1, mlp=True, neighbours=False)
    encoder, record = moco.train(config, Runtime(device="cpu", save_to=tmp_path / "model"))
    again = load_encoder(tmp_path / "model")
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    encoder.to(memory_format=torch.contiguous_format)  # it was trained in channels-last, which rounds differently
    with torch.no_grad():
        assert torch.equal(again.encoder(images), encoder(images))
    assert isinstance(again.config, MomentumConfig)
    assert not any("knn" in name for name in record["figures"])


def test_a_small_resnet_in_half_precision() -> None:
    """The weights of ResNets and bfloat16 together, on a handful of pictures."""
    config = replace(
        TINY, examples=20, encoder="resnet18", batch=10, epochs=1, probe_epochs=1, precision="bf16", neighbours=False
    )
    record = moco.RECIPE.run(config, Runtime(device="cpu"))
    assert 0 <= record["figures"]["test"] <= 1
    assert record["epochs"][0]["uniformity"] < 0


def test_a_result_is_found_and_no_checkpoint_is_left(tmp_path: Path) -> None:
    config = replace(TINY, examples=20, epochs=1, probe_epochs=1, neighbours=False)
    recipe = moco.RECIPE
    runtime = Runtime(device="cpu", checkpoints=tmp_path / "run")
    record, new = run_one(recipe, config, Results(tmp_path), runtime)
    assert new
    assert record["command"].startswith("uncollapse train moco ")
    assert not run_one(recipe, config, Results(tmp_path), runtime)[1]
    assert not (tmp_path / "run").exists()  # those of the classifier neither


def test_presets_are_the_papers() -> None:
    hundred, all_classes = (Config(**moco.RECIPE.presets[f"paper-{name}"]) for name in ("imagenet100", "imagenet"))
    shared = {"encoder": "resnet50", "ema": 0.999, "align": 3.0, "uniform": 1.0, "t": 3.0, "contrast": 0.0, "side": 224}
    for config in (hundred, all_classes):
        assert asdict(config) | shared == asdict(config)
    assert (hundred.batch // hundred.groups, all_classes.batch // all_classes.groups) == (32, 32)  # images per GPU
    assert hundred.holdout == all_classes.holdout == 0.0
    falls = [round(share * hundred.epochs) for share in hundred.falls]
    assert (hundred.epochs, falls, hundred.batch, hundred.lr * 128 / 256) == (240, [120, 160, 200], 128, 0.03)
    probe = [round(share * hundred.probe_epochs) for share in hundred.probe_falls]
    assert (hundred.probe_lr, hundred.probe_epochs, probe, hundred.probe_drop) == (10.0, 60, [30, 40, 50], 0.2)
    assert (all_classes.mlp, all_classes.schedule, all_classes.queue, all_classes.epochs) == (
        True,
        "cosine",
        65_536,
        200,
    )
    assert (all_classes.blur, all_classes.hue, all_classes.jitter_chance) == (0.5, 0.1, 0.8)


@pytest.mark.parametrize("name", ["imagenet100", "imagenet"])
def test_a_run_of_the_preset_stands_beside_the_papers_number(name: str) -> None:
    config = Config(**moco.RECIPE.presets[f"paper-{name}"])
    record = {"recipe": "moco", "config": asdict(config), "seed": 0, "figures": {"test": 0.7}}
    (ours,) = (cell for cell in build_cells(moco.RECIPE.tables[name], [record]) if cell.run)
    assert ours.published is not None
    assert ours.published.mean in (74.60, 67.69)
    assert ours.comparable
    shorter = record | {"config": asdict(replace(config, epochs=10))}
    (ours,) = (cell for cell in build_cells(moco.RECIPE.tables[name], [shorter]) if cell.run)
    assert not ours.comparable
