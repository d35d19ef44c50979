"""Models of the same architecture with random weights, to compare a diagnosis with."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from uncollapse.backbones.sites import CHILD

SEED = 0
QUANTIZED = "torch.ao.nn.quantized"  # the package of modules whose weights are integers


def reset(module: nn.Module) -> None:
    """Reset a module to the start weights of its class, where the class can do that."""
    named = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    initialize: Callable[[], Any] | None = next((method for method in named if callable(method)), None)
    if initialize is not None:
        initialize()


def reset_cures(model: nn.Module) -> None:
    """Reset the cures in a model."""
    for name, module in model.named_modules():
        if is_of_cure(name):
            reset(module)


def is_of_cure(name: str) -> bool:
    """Return whether a module or a weight of this name belongs to a cure."""
    return CHILD in name.split(".")


def reinitialize(model: nn.Module, initialize: Callable[[nn.Module], None] = reset) -> nn.Module:
    """Return a copy of the model with new random parameters; neither the model nor any random state changes.

    Args:
        model: it stays as it is.
        initialize: called with every module of the copy, children first, so that a model can adjust the start values
            of its layers.
    """
    device = _device(model)
    with torch.random.fork_rng(devices=[]):
        fresh = copy.deepcopy(model).cpu()  # one generator, so the same weights for every device; some copies draw too
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.fill_(torch.nan)  # what is still NaN afterwards was not initialized
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed would seed the GPUs too
        fresh.apply(initialize)
    missed = [name for name, parameter in fresh.named_parameters() if bool(parameter.isnan().any())]
    if missed:
        raise ValueError(
            f"{type(model).__name__} has no random baseline: it is not known how to initialize {_some(missed)}. Give "
            "their modules a method reset_parameters(), or pass plan=uc.Plan(baseline=0)."
        )
    return fresh.to(device)


def _device(model: nn.Module) -> torch.device:
    """Return the device of the model; raise if it cannot be copied with new weights."""
    name = type(model).__name__
    parameters = dict(model.named_parameters())
    lazy = [key for key, parameter in parameters.items() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise ValueError(f"{_some(lazy)} of {name} have no shape yet. Run the model on a batch first.")
    check_not_quantized(model)
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{name} has no random baseline: its weights must be on one real device, got {where}.")
    return next(iter(devices), torch.device("cpu"))


def check_not_quantized(model: nn.Module) -> None:
    """Raise ValueError if weights are quantized; those of `torch.ao` are not even parameters."""
    other = [key for key, parameter in model.named_parameters() if not parameter.is_floating_point()]
    kinds = {key: type(module).__module__ for key, module in model.named_modules()}
    other += [key for key, kind in kinds.items() if kind.startswith(QUANTIZED) and not key.endswith("_packed_params")]
    if other:
        raise ValueError(
            f"{type(model).__name__} has no random baseline: {_some(other)} are quantized, not floating-point. Load "
            "it without quantization."
        )


def _some(names: list[str]) -> str:
    """Return the first three names, and how many others there are."""
    rest = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
