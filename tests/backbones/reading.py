"""What stands at the sites of a model, and what is read beside it, in one pass."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.backbones.sites import Context, Site, Stack


def record(model: nn.Module, sites: dict[Any, Site], *args: Any, **kwargs: Any) -> dict[Any, list[Tensor]]:
    """Run the model; key -> what stood at its site in each call."""
    seen: dict[Any, list[Tensor]] = {key: [] for key in sites}
    with ExitStack() as hooks, torch.no_grad():
        for key, site in sites.items():
            module = model.get_submodule(site.path)

            def see(module: Any, args: Any, kwargs: Any, out: Any = None, key: Any = key, site: Site = site) -> None:
                found = site.read((args, kwargs), out)
                if found is not None:
                    seen[key].append(found)

            add = module.register_forward_pre_hook if site.side == "input" else module.register_forward_hook
            hooks.callback(add(see, with_kwargs=True).remove)
        model(*args, **kwargs)
    return seen


def places(stack: Stack) -> dict[Any, Site]:
    """The sites by (number of the block, place)."""
    return {(n, place): site for n, block in enumerate(stack.blocks) for place, site in block.places.items()}


def read_all(model: nn.Module, stack: Stack, *args: Any, **kwargs: Any) -> dict[Any, Tensor]:
    """Run the model; (number of the block, place), "embed" and "final" -> what stood there first."""
    ends = {key: site for key, site in {"embed": stack.embed, "final": stack.final}.items() if site is not None}
    with stack.under_hooks(model):
        return {key: seen[0] for key, seen in record(model, places(stack) | ends, *args, **kwargs).items()}


def context(model: nn.Module, stack: Stack, *args: Any, **kwargs: Any) -> Context:
    """What the stack reads at `path` and inside, in one pass of the model."""
    seen = [Context()]

    def outer(module: Any, args: Any, kwargs: Any) -> None:
        seen[0] = stack.context(args, kwargs)

    def inner(module: Any, args: Any, kwargs: Any) -> None:
        seen[0] = seen[0].fill_from(stack.blocks[0].context(args, kwargs))

    with ExitStack() as hooks, torch.no_grad(), stack.under_hooks(model):
        for path, hook in ((stack.blocks[0].path, inner), (stack.path, outer)):  # the owner is asked first
            module = model.get_submodule(path)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).remove)
        model(*args, **kwargs)
    return seen[0]
