"""The arguments of a module's forward pass by their names."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

HIDDEN = -1e4  # what is added to a logit to take its key out; models use −inf, −1e9 or the least number of the dtype


def parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What the forward pass of a module takes."""
    return inspect.signature(module.forward).parameters


def by_name(
    signature: Mapping[str, inspect.Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Name -> value of what was given; what went into **kwargs is among them."""
    positional = [p.name for p in signature.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {**dict(zip(positional, args, strict=False)), **kwargs}


def real_tokens(padding: Tensor | None) -> Tensor | None:
    """A torch padding mask (bool: True = padding; float: added to logits) as ours: bool, True = real."""
    if padding is None:
        return None
    return padding > HIDDEN if padding.is_floating_point() else ~padding.bool()


def is_causal(mask: Tensor | None) -> bool:
    """Whether a torch attention mask (..., n, n) hides every later token."""
    if mask is None or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] == 1:
        return False
    hidden = mask <= HIDDEN if mask.is_floating_point() else mask.bool()
    later = hidden.new_ones(mask.shape[-2:]).triu(1)
    return bool((hidden | ~later).all())
