"""Depth from a frozen encoder: scenes, errors by hand, and what cannot be had."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.data.image.depth_maps import Scenes
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive.config import ContrastConfig
from uncollapse.lab.experiments.depth_probe import config as depth_probing
from uncollapse.lab.experiments.depth_probe.config import Config
from uncollapse.lab.experiments.depth_probe.recipe import DepthTraining
from uncollapse.lab.runs import saved_models

TINY = Config(data="rendered", examples=10, width=0.03, side=16, map_side=4, head_width=4, batch=3)


def training(config: Config = TINY) -> DepthTraining:
    begun = depth_probing.load_frozen_encoder(config)
    return DepthTraining(begun.encoder, config, depth_probing.load_scenes(config, Runtime(), begun.side))


def test_the_last_scenes_are_held_back() -> None:
    parts = depth_probing.load_scenes(replace(TINY, holdout=0.3), Runtime(), 16)
    whole = depth_probing.render_scenes(10, 16, 4)
    assert torch.equal(parts["train"].images, whole.images[:7])
    assert torch.equal(parts["test"].depths, whole.depths[7:])
    assert (
        len(depth_probing.load_scenes(replace(TINY, examples=0), Runtime(), 16)["test"].images) == 60
    )  # a fifth of 300


def test_a_random_encoder_depends_on_the_seed_alone() -> None:
    first, again = (
        depth_probing.load_frozen_encoder(TINY),
        depth_probing.load_frozen_encoder(replace(TINY, epochs=3, layer="conv4")),
    )
    assert (
        first.fingerprint == again.fingerprint != depth_probing.load_frozen_encoder(replace(TINY, seed=1)).fingerprint
    )
    assert (first.side, depth_probing.load_frozen_encoder(replace(TINY, side=0)).side) == (16, 64)
    assert not any(parameter.requires_grad for parameter in first.encoder.parameters())


def test_a_kept_encoder_sees_pictures_of_its_own_size(tmp_path: Path) -> None:
    config = ContrastConfig(width=0.03, side=20, dim=4)
    encoder = contrastive.build_encoder(config)
    saved_models.save_weights(Runtime(save_to=tmp_path / "model"), encoder, config)
    probe = replace(TINY, start=str(tmp_path / "model"), side=0)
    begun = depth_probing.load_frozen_encoder(probe)
    assert begun.side == 20
    assert torch.equal(begun.encoder.conv1[0].weight, encoder.conv1[0].weight)
    before = depth_probing.data_fingerprint(probe, Runtime())
    saved_models.save_weights(
        Runtime(save_to=tmp_path / "model"), contrastive.build_encoder(replace(config, seed=1)), config
    )
    assert depth_probing.data_fingerprint(probe, Runtime()) != before  # other weights in the same place
    assert replace(probe, width=0.5) == probe


class Still(torch.nn.Module):
    """A head that says the same of all scenes, in units of the spread."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value))

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(maps), 4, 4)


def test_errors_by_hand() -> None:
    made = training()
    train, test = made.splits["train"].depths, made.splits["test"].depths
    found = made.evaluate(Still(0.5))
    metres = (test - (train.mean() + 0.5 * train.std())).square().mean()
    blind = (test - train.mean(0)).square().mean()
    assert found["mse_metres"] == pytest.approx(float(metres), rel=1e-5)
    assert found["mse"] == pytest.approx(float(metres / train.var()), rel=1e-5)
    assert found["mean_map_mse"] == pytest.approx(float(blind / train.var()), rel=1e-5)
    assert found["explained"] == pytest.approx(float(1 - metres / blind), rel=1e-4)
    places = torch.tensor([1, 4])
    wanted = (train[places] - train.mean()) / train.std()
    torch.testing.assert_close(made.loss(Still(0.5), places), (wanted - 0.5).square().mean())


def test_epochs_have_all_scenes_in_another_order() -> None:
    made = training()
    first, again, second = (torch.cat(made.batches(epoch)).tolist() for epoch in (1, 1, 2))
    assert sorted(first) == list(range(8))
    assert first == again != second


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer": "fc7"}, "fc7"),
        ({"layer": "layer4"}, "layer4"),
        ({"holdout": 0.001}, "holdout"),
        ({"start": "nowhere"}, "nowhere"),
        ({"data": "nyu.mat"}, "nyu"),
    ],
)
def test_what_cannot_be_had(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        training(replace(TINY, **changes))


def test_a_step_of_one_scene_needs_maps_of_some_pixels() -> None:
    config = replace(TINY, batch=7)  # of 16 pixels conv5 leaves one
    for wrong in (config, replace(config, layer="conv2", map_side=1)):
        with pytest.raises(UsageError, match="another batch"):
            training(wrong)
    assert training(replace(config, layer="conv2"))


def test_settings_that_say_what_the_defaults_do_make_no_other_run() -> None:
    plain = Config(data="rendered")
    assert Config(data="rendered", side=64, examples=300) == plain
    assert Config(data="rendered", side=64, examples=301) != plain
    kept = Config(start="kept", side=64, examples=300)
    assert (kept.side, kept.examples) == (64, 300)  # its own pictures may have another side, and a file more scenes


def test_flat_scenes_and_small_sides() -> None:
    flat = Scenes(torch.zeros(4, 3, 16, 16, dtype=torch.uint8), torch.ones(4, 4, 4))
    with pytest.raises(UsageError, match="nothing to"):
        DepthTraining(depth_probing.load_frozen_encoder(TINY).encoder, TINY, {"train": flat, "test": flat})
    with pytest.raises(UsageError, match="15 pixels"):
        Config(side=7)
