"""Pictures -> tensors for models."""

from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.data.image.augmentation import (
    POLICY,
    InputSpec,
    evaluation_transform,
    posterize,
    training_transform,
)
from uncollapse.lab.engine.seeding import use_seed

LOOK = InputSpec(16, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def picture(width: int = 16, height: int = 16) -> Any:
    noise = numpy.random.default_rng(0).integers(0, 256, (height, width, 3), "uint8")
    return Image.fromarray(noise)


def trained(given: Any, seed: int, **changes: Any) -> Tensor:
    settings: dict[str, Any] = {
        "crop": "padded", "least_area": 0.3, "auto_augment": "", "color_jitter": 0.0, "erasing": 0.0
    }  # fmt: skip
    transform = training_transform(LOOK, **(settings | changes))
    with use_seed(seed):
        return transform(given)


def values(given: Any) -> Tensor:
    """All pixels, as the model gets them."""
    return (torch.from_numpy(numpy.array(given)).permute(2, 0, 1) / 255 - 0.5) / 0.25


def test_a_padded_crop_moves_the_picture_or_flips_it() -> None:
    given = values(picture())
    padded = torch.nn.functional.pad(given, (2, 2, 2, 2), value=-2.0)  # black
    moved = [padded[:, y : y + 16, x : x + 16] for y in range(5) for x in range(5)]
    expected = moved + [one.flip(2) for one in moved]
    for seed in range(12):
        found = trained(picture(), seed)
        assert any(torch.allclose(found, one, atol=1e-6) for one in expected)


def test_judging_a_padded_crop_takes_all_of_the_picture() -> None:
    judged = evaluation_transform(LOOK, crop="padded")
    assert torch.allclose(judged(picture()), values(picture()), atol=1e-6)
    wide = picture(40, 16)
    assert torch.allclose(judged(wide), values(wide.resize((16, 16), Image.Resampling.BICUBIC)), atol=1e-6)


def test_judging_otherwise_takes_the_middle() -> None:
    found = evaluation_transform(LOOK, crop="resized")(picture(36, 18))
    assert torch.allclose(found, values(picture(36, 18).crop((10, 1, 26, 17))), atol=1e-6)


def test_judging_as_published_resizes_to_70_pixels_and_takes_64() -> None:
    spec, given = InputSpec(64, LOOK.mean, LOOK.std, "bilinear"), picture(96, 96)
    found = evaluation_transform(spec, crop="published")(given)
    expected = values(given.resize((70, 70), Image.Resampling.BILINEAR).crop((3, 3, 67, 67)))
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"crop": "resized"},
        {"auto_augment": POLICY},
        {"auto_augment": "original"},
        {"auto_augment": "augmix-m5-w2"},
        {"color_jitter": 0.4},
        {"erasing": 1.0},
    ],
)
def test_augmentation_is_random_and_repeats_with_the_seed(changes: dict[str, Any]) -> None:
    given = picture(24, 20)
    found = torch.stack([trained(given, seed, **changes) for seed in range(6)])
    assert found.shape == (6, 3, 16, 16)
    assert torch.isfinite(found).all()
    assert torch.equal(found[3], trained(given, 3, **changes))
    assert len(found.unique(dim=0)) > 1
    assert not torch.equal(found, torch.stack([trained(given, seed) for seed in range(6)]))


def test_the_strongest_policy_runs() -> None:
    for seed in range(60):  # about one picture in ten keeps no bit of its colors
        assert torch.isfinite(trained(picture(), seed, auto_augment="rand-m10-mstd0.5-inc1-n4")).all()


def test_posterized() -> None:
    pixels = numpy.asarray(picture())
    assert not numpy.asarray(posterize(picture(), 0)).any()
    assert (numpy.asarray(posterize(picture(), 3)) == pixels & 0b11100000).all()
    assert (numpy.asarray(posterize(picture(), 8)) == pixels).all()


@pytest.mark.parametrize("policy", ["nonsense", "rand-m9-foo3", "rand-mx3.5.1"])
def test_a_policy_that_is_not_there(policy: str) -> None:
    with pytest.raises(UsageError, match=f"auto_augment.*{policy}"):
        trained(picture(), 0, auto_augment=policy)
