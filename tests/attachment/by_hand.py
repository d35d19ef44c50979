"""A cure that is written into the forward passes of a model by hand, to compare `uc.attach` with: no hooks in here."""

import copy
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.attachment.write_hooks import HOOKS

Change = Callable[[Tensor], Tensor]


@dataclass
class At:
    """Changes tokens at a place, or at several: `at("block", x)` is x everywhere else."""

    place: str | tuple[str, ...]
    change: Change

    def __call__(self, place: str, x: Tensor) -> Tensor:
        chosen = (self.place,) if isinstance(self.place, str) else self.place
        return self.change(x) if place in chosen else x


class Before(nn.Module):
    """A module with a change in front of it, behind it, or both."""

    def __init__(self, inner: nn.Module, before: Change | None = None, after: Change | None = None) -> None:
        super().__init__()
        self.inner, self.before, self.after = inner, before, after

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x if self.before is None else self.before(x))
        return x if self.after is None else self.after(x)


def written_in(
    model: Any, blocks: Callable[[Any], Iterable[nn.Module]], forward: Callable[..., Tensor], at: At, **passes: Any
) -> Any:
    """A copy of the model whose blocks run `forward(block, at, ...)`, the last norm with the cure around it."""
    model = copy.deepcopy(model)
    for block in blocks(model):
        block.forward = types.MethodType(
            lambda self, *args, **kwargs: forward(self, at, *args, **passes, **kwargs), block
        )
    if at.place == "final.norm.input":
        model.norm = Before(model.norm, before=at.change)
    if at.place == "final.norm":
        model.norm = Before(model.norm, after=at.change)
    return model


def assert_same(found: Tensor, expected: Tensor, uncured: Tensor) -> None:
    """What came is what was expected, and the cure made a clear difference to it."""
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)
    assert (expected - uncured).abs().max() > 1e-3


def assert_clean(model: nn.Module) -> None:
    """Nothing of a cure is left in the model."""
    for name, module in model.named_modules():
        assert not module._forward_hooks, name
        assert not module._forward_pre_hooks, name
        assert HOOKS not in module.__dict__, name
        assert "uncollapse" not in module._modules, name
