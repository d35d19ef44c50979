"""The recipe on images, with 200 of scikit-learn's digits: it learns, and goes on where it was stopped."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.image.image_files import ArrayImages
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.vit import config as vision
from uncollapse.lab.experiments.vit import recipe as vit
from uncollapse.lab.experiments.vit import training as image_training
from uncollapse.lab.experiments.vit.recipe import Config
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.runs.results import Results
from uncollapse.lab.runs.run_one import run_one

torchvision_ops.declare()
pytest.importorskip("timm")
pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

SMALL = Config(  # all that is random is on: a checkpoint has to hold it
    data="digits",
    examples=120,
    holdout=0.2,
    model="vit_tiny_patch16_224",
    width=24,
    heads=2,
    depth=2,
    image=16,
    patch=4,
    init="xavier",
    epochs=2,
    batch=20,
    accumulate=2,
    lr=3e-3,
    warmup=0.5,
    drop_path=0.2,
    erasing=0.25,
    repeats=2,
    ema=0.5,
)
DIVERSE = replace(SMALL, cure="none", mixup=0.0, cosine_loss=0.5, contrast_loss=0.5, mixing_loss=0.5)
DIAGNOSED = 20  # images
SAME = ("figures", "epochs", "ended", "diagnosis", "spectrum")  # of a record, whatever happened on the way
CHILD = """
import sys
from pathlib import Path
from uncollapse.lab.experiments.vit.recipe import Config, run
from uncollapse.lab.engine.runtime import Runtime
def told(done, total, figures):
    print(done, flush=True)
    if done == 5:
        sys.stdin.read()  # until it is killed
