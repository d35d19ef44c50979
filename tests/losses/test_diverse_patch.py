import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import avg_pool2d, cosine_similarity, one_hot

from uncollapse.losses import cutmix_patches, patch_contrastive_loss, patch_cosine_loss, patch_mixing_loss


def patches(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair_mean(h: Tensor, absolute: bool) -> float:
    """Mean over i ≠ j of cos(h_i, h_j), one image, pair by pair; zero rows have cosine 0."""
    n = len(h)
    values = [float(cosine_similarity(h[i], h[j], dim=0)) for i in range(n) for j in range(n) if i != j]
    return sum(abs(v) if absolute else v for v in values) / max(n * (n - 1), 1)


def contrast(e: Tensor, h: Tensor, negative: str, grid: tuple[int, int] | None = None) -> float:
    """One image, patch by patch, from the definitions."""
    n, total = len(h), 0.0
    for i in range(n):
        others = [h[j] for j in range(n) if j != i]
        means = [torch.stack(list(h) if negative == "all" else others).mean(0)]
        if grid is not None:
            r, c = divmod(i, grid[1])
            near = [j for j in range(n) if max(abs(j // grid[1] - r), abs(j % grid[1] - c)) <= 3 and j != i]
            means.append(h[near].sum(0) / 48)
        a = float(e[i] @ h[i])
        total += math.log(math.fsum([1.0, *[math.exp(float(e[i] @ m) - a) for m in means]]))
    return total / n


@pytest.mark.parametrize("absolute", [False, True])
def test_cosine_is_the_mean_over_pairs_and_images(absolute: bool) -> None:
    h = patches(2, 3, 6, 4)
    h[1, 1, 2] = 0
    expected = sum(pair_mean(image, absolute) for image in h.flatten(0, 1)) / 6
    assert patch_cosine_loss(h, absolute=absolute).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("absolute", [False, True])
def test_cosine_mask_deletes_patches(absolute: bool) -> None:
    h = patches(3, 6, 4)
    mask = torch.tensor([[True] * 6, [True, False, True, True, False, True], [False] * 5 + [True]])
    h[~mask] = torch.nan
    h.requires_grad_()
    got = patch_cosine_loss(h, absolute=absolute, mask=mask)
    expected = sum(pair_mean(h.detach()[i][mask[i]], absolute) for i in range(3)) / 3
    assert got.item() == pytest.approx(expected, rel=1e-12)
    got.backward()
    assert h.grad[~mask].abs().max() == 0
    assert h.grad.isfinite().all()


@pytest.mark.parametrize("absolute", [False, True])
def test_cosine_gradcheck_and_degenerate(absolute: bool) -> None:
    h = patches(2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda h: patch_cosine_loss(h, absolute=absolute), (h,))
    assert patch_cosine_loss(torch.ones(5, 3), absolute=absolute).item() == pytest.approx(1, abs=1e-6)
    assert patch_cosine_loss(torch.ones(1, 3), absolute=absolute).item() == 0
    h = torch.zeros(4, 3, requires_grad=True)
    value = patch_cosine_loss(h, absolute=absolute)
    value.backward()
    assert value.item() == 0
    assert h.grad.abs().max() == 0


def test_cosine_does_not_look_for_nan() -> None:
    assert patch_cosine_loss(torch.tensor([[torch.nan, 1.0], [1.0, 0.0]])).isnan()


def test_cosine_signs() -> None:
    h = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert patch_cosine_loss(h).item() == pytest.approx(-1, abs=1e-6)
    assert patch_cosine_loss(h, absolute=True).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("negative", ["all", "others"])
def test_two_way_contrast(negative: str) -> None:
    e, h = patches(2, 3, 6, 4), patches(2, 3, 6, 4, seed=1)
    pairs = zip(e.flatten(0, 1), h.flatten(0, 1), strict=True)
    expected = sum(contrast(a, b, negative) for a, b in pairs) / 6
    assert patch_contrastive_loss(e, h, negative=negative).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("grid", [(8, 9), (2, 3), (1, 12)])
def test_three_way_contrast(grid: tuple[int, int]) -> None:
    n = grid[0] * grid[1]
    e, h = patches(2, n, 4), patches(2, n, 4, seed=1)
    expected = sum(contrast(a, b, "others", grid) for a, b in zip(e, h, strict=True)) / 2
    got = patch_contrastive_loss(e, h, negative="three_way", grid=grid)
    assert got.item() == pytest.approx(expected, rel=1e-12)


def test_three_way_contrast_is_the_released_arithmetic() -> None:
    """Pool, take away the own 49th, scale by 49/48; the same for the global mean; softmax over the three logits."""
    b, side, d = 2, 9, 4
    e, h = patches(b, side * side, d), patches(b, side * side, d, seed=1)
    image, n = h.transpose(1, 2).reshape(b, d, side, side), side * side
    local = (avg_pool2d(image, 7, stride=1, padding=3) - image / 49) * 49 / 48
    overall = (image.mean((2, 3), keepdim=True) - image / n) * n / (n - 1)
    logits = [(e * m.reshape(b, d, n).transpose(1, 2)).sum(-1) for m in (image, overall, local)]
    expected = -torch.stack(logits, -1).log_softmax(-1)[..., 0].mean()
    got = patch_contrastive_loss(e, h, negative="three_way", grid=(side, side))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("negative", ["all", "others", "three_way"])
def test_contrast_gradcheck_and_detach(negative: str) -> None:
    e, h, grid = patches(1, 6, 3).requires_grad_(), patches(1, 6, 3, seed=1).requires_grad_(), (2, 3)
    assert torch.autograd.gradcheck(lambda e, h: patch_contrastive_loss(e, h, negative=negative, grid=grid), (e, h))
    value = patch_contrastive_loss(e, h, negative=negative, grid=grid, detach=True)
    assert value.item() == patch_contrastive_loss(e, h, negative=negative, grid=grid).item()
    value.backward()
    assert e.grad is None
    assert h.grad.abs().max() > 1e-3


def test_contrast_degenerate_and_large_values() -> None:
    same = torch.ones(5, 3)
    assert patch_contrastive_loss(same, same).item() == pytest.approx(math.log(2), abs=1e-6)
    assert patch_contrastive_loss(same[:1], same[:1]).item() == pytest.approx(math.log(2), abs=1e-6)
    e = torch.tensor([[300.0, 0], [0, 300.0]])
    assert patch_contrastive_loss(e, e).item() == 0
    assert patch_contrastive_loss(e, e.flip(0)).item() == pytest.approx(45000)  # b − a, not infinite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    e, h = patches(2, 12, 8).to(dtype), patches(2, 12, 8, seed=1).to(dtype)
    soft = patches(2, 12, 8, seed=2).softmax(-1).to(dtype)
    for loss in (
        lambda e, h, _: patch_cosine_loss(h),
        lambda e, h, _: patch_cosine_loss(h, absolute=True),
        lambda e, h, _: patch_contrastive_loss(e, h),
        lambda e, h, _: patch_contrastive_loss(e, h, negative="three_way", grid=(3, 4)),
        lambda e, h, soft: patch_mixing_loss(h, soft),
    ):
        got = loss(e, h, soft)
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(loss(e.double(), h.double(), soft.double()).item(), rel=2e-5, abs=1e-6)


def test_mixing_is_a_mean_cross_entropy() -> None:
    logits, hard = patches(2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 3]])
    expected = 0.0
    for b in range(2):
        for i in range(3):
            z = logits[b, i].tolist()
            expected += math.log(math.fsum(math.exp(v) for v in z)) - z[int(hard[b, i])]
    assert patch_mixing_loss(logits, hard).item() == pytest.approx(expected / 6, rel=1e-12)
    one_hot = torch.eye(5, dtype=torch.float64)[hard]
    torch.testing.assert_close(patch_mixing_loss(logits, one_hot), patch_mixing_loss(logits, hard), rtol=1e-13, atol=0)
    mixed = 0.3 * one_hot + 0.7 * one_hot.flip(0)
    expected_soft = 0.3 * patch_mixing_loss(logits, hard) + 0.7 * patch_mixing_loss(logits, hard.flip(0))
    torch.testing.assert_close(patch_mixing_loss(logits, mixed), expected_soft, rtol=1e-13, atol=0)


def test_mixing_gradcheck() -> None:
    logits, soft = patches(2, 3, 4).requires_grad_(), patches(2, 3, 4, seed=1).softmax(-1)
    assert torch.autograd.gradcheck(lambda x: patch_mixing_loss(x, soft), (logits,))
    assert torch.autograd.gradcheck(lambda x: patch_mixing_loss(x, torch.tensor([[0, 1, 2], [3, 3, 0]])), (logits,))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    n_rows=st.integers(1, 5),
    n_columns=st.integers(2, 9),
    d=st.integers(1, 4),
    negative=st.sampled_from(["all", "others", "three_way"]),
    seed=st.integers(0, 1000),
)
def test_contrast_at_any_shape(n_rows: int, n_columns: int, d: int, negative: str, seed: int) -> None:
    n, grid = n_rows * n_columns, (n_rows, n_columns)
    e, h = patches(n, d, seed=seed), patches(n, d, seed=seed + 1)
    expected = contrast(e, h, negative, grid if negative == "three_way" else None)
    assert patch_contrastive_loss(e, h, negative=negative, grid=grid).item() == pytest.approx(expected, rel=1e-11)
    if negative != "three_way":
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        permuted = patch_contrastive_loss(e[order], h[order], negative=negative)
        assert permuted.item() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: patch_contrastive_loss(patches(5, 3), patches(4, 3)), "e and h must have the same shape"),
        (lambda: patch_contrastive_loss(patches(5, 3), patches(5, 3), negative="some"), "'all', 'others' or"),
        (lambda: patch_contrastive_loss(patches(1, 3), patches(1, 3), negative="others"), "at least two patches"),
        (lambda: patch_contrastive_loss(patches(1, 3), patches(1, 3), negative="three_way", grid=(1, 1)), "two"),
        (lambda: patch_contrastive_loss(patches(6, 3), patches(6, 3), negative="three_way"), "grid="),
        (lambda: patch_contrastive_loss(patches(6, 3), patches(6, 3), negative="three_way", grid=(2, 2)), "= 6, got"),
        (lambda: patch_cosine_loss(patches(5)), "h must have shape"),
        (lambda: patch_cosine_loss(patches(0, 3)), "at least one row"),
        (lambda: patch_mixing_loss(patches(2, 3, 4), torch.zeros(2, 4, dtype=torch.long)), "class indices must"),
        (lambda: patch_mixing_loss(patches(2, 3, 4), torch.zeros(2, 3)), "probabilities must have shape"),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


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
def test_cutmix_bad_input(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"images": numbered(2, 8, 8), "labels": torch.tensor([0, 1]), "patch_size": 4}
    with pytest.raises(ValueError, match=message):
        cutmix_patches(**(good | {"num_classes": 2, "box": (0, 4, 0, 4)} | change))  # type: ignore[arg-type]
