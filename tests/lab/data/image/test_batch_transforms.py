"""Random changes of whole batches: with the same numbers, each image comes out as torchvision has it."""

import pytest
import torch
from torch import Tensor

from uncollapse.backbones import torchvision_ops
from uncollapse.lab.data.image import batch_transforms as changes

torchvision_ops.declare()
functional = pytest.importorskip("torchvision.transforms.v2.functional")
BATCH = 16


@pytest.fixture
def images() -> Tensor:
    made = torch.rand(BATCH, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    made[0] = 0.5  # grey: without a hue
    made[1] = 0.0
    return made


def factors(seed: int = 1) -> Tensor:
    return 2 * torch.rand(BATCH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["adjust_brightness", "adjust_contrast", "adjust_saturation"])
def test_colors_change_as_torchvision_changes_them(images: Tensor, name: str) -> None:
    drawn = factors()
    wanted = [getattr(functional, name)(image, float(factor)) for image, factor in zip(images, drawn, strict=True)]
    torch.testing.assert_close(getattr(changes, name)(images, drawn), torch.stack(wanted), atol=1e-6, rtol=0)


def test_hues_turn_as_torchvision_turns_them(images: Tensor) -> None:
    turns = factors() / 2 - 0.5
    wanted = [functional.adjust_hue(image, float(turn)) for image, turn in zip(images, turns, strict=True)]
    torch.testing.assert_close(changes.adjust_hue(images, turns), torch.stack(wanted), atol=1e-5, rtol=0)


def test_crops_are_torchvisions(images: Tensor) -> None:
    torch.manual_seed(0)
    boxes = changes.RandomResizedCrop(20).boxes(BATCH, 24, 32, images.device)
    boxes[0] = torch.tensor([0, 0, 24, 32])
    boxes[1] = torch.tensor([23, 31, 1, 1])
    wanted = [
        functional.resized_crop(image, *map(int, box), [20, 20], antialias=False)
        for image, box in zip(images, boxes, strict=True)
    ]
    torch.testing.assert_close(changes.resized_crop(images, boxes, 20), torch.stack(wanted), atol=1e-5, rtol=0)


def test_blurs_are_torchvisions(images: Tensor) -> None:
    spread = factors() + 0.1
    wanted = [
        functional.gaussian_blur(image, [5, 5], [float(width)] * 2) for image, width in zip(images, spread, strict=True)
    ]
    torch.testing.assert_close(changes.gaussian_blur(images, spread, 2), torch.stack(wanted), atol=1e-5, rtol=0)


def test_boxes_lie_inside_and_have_the_areas_asked_for() -> None:
    torch.manual_seed(0)
    top, left, tall, wide = (
        changes.RandomResizedCrop(8, least_area=0.3).boxes(20_000, 64, 64, torch.device("cpu")).unbind(1)
    )
    assert bool((top >= 0).all() and (left >= 0).all() and (top + tall <= 64).all() and (left + wide <= 64).all())
    share = tall * wide / 64**2
    assert 0.25 < float(share.min()) < 0.35
    assert float(share.mean()) == pytest.approx(0.65, abs=0.03)  # a little less: what is too wide is cut
    assert 0.7 < float((wide / tall).min()) < float((wide / tall).max()) < 1.43


def test_each_image_has_numbers_of_its_own() -> None:
    torch.manual_seed(0)
    same = torch.rand(1, 3, 16, 16).expand(64, -1, -1, -1)
    for change in (changes.RandomResizedCrop(16), changes.ColorJitter(), changes.RandomGaussianBlur(16, 1.0)):
        changed = change(same).flatten(1)
        drawn = len({tuple(row.tolist()) for row in changed})
        assert drawn > 48, change  # a few are the same: whole pictures, blurs so narrow that they change nothing


@pytest.mark.parametrize("chance", [0.0, 0.25, 1.0])
def test_chances_are_kept(chance: float) -> None:
    torch.manual_seed(0)
    same = torch.rand(1, 3, 8, 8).expand(2000, -1, -1, -1)
    for change in (
        changes.RandomHorizontalFlip(chance),
        changes.RandomGrayscale(chance),
        changes.ColorJitter(chance=chance),
        changes.RandomGaussianBlur(8, chance),
    ):
        changed = (change(same) - same).abs().amax((1, 2, 3)) > 1e-4
        seen = 0.94 if isinstance(change, changes.RandomGaussianBlur) else 1.0  # the narrowest blurs change nothing
        assert float(changed.float().mean()) == pytest.approx(chance * seen, abs=0.03), change


def test_grey_images_have_one_color_and_mirrored_ones_their_order_turned(images: Tensor) -> None:
    grey = changes.RandomGrayscale(1.0)(images)
    torch.testing.assert_close(grey, functional.rgb_to_grayscale(images, 3))
    assert torch.equal(changes.RandomHorizontalFlip(1.0)(images), images.flip(-1))


def test_jitter_without_strength_does_nothing(images: Tensor) -> None:
    assert torch.equal(changes.ColorJitter(0.0, 0.0)(images), images)


def test_changes_go_along_with_torchvisions_own(images: Tensor) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    made = changes.compose([changes.RandomHorizontalFlip(1.0), v2.Normalize((0.5,) * 3, (0.5,) * 3)])
    torch.testing.assert_close(made(images), (images.flip(-1) - 0.5) / 0.5)