runtime = Runtime(checkpoints=Path(sys.argv[1]), save_seconds=0.0, device="cpu", workers=2, progress=told)
run(Config(**{config}), runtime)
"""


def outcome(config: Config, **runtime: Any) -> dict[str, Any]:
    record = vit.run(config, Runtime(device="cpu", **runtime))
    return {name: record[name] for name in SAME} | {"data": record["data"]}


@pytest.fixture(scope="module", autouse=True)
def _few_are_diagnosed() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_training, "DIAGNOSED", DIAGNOSED)
        yield


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return outcome(SMALL)


def pressed(at: int) -> Any:
    """Ctrl-C after so many steps."""

    def press(done: int, total: int, figures: Any) -> None:
        if done == at:
            os.kill(os.getpid(), signal.SIGINT)

    return press


def test_it_learns() -> None:
    gentle: dict[str, Any] = {
        "auto_augment": "",
        "crop": "padded",
        "erasing": 0.0,
        "mixup": 0.0,
        "cutmix": 0.0,
        "smoothing": 0.0,
    }
    still: dict[str, Any] = {"drop_path": 0.0, "ema": 0.0, "repeats": 1, "accumulate": 1}
    config = replace(SMALL, examples=200, epochs=10, patch=8, width=48, **gentle, **still)
    record = vit.run(config, Runtime(device="cpu"))
    losses = [figures["loss"] for figures in record["epochs"]]
    assert losses[-1] < losses[0] - 0.15
    assert record["figures"]["test"] > 0.2  # chance is 0.1, with a deviation of 0.017 on 300 images
    assert record["figures"]["validation"] == record["epochs"][-1]["validation"]


def test_what_a_record_has(whole: dict[str, Any]) -> None:
    sizes = {name: whole["data"][name] for name in ("train", "validation", "test")}
    assert sizes == {"train": 120, "validation": 24, "test": 300}
    assert whole["data"]["skipped"] == {"train": 0, "validation": 0, "test": 0}
    assert {"test", "validation", "mean_cosine", "attention_std", "effective_rank"} <= set(whole["figures"])
    blocks = [layer["name"] for layer in whole["diagnosis"]["after"]["layers"]]
    assert any(name.startswith("block") for name in blocks)
    assert whole["spectrum"] == sorted(whole["spectrum"], reverse=True)
    json.dumps(whole)


def test_the_best_epoch_is_recorded_next_to_the_result() -> None:
    config = replace(SMALL, epochs=4, lr=3e-2, ema=0.0, test_each_epoch=True, head=12)
    record = outcome(config)
    each = [epoch["test"] for epoch in record["epochs"]]
    assert record["figures"]["test_max"] == max(each)
    assert record["figures"]["test"] == each[-1]
    assert "test_max" not in outcome(replace(SMALL, epochs=1))["figures"]
    assert all(table.metric == "test" for table in vit.RECIPE.tables.values())


def test_released_presets_have_what_the_code_has() -> None:
    released, contra = (vit.RECIPE.presets[name] for name in ("released-diversepatch", "paper-contranorm"))
    losses = {name: released[name] for name in ("cosine_loss", "contrast_loss", "mixing_loss", "mix_twice")}
    assert losses == {"cosine_loss": 0.0, "contrast_loss": 1.0, "mixing_loss": 1.0, "mix_twice": True}
    assert (contra["head"], contra["test_each_epoch"]) == (1000, True)


@pytest.mark.parametrize(("workers", "at"), [(0, 2), (2, 4)])
def test_ctrl_c_and_on_to_the_same_end(tmp_path: Path, whole: dict[str, Any], workers: int, at: int) -> None:
    with pytest.raises(KeyboardInterrupt, match=f"epoch {1 + at // 3}"):
        outcome(SMALL, checkpoints=tmp_path, workers=workers, progress=pressed(at))
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{at:09d}"]
    assert outcome(SMALL, checkpoints=tmp_path, workers=workers) == whole


def test_the_losses_of_diverse_patch_go_on_to_the_same_end(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        outcome(DIVERSE, checkpoints=tmp_path, progress=pressed(4))
    assert outcome(DIVERSE, checkpoints=tmp_path) == outcome(DIVERSE)


def test_kill_9_and_on_to_the_same_end(tmp_path: Path, whole: dict[str, Any]) -> None:
    code = CHILD.replace("{config}", repr(asdict(SMALL)))
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    steps = [int(line) for line in iter(child.stdout.readline, "5\n")]
    child.kill()
    child.communicate()
    assert steps == [1, 2, 3, 4]
    assert max(tmp_path.glob("step-*")).name == "step-000000004"
    assert outcome(SMALL, checkpoints=tmp_path) == whole


def test_pictures_of_steps_that_were_done_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, asked = replace(SMALL, holdout=0.0, repeats=1), 0
    real = ArrayImages.image

    def counted(self: ArrayImages, number: int) -> Any:
        nonlocal asked
        asked += 1
        return real(self, number)

    monkeypatch.setattr(ArrayImages, "image", counted)
    with pytest.raises(KeyboardInterrupt):
        outcome(config, checkpoints=tmp_path, progress=pressed(5))
    assert asked == DIAGNOSED + 5 * 40  # what is diagnosed before, and five steps of two batches
    asked = 0
    outcome(config, checkpoints=tmp_path)
    assert asked == DIAGNOSED + 40 + DIAGNOSED + 300  # the last step, and at the end the test images


def test_it_is_found_by_name() -> None:
    recipe = RECIPES["vit"]
    assert recipe.reads_images
    assert not RECIPES["vit-digits"].reads_images
    assert recipe.name_of(SMALL).startswith("digits-vit_tiny_patch16_224-L2-contra_norm-s0.2")
    assert recipe.cost(replace(SMALL, depth=24)) > recipe.cost(SMALL) > 0
    assert identity("vit", SMALL) != identity("vit", replace(SMALL, cure="none"))


def test_rows_tell_weights_apart() -> None:
    def row(**changes: Any) -> str:
        return vit.variant(asdict(Config(mixup=0.0, **changes)))

    three = {"cosine_loss": 1.0, "contrast_loss": 1.0, "mixing_loss": 1.0}
    assert (row(cure="none"), row(cure="none", **three), row(**three)) == (
        "none",
        "DiversePatch",
        "contra_norm + DiversePatch",
    )
    assert row(cure="none", **{**three, "cosine_loss": 0.5}) == "cosine loss × 0.5 + contrast loss + mixing loss"


def test_presets_name_all_but_the_data() -> None:
    named = set(asdict(Config())) - {"data", "class_list"}
    papers = [name for name in vit.RECIPE.presets if name != "small"]
    assert papers == ["paper-contranorm", "paper-diversepatch", "released-diversepatch", "paper-diversepatch-longer"]
    for name in papers:
        assert set(vit.RECIPE.presets[name]) == named
    longer = vit.RECIPE.presets["paper-diversepatch-longer"]
    assert (longer["epochs"], longer["drop_path"]) == (100, 0.75)
    with pytest.raises(UsageError, match=r"FOLDER-KEPT.* does not exist\. Name .* --start"):
        vision.build(Config(**{**longer, "depth": 1}), 10)


def test_the_cost_knows_the_sizes_that_a_name_tells() -> None:
    tiny, base = (vit.cost(Config(model=f"deit_{size}_patch16_224")) for size in ("tiny", "base"))
    assert 10 < base / tiny < 20
    assert vit.cost(Config(model="vit_base_patch32_224")) < base / 3


def test_a_result_of_other_pictures_is_not_taken_for_this_run(tmp_path: Path) -> None:
    recipe, results = RECIPES["vit"], Results(tmp_path / "results")
    few = replace(SMALL, data=".", examples=0, holdout=0.0, epochs=1, batch=2, accumulate=1, ema=0.0, warmup=None)
    for name, shade in (("one", 50), ("other", 9)):
        for place in ("train/ant", "train/bee", "val/ant", "val/bee"):
            (tmp_path / name / place).mkdir(parents=True)
            for number in range(3):
                picture = Image.new("RGB", (16, 16 + shade), (shade, number, 0))
                picture.save(tmp_path / name / place / f"{number}.png")
    runtimes = [Runtime(tmp_path / name, device="cpu") for name in ("one", "other", "none")]
    record, new = run_one(recipe, few, results, runtimes[0])
    assert new
    assert run_one(recipe, few, results, runtimes[0]) == (record, False)
    assert run_one(recipe, few, results, runtimes[2]) == (record, False), "pictures that are away are no other ones"
    with pytest.raises(UsageError, match="other data"):
        run_one(recipe, few, results, runtimes[1])
    assert run_one(recipe, few, results, runtimes[1], again=True)[1]
    assert vit.RECIPE.same_data(few, runtimes[0], {"figures": {}})  # a run that did not stay finite
