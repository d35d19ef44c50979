"""The three patch losses of DiversePatch (Gong et al. 2021, arXiv 2104.12753), for vision transformers.

All act on patch tokens only: leave out the class token and other prefix tokens before.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy

from uncollapse.losses.checks import check_pair, check_rows
from uncollapse.losses.info_nce import against
from uncollapse.metrics.similarity import pair_cosine
from uncollapse.pairwise.numerics import as_full, prepared, real_count
from uncollapse.registry import loss

PAPER = "Vision Transformers with Patch Diversification, arXiv 2104.12753"
WINDOW = 7  # side of the released code's local window


@loss(needs=("tokens",), paper=PAPER)
def patch_cosine_loss(h: Tensor, *, absolute: bool = False, mask: Tensor | None = None) -> Tensor:
    """Mean cosine between different patches of an image, at the last layer.

        1/(n(n−1)) Σ_{i≠j} cos(h_i, h_j)

    DiversePatch, arXiv 2104.12753: signed in its first version, absolute in the later one.

    Args:
        h: the last layer's patches (..., n, d).
        absolute: the mean of |cos|, at the cost of all pairs (memory stays linear in n).
        mask: (..., n) bool, True = real.

    Returns:
        A scalar, the mean over images, float32 (float64 for float64 inputs). An image with fewer than two real patches
        gives 0; a row of zeros has the cosine 0 with all others, and a gradient of zero.

    >>> import torch
    >>> patch_cosine_loss(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    tensor(0.3333)
    """
    check_rows(h, mask, "h")
    h = prepared(h, mask)
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
        negative: what the mean in b_i is over. "all": all n patches. "others": j ≠ i, as in the paper's later version.
            "three_way", the released code: e^{b_i} + e^{c_i} in place of e^{b_i}, with b_i over the others and
            c_i = e_i·(Σ of h_j over the other patches of the 7×7 window around i, divided by 48 also at the borders).
        detach: let no gradient into e, as the released code does.
        grid: (rows, columns) of the patches, needed for "three_way"; n = rows·columns in row-major order.

    Returns:
        A scalar, the mean over patches and images, float32 (float64 for float64 inputs); log 2 for two-way contrast of
        identical h. The paper has no temperature and does not normalise; give h as it is after the final LayerNorm.

    >>> import torch
    >>> patch_contrastive_loss(torch.eye(4), torch.eye(4))  # log(1 + e^{1/4 − 1})
    tensor(0.3869)
    """
    _check_contrast(e, h, negative, grid)
    e, h = as_full(e.detach() if detach else e), as_full(h)
    own = (e * h).sum(-1)  # (..., n)
    n = h.shape[-2]
    if negative == "all":
        return against(own, (e * h.mean(-2, keepdim=True)).sum(-1)).mean()
    others = (e * (h.sum(-2, keepdim=True) - h)).sum(-1) / (n - 1)
    if grid is None or negative == "others":
        return against(own, others).mean()
    return against(own, torch.logaddexp(others, (e * _window_mean(h, grid)).sum(-1))).mean()


@loss(needs=("logits", "labels"), paper=PAPER)
def patch_mixing_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every patch with the label of the image that its pixels come from.

        (1/n) Σ_i CE(g(h_i), y_i)

    DiversePatch, arXiv 2104.12753. g is one linear head for all patches; `cutmix_patches` makes images and labels.

    Args:
        logits: g(h) (..., n, C).
        labels: class indices (..., n), or probabilities (..., n, C).

    Returns:
        A scalar, the mean over patches and images, float32 (float64 for float64 inputs).

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
    full = as_full(logits)
    if soft:
        return cross_entropy(full.flatten(0, -2), labels.to(full).flatten(0, -2))
    return -full.log_softmax(-1).gather(-1, labels.long().unsqueeze(-1)).mean()


def _window_mean(h: Tensor, grid: tuple[int, int]) -> Tensor:
    """Mean (..., n, d) of the other patches in the window around each; beyond the border there are zeros."""
    image = h.reshape(-1, *grid, h.shape[-1]).permute(0, 3, 1, 2)  # (b, d, rows, columns)
    total = avg_pool2d(image, WINDOW, stride=1, padding=WINDOW // 2, divisor_override=1) - image
    return (total / (WINDOW**2 - 1)).permute(0, 2, 3, 1).reshape(h.shape)


def _check_contrast(e: Tensor, h: Tensor, negative: str, grid: tuple[int, int] | None) -> None:
    check_pair(e, h, ("e", "h"))
    n = h.shape[-2]
    if negative not in ("all", "others", "three_way"):
        raise ValueError(f"negative is 'all', 'others' or 'three_way', got {negative!r}.")
    if negative != "all" and n < 2:
        raise ValueError(f"negative={negative!r} needs at least two patches, got one; use negative='all'.")
    if negative == "three_way" and (grid is None or grid[0] * grid[1] != n):
        raise ValueError(f"negative='three_way' needs grid=(rows, columns) with rows·columns = {n}, got {grid}.")
