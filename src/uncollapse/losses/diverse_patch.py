"""The three patch losses of DiversePatch (Gong et al. 2021, arXiv 2104.12753) for vision transformers, and CutMix.

All act on patch tokens only: remove the class token and other prefix tokens first.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy, one_hot

from uncollapse.losses.info_nce import contrast
from uncollapse.pairwise.numerics import check_pair, check_rows, prepare, real_count, to_full
from uncollapse.pairwise.pair_means import pair_cosine
from uncollapse.registry import loss

PAPER = "Vision Transformers with Patch Diversification, arXiv 2104.12753"
WINDOW = 7  # side of the released code's local window


@loss(needs=("tokens",), paper=PAPER)
def patch_cosine_loss(h: Tensor, *, absolute: bool = False, mask: Tensor | None = None) -> Tensor:
    """Return the mean cosine between different patches of an image at the last layer.

        1/(n(n−1)) Σ_{i≠j} cos(h_i, h_j)

    DiversePatch, arXiv 2104.12753: signed in its first version, absolute in the later one.

    Args:
        h: the last layer's patches (..., n, d).
        absolute: the mean of |cos|, which needs all pairs (memory stays linear in n).
        mask: (..., n) bool, True = real.

    Returns:
        A scalar, the mean over images, in float32 (float64 for float64 inputs). An image with fewer than two real
        patches has 0; a zero row has cosine 0 with all others, and a gradient of zero.

    >>> import torch
    >>> patch_cosine_loss(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    tensor(0.3333)
    """
    check_rows(h, mask, "h")
    h = prepare(h, mask)
    return pair_cosine(h, real_count(h, mask), absolute).mean()


@loss(needs=("tokens", "pairs"), paper=PAPER)
def patch_contrastive_loss(
    e: Tensor,
    h: Tensor,
    *,
    negative: Literal["all", "others", "three_way"] = "all",
    detach: bool = False,
    grid: tuple[int, int] | None = None,
) -> Tensor:
    """Keep each patch of the last layer closer to its own first-layer patch than the mean patch is.

        −(1/n) Σ_i log[ e^{a_i} / (e^{a_i} + e^{b_i}) ],   a_i = e_i·h_i,   b_i = e_i·(mean of h_j)

    DiversePatch, arXiv 2104.12753.

    Args:
        e: the first layer's patches (..., n, d).
        h: the last layer's patches (..., n, d).
        negative: the patches averaged in b_i. "all": all n patches. "others": j ≠ i, as in the paper's later version.
            "three_way", the released code: e^{b_i} + e^{c_i} in place of e^{b_i}, with b_i over the others and
            c_i = e_i·(Σ of h_j over the other patches of the 7×7 window around i, divided by 48 also at the borders).
        detach: stop the gradient into e, as the released code does.
        grid: (rows, columns) of the patches, needed for "three_way"; n = rows·columns in row-major order.

    Returns:
        A scalar, the mean over patches and images, in float32 (float64 for float64 inputs); log 2 for two-way contrast
        of identical h. The paper has no temperature and does not normalize: pass h as it is after the final LayerNorm.

    >>> import torch
    >>> patch_contrastive_loss(torch.eye(4), torch.eye(4))  # log(1 + e^{1/4 − 1})
    tensor(0.3869)
    """
    _check_contrast(e, h, negative, grid)
    e, h = to_full(e.detach() if detach else e), to_full(h)
    own = (e * h).sum(-1)  # (..., n)
    n = h.shape[-2]
    if negative == "all":
        return contrast(own, (e * h.mean(-2, keepdim=True)).sum(-1)).mean()
    others = (e * (h.sum(-2, keepdim=True) - h)).sum(-1) / (n - 1)
    if grid is None or negative == "others":
        return contrast(own, others).mean()
    return contrast(own, torch.logaddexp(others, (e * _window_mean(h, grid)).sum(-1))).mean()


@loss(needs=("logits", "labels"), paper=PAPER)
def patch_mixing_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of every patch with the label of the image that its pixels come from.

        (1/n) Σ_i CE(g(h_i), y_i)

    DiversePatch, arXiv 2104.12753. g is one linear head for all patches; `cutmix_patches` creates images and labels.

    Args:
        logits: g(h) (..., n, C).
        labels: class indices (..., n), or probabilities (..., n, C).

    Returns:
        A scalar, the mean over patches and images, in float32 (float64 for float64 inputs).

    >>> import torch
    >>> patch_mixing_loss(torch.zeros(1, 4, 10), torch.tensor([[0, 3, 9, 9]]))  # log 10
    tensor(2.3026)
    """
    check_rows(logits, name="logits")
    soft = labels.is_floating_point()
    expected = logits.shape if soft else logits.shape[:-1]
    if labels.shape != expected:
        kind = "probabilities" if soft else "class indices"
        raise ValueError(f"labels as {kind} must have shape {tuple(expected)}, got {tuple(labels.shape)}.")
    full = to_full(logits)
    if soft:
        return cross_entropy(full.flatten(0, -2), labels.to(full).flatten(0, -2))
    return -full.log_softmax(-1).gather(-1, labels.long().unsqueeze(-1)).mean()


def _window_mean(h: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the mean (..., n, d) of the other patches in the window around each, with zeros beyond the border."""
    image = h.reshape(-1, *grid, h.shape[-1]).permute(0, 3, 1, 2)  # (b, d, rows, columns)
    total = avg_pool2d(image, WINDOW, stride=1, padding=WINDOW // 2, divisor_override=1) - image
    return (total / (WINDOW**2 - 1)).permute(0, 2, 3, 1).reshape(h.shape)


def _check_contrast(e: Tensor, h: Tensor, negative: str, grid: tuple[int, int] | None) -> None:
    check_pair(e, h, ("e", "h"))
    n = h.shape[-2]
    if negative not in ("all", "others", "three_way"):
        raise ValueError(f"negative must be 'all', 'others' or 'three_way', got {negative!r}.")
    if negative != "all" and n < 2:
        raise ValueError(f"negative={negative!r} needs at least two patches, got one; use negative='all'.")
    if negative == "three_way" and (grid is None or grid[0] * grid[1] != n):
        raise ValueError(f"negative='three_way' needs grid=(rows, columns) with rows·columns = {n}, got {grid}.")


Box = tuple[int, int, int, int]  # top, bottom, left, right in pixels; bottom and right are exclusive


class PatchMix(NamedTuple):
    """Mixed images (B, c, H, W), the labels (B, n, C) of their patches, and the image (B,) pasted into each."""

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
    """Paste a box of its partner into each image (CutMix), and label every patch by its pixels.

        y_patch = (1 − a)·y + a·y_partner,   a = pixels of the patch inside the box / pixels of the patch

    DiversePatch (Gong et al. 2021, arXiv 2104.12753), on CutMix (arXiv 1905.04899). As in timm, there is one box per
    batch, and the partner of image i is image B−1−i (with odd B the middle one is its own). λ ~ Beta(α, α), the box
    has √(1−λ) of the height and of the width, its centre is uniform over the pixels, and it is clipped at the borders.

    Args:
        images: (B, c, H, W); H and W are multiples of the patch size.
        labels: class indices (B,), or probabilities (B, C).
        patch_size: side of a square patch, or (height, width).
        num_classes: C; required with class indices.
        alpha: α of the Beta distribution, positive.
        generator: source of the random numbers, on the CPU; None is torch's global generator.
        box: (top, bottom, left, right) in pixels, bottom and right exclusive, instead of a random one.

    Returns:
        `PatchMix(images, labels, partner)` with new images, labels (B, n, C) of the n patches in row-major order, as in
        a ViT, and partner (B,). Labels are soft where a patch has pixels of both; `labels.mean(1)` labels the image.

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
        raise ValueError(f"box (top, bottom, left, right) must lie within {rows} by {columns} pixels, got {box}.")
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
    target = _probabilities(labels, num_classes)
    share = torch.outer(_overlap(rows, height, top, bottom), _overlap(columns, width, left, right)) / (height * width)
    share = share.to(target).flatten()[:, None]  # (n, 1)
    soft = (1 - share) * target[:, None] + share * target.flip(0)[:, None]  # (B, n, C)
    return PatchMix(mixed, soft, torch.arange(len(images), device=images.device).flip(0))


def _overlap(size: int, step: int, start: int, stop: int) -> Tensor:
    """Return how many of the pixels start…stop−1 lie in each interval of `step` pixels, up to `size`."""
    edge = torch.arange(0, size, step, dtype=torch.float64)
    return ((edge + step).clamp(max=stop) - edge.clamp(min=start)).clamp(min=0)


def _random_box(rows: int, columns: int, alpha: float, generator: torch.Generator | None) -> Box:
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}.")
    # torch samples a Beta distribution only without a generator, so torch provides the seed
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    ratio = math.sqrt(1 - random.beta(alpha, alpha))
    top, bottom = _clip(int(random.integers(rows)), int(rows * ratio) // 2, rows)
    left, right = _clip(int(random.integers(columns)), int(columns * ratio) // 2, columns)
    return top, bottom, left, right


def _clip(centre: int, half: int, size: int) -> tuple[int, int]:
    return max(centre - half, 0), min(centre + half, size)


def _probabilities(labels: Tensor, num_classes: int | None) -> Tensor:
    if labels.is_floating_point():
        return labels
    if num_classes is None:
        raise ValueError("Class indices need num_classes; otherwise pass labels as probabilities (B, C).")
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
