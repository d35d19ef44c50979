"""Where a model runs."""

from typing import TYPE_CHECKING

from uncollapse.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch


def chosen(name: str) -> "torch.device":
    """The device of this name; "auto" is a GPU if there is one."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, present in there.items() if present))
    usable = ", ".join(kind for kind, present in there.items() if present)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        hint = did_you_mean(name, ("auto", *there))
        raise UsageError(f"There is no device {name!r}; choose auto or one of {usable}.{hint}") from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if not there.get(device.type) or (device.index or 0) >= count:
        raise UsageError(f"The device {name} is not there; choose auto or one of {usable}.")
    return device
