"""A model of the same architecture with random weights: what a diagnosis is compared with."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from uncollapse.backbones.sites import CHILD

SEED = 0


def reset(module: nn.Module) -> None:
    """Give a module the weights that its own class starts with, where the class can do that."""
    named = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    initialise: Callable[[], Any] | None = next((method for method in named if callable(method)), None)
    if initialise is not None:
        initialise()


def reset_cures(model: nn.Module) -> None:
    """Let the cures that were put into a model begin anew."""
    for name, module in model.named_modules():
        if is_of_cure(name):
            reset(module)


def is_of_cure(name: str) -> bool:
    """Whether a module or a weight of this name belongs to a cure."""
    return CHILD in name.split(".")


def reinitialize(model: nn.Module, initialise: Callable[[nn.Module], None] = reset) -> nn.Module:
    """A copy of the model whose parameters are all drawn anew; neither the model nor any random state changes.

    Args:
        model: it stays as it is.
        initialise: called with every module of the copy, parts before the whole, so that a model may adjust what its
            layers began with.
    """
    device = _device(model)
    fresh = copy.deepcopy(model).cpu()  # one generator draws there, and the same weights for every device
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(torch.nan)  # what is still NaN afterwards was not drawn
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed would seed the GPUs too
        fresh.apply(initialise)
    kept = [name for name, parameter in fresh.named_parameters() if bool(parameter.isnan().any())]
    if kept:
        raise ValueError(
            f"{type(model).__name__} has no random twin: nothing says how {_some(kept)} begin. Give their modules "
            "a method reset_parameters(), or leave out the comparison with random weights."
        )
    return fresh.to(device)


def _device(model: nn.Module) -> torch.device:
    """Where the model is, or an error if it cannot be copied with new weights."""
    name = type(model).__name__
    parameters = dict(model.named_parameters())
    lazy = [key for key, parameter in parameters.items() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise ValueError(f"{_some(lazy)} of {name} have no shape yet. Run the model once on a batch before.")
    other = [key for key, parameter in parameters.items() if not parameter.is_floating_point()]
    if other:
        raise ValueError(f"{name} has no random twin: {_some(other)} are not floating-point (quantised?).")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{name} has no random twin: its weights must be on one real device, got {where}.")
    return next(iter(devices), torch.device("cpu"))


def _some(names: list[str]) -> str:
    """The first three names, and how many there are beside them."""
    rest = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
