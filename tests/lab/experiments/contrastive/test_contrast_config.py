"""Contrastive encoders of images."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.experiments.contrastive.tiny_images import pictures

from uncollapse.errors import UsageError
from uncollapse.lab.data.image.image_source import ImageSet
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.contrastive import circle
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.experiments.contrastive.training import EncoderTraining, hypersphere_metrics, infonce_metrics
from uncollapse.lab.models.image_encoder import ALEXNET_LAYERS
from uncollapse.lab.recipe import RECIPES
from uncollapse.lab.tables.paper_table import build_cells

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")
TINY: dict[str, Any] = {
    "data": "digits",
    "width": 0.03,
    "dim": 8,
    "side": 16,
    "epochs": 2,
    "batch": 128,
    "judged": "whole",
}


def run(**settings: Any) -> dict[str, Any]:
    return contrast.RECIPE.run(contrast.Config(**TINY | settings))


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return run()


def test_a_record_has_what_the_paper_judges_by(record: dict[str, Any]) -> None:
    figures = record["figures"]
    judges = {
        f"{part}_{layer}_{probe}"
        for part in ("validation", "test")
        for layer in ("output", "fc7")
        for probe in ("linear", "knn")
    }
    assert judges | {"alignment", "uniformity", "optimum", "information"} <= figures.keys()
    assert figures["optimum"] <= figures["uniformity"] + 0.5
    assert [layer["name"] for layer in record["diagnosis"]["after"]["layers"]] == list(ALEXNET_LAYERS)
    assert [each["epoch"] for each in record["epochs"]] == [1, 2]
    assert record["epochs"][-1]["uniformity"] == figures["uniformity"]


def test_a_run_can_be_repeated_to_the_bit(record: dict[str, Any]) -> None:
    again = run()
    assert again["figures"] == record["figures"]
    assert again["epochs"] == record["epochs"]
    assert run(seed=1)["figures"] != record["figures"]


def test_a_run_that_was_interrupted_ends_the_same(record: dict[str, Any], tmp_path: Path) -> None:
    def told(done: int, total: int, figures: Any) -> None:
        if done == 13:  # within the second epoch
            raise RuntimeError("killed")

    runtime = Runtime(checkpoints=tmp_path / "run", save_seconds=0.0, progress=told)
    with pytest.raises(RuntimeError, match="killed"):
        contrast.RECIPE.run(contrast.Config(**TINY), runtime)
    gone_on = contrast.RECIPE.run(contrast.Config(**TINY), dataclasses.replace(runtime, progress=None))
    assert gone_on["figures"] == record["figures"]


def test_alignment_alone_collapses_and_uniformity_alone_does_not() -> None:
    aligned = run(contrast=0.0, align=1.0, epochs=6)
    spread = run(contrast=0.0, uniform=1.0, epochs=6)
    assert aligned["figures"]["alignment"] < 0.1
    assert aligned["figures"]["uniformity"] > -0.3
    assert spread["figures"]["uniformity"] < -1.0
    assert spread["figures"]["alignment"] > 5 * aligned["figures"]["alignment"]
    assert aligned["diagnosis"]["after"]["layers"][-1]["mean_cosine"] > 0.9


def test_pairs_are_the_same_for_every_encoder_and_leave_random_numbers_alone() -> None:
    config = contrast.Config(**TINY)
    data = contrastive.load_data(config, Runtime())
    training = EncoderTraining(contrastive.build_encoder(config), config, data, Runtime(), lambda x, y, labels: x.sum())
    before = torch.get_rng_state()
    x, y = training.pairs(training.encoder, "validation")
    assert torch.equal(torch.get_rng_state(), before)
    assert x.shape == y.shape == (150, 8)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(150))
    assert torch.equal(training.pairs(training.encoder, "validation")[0], x)
    assert float(hypersphere_metrics(x, x)["alignment"]) == 0.0
    assert 0 <= infonce_metrics(x, y)["information"] <= 5.01  # at most log 150


def test_features_come_in_the_order_of_the_pictures() -> None:
    config = contrast.Config(**TINY)
    data = contrastive.load_data(config, Runtime())
    training = EncoderTraining(contrastive.build_encoder(config), config, data, Runtime(), lambda x, y, labels: x.sum())
    rows = training.features(training.encoder, "validation", ("conv3", "fc7", "output"))
    assert torch.equal(rows["labels"], data.splits["validation"].labels)
    assert rows["conv3"].dim() == rows["fc7"].dim() == 2
    torch.testing.assert_close(rows["output"].norm(dim=1), torch.ones(150))


def test_what_is_held_back_is_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from uncollapse.lab.data.image import image_sets
    from uncollapse.lab.data.image.image_source import ImageSet

    found = pictures(40)
    found.labels[30:] = -1  # without labels
    monkeypatch.setattr(image_sets, "load_image_set", lambda *_: ImageSet("made", found, pictures(6), {}))
    config = contrast.Config(**TINY | {"data": "stl10", "unlabelled": True})
    data = contrastive.load_data(config, Runtime())
    assert (len(data.learned), len(data.splits["train"]), len(data.splits["validation"])) == (37, 27, 3)
    assert not set(data.learned.numbers.tolist()) & set(data.splits["validation"].numbers.tolist())
    assert set(range(30, 40)) <= set(data.learned.numbers.tolist())


def test_only_stl10_has_pictures_without_labels() -> None:
    with pytest.raises(UsageError, match="stl10"):
        run(unlabelled=True)


def test_falls_are_shares() -> None:
    with pytest.raises(UsageError, match="falls"):
        contrast.Config(falls=(155.0,))


def test_presets_and_names() -> None:
    paper = contrast.Config(**contrast.RECIPE.presets["paper-stl10"])
    assert (paper.width, paper.side, paper.batch, paper.epochs, paper.lr) == (1.0, 64, 768, 200, 0.12)
    assert contrast.name_of(paper) == "stl10-a0.98-alpha2+u0.96-t2-b768-d128-seed0"
    table = contrast.RECIPE.tables["fc7"]
    assert (
        next(n.mean for n in table.published if n.cell[table.rows] == contrast.row_of(dataclasses.asdict(paper)))
        == 84.43
    )


def test_the_grid_has_at_least_sixteen_encoders() -> None:
    trials = [
        trial
        for grid in contrast.RECIPE.grids["cifar10"]
        for cell in grid.cells(contrast.Config)
        for trial in cell.trials
    ]
    assert len(set(trials)) >= 16


@pytest.mark.parametrize("learned", circle.LEARNED)
def test_features_on_the_circle(learned: str) -> None:
    settings = {name: value for name, value in TINY.items() if name != "dim"}
    record = circle.RECIPE.run(circle.Config(learned=learned, **settings))
    assert {"alignment", "uniformity", "validation", "test"} <= record["figures"].keys()
    assert len(record["circle"]["angles"]) == len(record["circle"]["labels"]) == 150
    assert sum(record["circle"]["distances"]) == 150
    assert bool(record["epochs"]) == (learned != "random")


def test_recipes_are_registered_with_a_quick_run() -> None:
    for name in ("contrast", "circle"):
        assert RECIPES[name].quick is not None
        assert RECIPES[name].quick["data"] == "digits"


def test_an_encoder_may_be_judged_as_it_is_drawn() -> None:
    record = run(epochs=0, contrast=0.0, align=1.0, batch=64, lr=0.5)
    assert record["epochs"] == []
    assert record["ended"] == "untrained"
    config = contrast.Config(**TINY | {"epochs": 0})
    assert record["config"] == dataclasses.asdict(config)  # what it would be trained for makes no other run
    assert contrast.name_of(config) == "digits-untrained-d8-seed0"


def test_a_folder_of_nothing_but_pictures_is_learned_from_and_not_judged_by_classes(tmp_path: Path) -> None:
    from PIL import Image

    for at in range(24):
        place = tmp_path / "mine" / ("a" if at % 2 else "b")
        place.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((20 + at, 24), 40.0 + at).convert("RGB").save(place / f"{at}.png")
    settings = TINY | {"data": "mine", "batch": 8, "holdout": 0.25}
    record = contrast.RECIPE.run(contrast.Config(**settings), Runtime(data_root=tmp_path))
    assert {"alignment", "uniformity", "information"} <= record["figures"].keys()
    assert not any("linear" in name or "knn" in name for name in record["figures"])
    assert (record["data"]["train"], record["data"]["validation"]) == (18, 6)
    assert build_cells(contrast.RECIPE.tables["output"], [record]) == build_cells(contrast.RECIPE.tables["output"], [])
    with pytest.raises(UsageError, match="train/CLASS"):
        contrastive.load_data(contrast.Config(**settings), Runtime(data_root=tmp_path))


def test_a_batch_beyond_the_pictures_is_told() -> None:
    with pytest.raises(UsageError, match="1347"):
        run(batch=2000)


def test_the_preset_of_stl10_is_the_authors() -> None:
    """Weights from N(0, 0.02²), STL-10's pixels, all labels, the last images of an epoch, 64 of 70 pixels, crops."""
    paper = contrast.Config(**contrast.RECIPE.presets["paper-stl10"])
    assert (paper.init, paper.holdout, paper.partial_batch, paper.judged) == ("normal", 0.0, True, "published")
    spec = paper.input_spec
    assert spec.mean == pytest.approx((0.44088, 0.42791, 0.38679), abs=1e-5)
    assert spec.std == pytest.approx((0.26827, 0.26105, 0.26867), abs=1e-5)
    weight = contrastive.build_encoder(dataclasses.replace(paper, width=0.5)).conv1[0].weight
    assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    table = contrast.RECIPE.tables["output"]
    record = {"config": dataclasses.asdict(paper), "seed": 0, "figures": {table.metric: 0.8}}
    ours = [dataclasses.replace(paper, init=init) for init in ("normal", "kaiming")]
    comparable = []
    for each in ours:
        cells = build_cells(table, [record | {"config": dataclasses.asdict(each)}])
        comparable.append(next(cell.comparable for cell in cells if cell.run))
    assert comparable == [True, False]


