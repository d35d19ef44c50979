"""Mixed images: soft labels, the labels of patches by counting pixels, and where the randomness comes from."""

import random
from collections.abc import Callable

import pytest
import torch
from tests.lab.experiments.vit.tiny_vision import images
from torch import Tensor

from uncollapse.lab.engine.seeding import get_random_state, set_random_state, use_seed
from uncollapse.lab.experiments.vit import soft_labels

CLASSES = 4
Make = Callable[..., soft_labels.Mixer]


def whole(**changes: float) -> soft_labels.Mixer:
    settings = {"mixup": 0.8, "cutmix": 1.0, "chance": 1.0, "switch": 0.5, "smoothing": 0.0} | changes
    return soft_labels.image_mixer(CLASSES, **settings)


def by_patch(patch: tuple[int, int] = (8, 8), **changes: float) -> soft_labels.Mixer:
    settings = {"cutmix": 1.0, "chance": 1.0, "smoothing": 0.0} | changes
    return soft_labels.patch_mixer(CLASSES, patch, **settings)


def twice(patch: tuple[int, int] = (8, 8), **changes: float) -> soft_labels.Mixer:
    return soft_labels.twice_mixer(whole(mixup=0.0, **changes), patch)


def labels(count: int) -> Tensor:
    return torch.arange(count) % CLASSES


def colored(count: int, height: int = 16, width: int = 24) -> Tensor:
    """Images of one color each, which tells where a pixel is from."""
    return torch.arange(float(count)).view(-1, 1, 1, 1).expand(count, 3, height, width).clone()


def test_smoothed_by_hand() -> None:
    found = soft_labels.smooth_labels(torch.tensor([1, 0]), 4, 0.2)
    torch.testing.assert_close(found, torch.tensor([[0.05, 0.85, 0.05, 0.05], [0.85, 0.05, 0.05, 0.05]]))


@pytest.mark.parametrize("mixer", [whole(mixup=0.0, cutmix=0.0, smoothing=0.1), whole(chance=0.0, smoothing=0.1)])
def test_nothing_to_mix_leaves_images_and_draws_nothing(mixer: soft_labels.Mixer) -> None:
    given = images(5)
    with use_seed(0):
        before = random.getstate(), torch.get_rng_state()
        mixed = mixer(given, labels(5))
        assert random.getstate() == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
    assert mixed.images is given
    assert torch.equal(mixed.labels, soft_labels.smooth_labels(labels(5), CLASSES, 0.1))
    assert mixed.patches is None


@pytest.mark.parametrize("count", [1, 2, 5, 6])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("make", [whole, by_patch, twice])
def test_labels_are_probabilities(make: Make, smoothing: float, count: int) -> None:
    with use_seed(0):
        mixed = make(smoothing=smoothing)(images(count), labels(count))
    kept = count if count == 1 or make is by_patch else count // 2 * 2  # timm mixes pairs
    assert (len(mixed.images), mixed.labels.shape) == (kept, (kept, CLASSES))
    torch.testing.assert_close(mixed.labels.sum(-1), torch.ones(kept))
    assert float(mixed.labels.min()) >= smoothing / CLASSES - 1e-6
    if mixed.patches is not None:
        assert mixed.patches.shape == (kept, 16, CLASSES)
        torch.testing.assert_close(mixed.patches.sum(-1), torch.ones(kept, 16))


def test_mixup_mixes_pixels_as_it_mixes_labels() -> None:
    with use_seed(1):
        mixed = whole(cutmix=0.0)(colored(4), labels(4))
    expected = mixed.labels @ torch.arange(4.0)  # image i has the color i and the label i
    torch.testing.assert_close(mixed.images, expected.view(-1, 1, 1, 1).expand_as(mixed.images))
    assert float((mixed.labels.max(-1).values).min()) < 1


def test_cutmix_of_timm_counts_pixels() -> None:
    with use_seed(2):
        mixed = whole(mixup=0.0)(colored(4), labels(4))
    shares = torch.stack([(mixed.images[:, 0] == color).float().mean((1, 2)) for color in range(4)], -1)
    torch.testing.assert_close(mixed.labels, shares)
    assert 0 < float(shares[0, 0]) < 1


