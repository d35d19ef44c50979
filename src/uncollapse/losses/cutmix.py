"""CutMix with a label for every patch: the data of DiversePatch's mixing loss."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

Box = tuple[int, int, int, int]  # top, bottom, left, right in pixels; bottom and right are the first ones outside


class PatchMix(NamedTuple):
    """Mixed images (B, c, H, W), the labels (B, n, C) of their patches, and which image (B,) was pasted into each."""

    images: Tensor
    labels: Tensor
    partner: Tensor


def cutmix_patches(
    images: Tensor,
    labels: Tensor,
    patch_size: int | tuple[int, int],
    *,
    num_classes: int | None = None,
    alpha: float = 1.0,
    generator: torch.Generator | None = None,
    box: Box | None = None,
) -> PatchMix:
    """Paste one box of each image's partner into it, and label every patch by the pixels that it holds.

        y_patch = (1 − a)·y + a·y_partner,   a = pixels of the patch inside the box / pixels of the patch

    DiversePatch (Gong et al. 2021, arXiv 2104.12753), on CutMix (arXiv 1905.04899). As in timm, there is one box for
    the batch, and the partner of image i is image B−1−i (with odd B the middle one is its own). λ ~ Beta(α, α), the box
    has √(1−λ) of the height and of the width, its centre is uniform over the pixels, and it is clipped at the borders.

    Args:
        images: (B, c, H, W); H and W are multiples of the patch size.
        labels: class indices (B,), or probabilities (B, C).
        patch_size: of a square patch, or (height, width).
        num_classes: C; needed with class indices.
        alpha: α of the Beta distribution, positive.
        generator: where the random numbers come from; without it, torch's own. It must be on the CPU.
        box: (top, bottom, left, right) in pixels, bottom and right exclusive, instead of a random one.

    Returns:
        `PatchMix(images, labels, partner)` with new images, labels (B, n, C) of the n patches in row-major order, as a
        ViT has them, and partner (B,). Labels are soft where a patch holds both; `labels.mean(1)` is the image's label.

    >>> import torch
    >>> mix = cutmix_patches(torch.rand(2, 3, 4, 4), torch.tensor([0, 1]), 2, num_classes=2, box=(0, 4, 3, 4))
    >>> mix.labels[0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000],
            [1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    height, width = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    _check(images, labels, height, width)
    rows, columns = images.shape[-2:]
    top, bottom, left, right = box = _random_box(rows, columns, alpha, generator) if box is None else box
    if not (0 <= top <= bottom <= rows and 0 <= left <= right <= columns):
        raise ValueError(f"box is (top, bottom, left, right) within an image of {rows} by {columns} pixels, got {box}.")
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
    target = _probabilities(labels, num_classes)
    share = torch.outer(_overlap(rows, height, top, bottom), _overlap(columns, width, left, right)) / (height * width)
    share = share.to(target).flatten()[:, None]  # (n, 1)
    soft = (1 - share) * target[:, None] + share * target.flip(0)[:, None]  # (B, n, C)
    return PatchMix(mixed, soft, torch.arange(len(images), device=images.device).flip(0))


def _overlap(size: int, step: int, start: int, stop: int) -> Tensor:
    """How many of the pixels start…stop−1 lie in each of the stretches of `step` pixels that make up `size`."""
    edge = torch.arange(0, size, step, dtype=torch.float64)
    return ((edge + step).clamp(max=stop) - edge.clamp(min=start)).clamp(min=0)


def _random_box(rows: int, columns: int, alpha: float, generator: torch.Generator | None) -> Box:
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}.")
    # torch draws from a Beta distribution only without a generator, so torch gives the seed
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    ratio = math.sqrt(1 - random.beta(alpha, alpha))
    top, bottom = _clipped(int(random.integers(rows)), int(rows * ratio) // 2, rows)
    left, right = _clipped(int(random.integers(columns)), int(columns * ratio) // 2, columns)
    return top, bottom, left, right


def _clipped(centre: int, half: int, size: int) -> tuple[int, int]:
    return max(centre - half, 0), min(centre + half, size)


def _probabilities(labels: Tensor, num_classes: int | None) -> Tensor:
    if labels.is_floating_point():
        return labels
    if num_classes is None:
        raise ValueError("Class indices need num_classes; or pass labels as probabilities (B, C).")
    return one_hot(labels.long(), num_classes).to(torch.get_default_dtype())


def _check(images: Tensor, labels: Tensor, height: int, width: int) -> None:
    if images.dim() != 4:
        raise ValueError(f"images must have shape (B, channels, H, W), got {tuple(images.shape)}.")
    if height < 1 or width < 1 or images.shape[-2] % height or images.shape[-1] % width:
        raise ValueError(
            f"The height and width of images must be multiples of patch_size ({height}, {width}), "
            f"got {tuple(images.shape[-2:])}; resize or crop them first."
        )
    shape = "(B, C) of probabilities" if labels.is_floating_point() else "(B,) of class indices"
    if labels.dim() != (2 if labels.is_floating_point() else 1) or len(labels) != len(images):
        raise ValueError(f"labels must have shape {shape} with B = {len(images)}, got {tuple(labels.shape)}.")
