"""Where a model runs."""

import torch

from uncollapse.loading.errors import UsageError


def chosen(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU if there is one."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, present in there.items() if present))
    usable = ", ".join(kind for kind, present in there.items() if present)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"There is no device {name!r}; choose auto or one of {usable}.") from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if not there.get(device.type) or (device.index or 0) >= count:
        raise UsageError(f"The device {name} is not there; choose auto or one of {usable}.")
    return device