@pytest.mark.parametrize("patch", [(8, 8), (4, 6), (16, 24), (2, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_patches_are_labelled_by_their_pixels(patch: tuple[int, int], seed: int) -> None:
    with use_seed(seed):
        mixed = by_patch(patch, smoothing=0.2)(colored(4), labels(4))
    assert mixed.patches is not None
    expected = []
    for image in mixed.images[:, 0]:
        for row in range(0, 16, patch[0]):
            for column in range(0, 24, patch[1]):
                pixels = image[row : row + patch[0], column : column + patch[1]].flatten()
                expected.append(torch.stack([(pixels == color).float().mean() for color in range(4)]))
    soft = torch.stack(expected).view(4, -1, 4) * 0.8 + 0.2 / 4
    torch.testing.assert_close(mixed.patches, soft)
    torch.testing.assert_close(mixed.labels, mixed.patches.mean(1))


def test_the_chance_and_the_switch() -> None:
    """Of 300 batches so many are mixed, and so many of them by CutMix, as the settings say."""
    given, ends = colored(2, 16, 16), labels(2)
    with use_seed(0):
        mixer = whole(chance=0.5, switch=0.25)
        found = [mixer(given.clone(), ends).images[0, 0] for _ in range(300)]
    cut = sum(bool(((image == 0) | (image == 1)).all() and image.any()) for image in found)
    blended = sum(bool(((image > 0) & (image < 1)).all()) for image in found)
    assert 120 < cut + blended < 180  # a CutMix box may be empty
    assert 15 < cut < 60
    with use_seed(0):
        mixer = by_patch(chance=0.3)
        moved = sum(not torch.equal(mixer(given, ends).images, given) for _ in range(300))
    assert 55 < moved < 125


def test_chance_0_and_1_of_patches() -> None:
    given = colored(4)
    with use_seed(0):
        left = by_patch(chance=0.0)(given, labels(4))
    assert torch.equal(left.images, given)
    assert left.patches is not None
    assert torch.equal(left.patches, soft_labels.smooth_labels(labels(4), CLASSES, 0.0)[:, None].expand(4, 6, 4))
    with use_seed(0):
        mixer = by_patch(chance=1.0)
        moved = [not torch.equal(mixer(given, labels(4)).images, given) for _ in range(20)]
    assert sum(moved) > 15  # a box may be empty


@pytest.mark.parametrize("seed", range(6))
def test_the_second_mix_is_of_whole_patches_of_any_two_images(seed: int) -> None:
    """Without a first one: a box stays, all patches around it are of one other image, and labels go with them."""
    with use_seed(seed):
        mixed = twice((4, 6), chance=0.0, smoothing=0.2)(colored(4), labels(4))
    assert mixed.patches is not None
    shares = []
    for number, (image, patches) in enumerate(zip(mixed.images[:, 0], mixed.patches, strict=True)):
        grid = image.reshape(4, 4, 4, 6).permute(0, 2, 1, 3).flatten(2)  # (rows, columns, pixels)
        assert (grid == grid[..., :1]).all()  # each patch is of one image
        colors = grid[..., 0].long()
        torch.testing.assert_close(patches, soft_labels.smooth_labels(colors.flatten(), 4, 0.2))
        own = colors == number
        assert len(colors[~own].unique()) <= 1
        if own.any() and not own.all():
            rows, columns = own.any(1).nonzero().flatten(), own.any(0).nonzero().flatten()
            assert own[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()  # what stays is a box
            shares.append(float(own.float().mean()))
    assert len(set(shares)) <= 1  # the same box for the whole batch
    torch.testing.assert_close(mixed.labels, mixed.patches.mean(1))


def test_after_two_mixes_an_image_may_have_parts_of_four() -> None:
    """The second partner is drawn anew: the image at the other end of the batch again would bring back the first."""
    with use_seed(0):
        mixer = twice((2, 2))
        found = [mixer(colored(8), labels(8)).images[:, 0] for _ in range(20)]
    assert max(len(image.unique()) for batch in found for image in batch) == 4


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.62, 0.999])
def test_boxes_of_patches_have_the_share_that_was_drawn(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "random", lambda: share)
    for _ in range(50):
        top, bottom, left, right = soft_labels._patch_box(14, 10)
        area = (bottom - top) * (right - left)
        assert 0 <= top <= bottom <= 14
        assert 0 <= left <= right <= 10
        assert int(140 * share) - 14 < area <= int(140 * share)


@pytest.mark.parametrize("make", [whole, by_patch, twice])
def test_a_resumed_run_mixes_the_same(make: Make) -> None:
    mixer = make(chance=0.7)
    with use_seed(0):
        for _ in range(3):
            mixer(images(), labels(4))
        state = get_random_state()
        expected = [mixer(images(), labels(4)) for _ in range(4)]
    with use_seed(9):
        set_random_state(*state)
        again = [make(chance=0.7)(images(), labels(4)) for _ in range(4)]
    for one, other in zip(expected, again, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
