"""How small encoders are judged: every picture of a part that can be read counts, once."""

from typing import Any

import pytest
import torch
from tests.lab.data.image.test_two_views import Growing
from tests.lab.experiments.contrastive.tiny_images import pictures

from uncollapse.errors import UsageError
from uncollapse.lab.data.image import image_sets
from uncollapse.lab.data.image.image_source import Images, ImageSet
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.experiments.contrastive import training as contrast_training
from uncollapse.lab.experiments.contrastive.config import Data
from uncollapse.lab.experiments.contrastive.training import EncoderTraining

TINY: dict[str, Any] = {"width": 0.02, "dim": 4, "side": 16, "judged": "whole"}


def training(train: Images, validation: Images, test: Images) -> EncoderTraining:
    config = contrast.Config(**TINY)
    parts = {"train": train, "validation": validation, "test": test}
    data = Data(ImageSet("made", train, test, {}), train, parts)
    return EncoderTraining(contrastive.build_encoder(config), config, data, Runtime(), lambda x, y, labels: x.sum())


@pytest.mark.parametrize("at_once", [4, 5, 100])
def test_pairs_leave_out_no_picture(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrast_training, "EVALUATION_BATCH", at_once)
    made = training(pictures(6), pictures(10), pictures(6))
    x, y = made.pairs(made.encoder, "validation")
    assert x.shape == y.shape == (10, 4)
    assert len({tuple(row) for row in x.tolist()}) == 10  # ten different pictures


def test_pictures_that_cannot_be_read_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrast_training, "EVALUATION_BATCH", 4)
    source = Growing(9, broken=(2, 5))  # of different sizes: not held in memory
    torn = Images.all_of(source, torch.arange(9) % 3, ("red", "green", "blue"))
    made = training(pictures(6), torn, pictures(6, broken=(1,)))
    for _ in range(2):
        assert len(made.pairs(made.encoder, "validation")[0]) == 7
    assert made.skipped == {"validation": 2}
    rows = made.features(made.encoder, "test", ("output",))
    assert rows["labels"].tolist() == [0, 2, 0, 1, 2]
    assert len(rows["output"]) == 5
    assert made.skipped == {"validation": 2, "test": 1}


def test_a_part_of_which_nothing_can_be_read() -> None:
    made = training(pictures(6), pictures(6), pictures(2, broken=(0, 1)))
    with pytest.raises(UsageError, match="2 test"):
        made.features(made.encoder, "test")


@pytest.mark.parametrize("settings", [{"holdout": 0.01}, {"examples": 4, "holdout": 0.5}])
def test_too_few_pictures_are_told_before_training(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_sets, "load_image_set", lambda *_: ImageSet("made", pictures(100), pictures(6), {}))
    with pytest.raises(UsageError, match="5 train"):
        contrastive.load_data(contrast.Config(**TINY | settings), Runtime())
