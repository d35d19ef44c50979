import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from uncollapse.losses import cutmix_patches


def numbered(batch: int, height: int, width: int) -> Tensor:
    """Images whose pixels hold the number of their image, so that origins can be counted afterwards."""
    return torch.arange(batch, dtype=torch.float32)[:, None, None, None].expand(batch, 3, height, width).clone()


def counted(images: Tensor, labels: Tensor, patch: tuple[int, int], classes: int) -> Tensor:
    """Labels (B, n, C) from the origin of every pixel."""
    b, _, height, width = images.shape
    n_rows, n_columns = height // patch[0], width // patch[1]
    out = torch.zeros(b, n_rows * n_columns, classes)
    for i, r, c in itertools.product(range(b), range(height), range(width)):
        place = (r // patch[0]) * n_columns + c // patch[1]
        out[i, place, labels[int(images[i, 0, r, c])]] += 1 / (patch[0] * patch[1])
    return out


def test_every_box_on_a_small_image() -> None:
    labels = torch.tensor([2, 0])
    images = numbered(2, 6, 4)
    for top, left in itertools.product(range(7), range(5)):
        for bottom, right in itertools.product(range(top, 7), range(left, 5)):
            mix = cutmix_patches(images, labels, (3, 2), num_classes=3, box=(top, bottom, left, right))
            inside = torch.zeros(6, 4, dtype=torch.bool)
            inside[top:bottom, left:right] = True
            assert torch.equal(mix.images, torch.where(inside, images.flip(0), images))
            torch.testing.assert_close(mix.labels, counted(mix.images, labels, (3, 2), 3))


@pytest.mark.parametrize("patch", [5, (3, 7), (15, 1)])
def test_random_boxes_at_odd_sizes(patch: int | tuple[int, int]) -> None:
    labels = torch.tensor([1, 3, 0])
    size = (patch, patch) if isinstance(patch, int) else patch
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        mix = cutmix_patches(numbered(3, 15, 35), labels, patch, num_classes=4, generator=generator)
        assert mix.labels.shape == (3, 15 * 35 // (size[0] * size[1]), 4)
        torch.testing.assert_close(mix.labels, counted(mix.images, labels, size, 4))
        assert mix.partner.tolist() == [2, 1, 0]
        assert torch.equal(mix.images[1], numbered(3, 15, 35)[1])  # the middle image is its own partner


def test_mean_label_is_the_share_of_pixels() -> None:
    mix = cutmix_patches(numbered(2, 8, 8), torch.tensor([0, 1]), 4, num_classes=2, box=(1, 6, 2, 7))
    torch.testing.assert_close(mix.labels.mean(1), torch.tensor([[39.0, 25], [25, 39]]) / 64)


def test_input_is_left_alone() -> None:
    images = numbered(2, 4, 4)
    cutmix_patches(images, torch.tensor([0, 1]), 2, num_classes=2, box=(0, 4, 0, 4))
    assert torch.equal(images, numbered(2, 4, 4))


def test_probabilities_as_labels() -> None:
    hard, images = torch.tensor([2, 0, 1]), numbered(3, 6, 6)
    soft = one_hot(hard, 3).double()
    a = cutmix_patches(images, hard, 3, num_classes=3, box=(0, 5, 1, 4))
    b = cutmix_patches(images, soft, 3, box=(0, 5, 1, 4))
    assert b.labels.dtype == torch.float64
    torch.testing.assert_close(a.labels.double(), b.labels)


def test_randomness_comes_from_the_generator() -> None:
    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return cutmix_patches(numbered(2, 32, 32), torch.tensor([0, 1]), 8, num_classes=2, generator=generator).images

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    torch.manual_seed(5)
    first = cutmix_patches(numbered(2, 32, 32), torch.tensor([0, 1]), 8, num_classes=2).images
    torch.manual_seed(5)
    assert torch.equal(first, cutmix_patches(numbered(2, 32, 32), torch.tensor([0, 1]), 8, num_classes=2).images)


def test_boxes_are_distributed_as_in_timm() -> None:
    """Mean pasted share against timm's procedure drawn independently: 4,000 boxes each, agreement within 4 errors."""
    size, draws = 64, 4000
    generator = torch.Generator().manual_seed(0)
    ours = []
    for _ in range(draws):
        mix = cutmix_patches(numbered(2, size, size), torch.tensor([0, 1]), size, num_classes=2, generator=generator)
        ours.append(float(mix.labels[0, 0, 1]))
    random = np.random.default_rng(1)
    theirs = []
    for _ in range(draws):
        cut = int(size * np.sqrt(1 - random.beta(1.0, 1.0)))
        cy, cx = random.integers(0, size, 2)
        rows = np.clip(cy + cut // 2, 0, size) - np.clip(cy - cut // 2, 0, size)
        columns = np.clip(cx + cut // 2, 0, size) - np.clip(cx - cut // 2, 0, size)
        theirs.append(rows * columns / size**2)
    error = np.sqrt((np.var(ours) + np.var(theirs)) / draws)
    assert abs(np.mean(ours) - np.mean(theirs)) < 4 * error
    assert np.quantile(ours, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(theirs, [0.1, 0.5, 0.9]), abs=0.03)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": numbered(2, 10, 8)}, "multiples of patch_size"),
        ({"images": torch.zeros(2, 8, 8)}, r"\(B, channels, H, W\)"),
        ({"labels": torch.tensor([0, 1, 1])}, "B = 2"),
        ({"labels": torch.tensor([[0], [1]])}, "of class indices"),
        ({"labels": torch.tensor([0.0, 1.0])}, "of probabilities"),
        ({"num_classes": None}, "num_classes"),
        ({"alpha": 0.0, "box": None}, "alpha must be positive"),
        ({"box": (0, 9, 0, 4)}, "8 by 8 pixels"),
        ({"box": (4, 2, 0, 4)}, "top, bottom, left, right"),
        ({"patch_size": 0}, "multiples of patch_size"),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"images": numbered(2, 8, 8), "labels": torch.tensor([0, 1]), "patch_size": 4}
    with pytest.raises(ValueError, match=message):
        cutmix_patches(**(good | {"num_classes": 2, "box": (0, 4, 0, 4)} | change))  # type: ignore[arg-type]
