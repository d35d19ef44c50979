"""Independent numbers: plain hooks, float64, formulas written out, and axes found by changing the size of the input.

Nothing here imports uncollapse.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Seen = dict[str, list[tuple[Tensor | None, Tensor | None]]]  # path -> (input, output) of each call


def watch(model: nn.Module, run: Callable[[], Any]) -> Seen:
    """Run a model and return the first floating-point tensor of two or more axes that each module took and returned."""
    seen: Seen = defaultdict(list)
    entered: dict[str, list[Tensor | None]] = defaultdict(list)  # before a module changes its input in place

    def enter(path: str) -> Callable[..., None]:
        def save(module: nn.Module, args: Any, kwargs: Any) -> None:
            tokens = {name: value for name, value in kwargs.items() if "mask" not in name}
            entered[path].append(first_tensor((args, tokens)))

        return save

    def leave(path: str) -> Callable[..., None]:
        return lambda module, args, output: seen[path].append((entered[path].pop(), first_tensor(output)))

    hooks = [m.register_forward_pre_hook(enter(p), with_kwargs=True) for p, m in model.named_modules()]
    hooks += [m.register_forward_hook(leave(p)) for p, m in model.named_modules()]
    with torch.no_grad():
        try:
            run()
        finally:
            for handle in hooks:
                handle.remove()
    return seen


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor with two or more axes in nested values."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_floating_point() and value.dim() > 1 else None
    values = value.values() if hasattr(value, "values") else value if isinstance(value, tuple | list) else ()
    return next((found for part in values if (found := first_tensor(part)) is not None), None)


def all_tensors(value: Any) -> list[Tensor]:
    """Return every floating-point tensor in nested values."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    values = value.values() if hasattr(value, "values") else value if isinstance(value, tuple | list) else ()
    return [tensor for part in values for tensor in all_tensors(part)]


def feature_axis(a: Tensor, b: Tensor | None) -> int:
    """Return the axis of features: the one that stays when the batch and the size of the input change.

    a, b: the same place in two batches.
    """
    stays = [i for i in range(a.dim()) if b is not None and b.dim() == a.dim() and a.shape[i] == b.shape[i] > 1]
    if len(stays) == 1:
        return stays[0]
    if a.dim() >= 4 and a.shape[-1] != a.shape[1] > 1:  # an image or a video of a fixed size: its sides are equal
        return 1 if a.shape[-1] == a.shape[-2] else a.dim() - 1
    return a.dim() - 1


def to_sequences(a: Tensor, axis: int, count: int) -> Tensor:
    """Return tokens (sequences, n, d) in float64. count: samples of the batch."""
    a = a.double().movedim(axis, -1)
    if a.dim() == 2:
        return a[None]
    if a.shape[0] % max(1, count) and a.shape[1] == count and a.dim() == 3:  # sequence first
        a = a.transpose(0, 1)
    return a.flatten(1, -2)


def mean_cosine(x: Tensor) -> float:
    """Return the mean cosine of two different rows of (n, d)."""
    u = x / x.norm(dim=1, keepdim=True).clamp(min=1e-300)
    n, total = len(u), u.sum(0)  # all pairs at once: a video has too many tokens for a matrix of them
    return float((total @ total - (u * u).sum()) / (n * (n - 1)))


def effective_rank(x: Tensor) -> float:
    """Return exp of the entropy of the singular values of (n, d)."""
    if not x.any():
        return 0.0
    s = torch.linalg.svdvals(x)
    p = (s / s.sum())[s > 0]
    return float(torch.exp(-(p * p.log()).sum()))