def test_the_preset_of_the_circle_has_the_full_width_and_256_negatives() -> None:
    paper = circle.Config(**circle.RECIPE.presets["paper"])
    assert (paper.width, paper.temperature, paper.batch - 1, paper.dim) == (1.0, 0.5, 256, 2)
    assert (paper.data, paper.init, paper.holdout, paper.learned) == ("cifar10", "normal", 0.0, "contrastive")


@pytest.mark.parametrize(("count", "sizes"), [(10, [4, 4, 2]), (9, [4, 4]), (8, [4, 4])])
def test_the_last_images_of_an_epoch_are_a_batch_if_wanted(count: int, sizes: list[int]) -> None:
    train = pictures(count)
    data = contrastive.Data(ImageSet("made", train, train, {}), train, {"train": train, "test": train})

    def batches(**settings: Any) -> list[int]:
        config = contrast.Config(**TINY | {"batch": 4} | settings)
        made = EncoderTraining(contrastive.build_encoder(config), config, data, Runtime(), lambda x, y, _: x.sum())
        return [len(batch) for batch in made.batches(1)]

    assert batches(partial_batch=True) == sizes  # one image has no negatives
    assert batches() == [4, 4]


def test_no_images_need_to_be_held_out() -> None:
    record = run(holdout=0.0, judged="published", epochs=1, examples=100, batch=50)
    sizes = {name: record["data"][name] for name in ("learned", "train", "test")}
    assert sizes == {"learned": 100, "train": 100, "test": 300}
    assert "validation" not in record["data"]
    assert {"alignment", "uniformity", "test_output_linear", "test_fc7_knn"} <= record["figures"].keys()
    assert not any("validation" in name for name in record["figures"])
    assert "alignment" not in record["epochs"][0]  # test images are read at the end


def test_a_linear_probe_as_published_sees_new_crops_in_each_epoch() -> None:
    config = contrast.Config(**TINY | {"judged": "published"})
    data = contrastive.load_data(config, Runtime())
    training = EncoderTraining(contrastive.build_encoder(config), config, data, Runtime(), lambda x, y, _: x.sum())
    fixed = training.features(training.encoder, "train", ("output",))
    rows_of = training.probe_rows(training.encoder, "output", (fixed["output"], fixed["labels"]))
    assert callable(rows_of)
    (first, labels), (second, _), (again, _) = rows_of(0), rows_of(1), rows_of(0)
    assert torch.equal(labels, fixed["labels"])
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    whole = EncoderTraining(training.encoder, contrast.Config(**TINY), data, Runtime(), lambda x, y, _: x.sum())
    assert whole.probe_rows(training.encoder, "output", (first, labels)) == (first, labels)


def test_new_crops_for_the_linear_probe_cost_time() -> None:
    whole, published = (contrast.Config(**TINY | {"judged": judged}) for judged in ("whole", "published"))
    assert contrastive.cost(published) > contrastive.cost(whole) + 100
