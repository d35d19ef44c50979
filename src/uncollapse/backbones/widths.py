"""How many features enter and leave a module, as far as it tells before it runs."""

from typing import Any

from torch import nn

from uncollapse.backbones.sites import Side


def width(module: nn.Module, side: Side) -> int | None:
    """Features of the tokens at one side of a linear layer, a convolution or a norm; None if it does not tell."""
    owner: Any = module
    if isinstance(module, nn.Linear):
        return module.in_features if side == "input" else module.out_features
    if type(module).__name__ == "Conv1D":  # of transformers: a linear layer with the transposed weight
        return int(owner.weight.shape[0 if side == "input" else 1])
    channels = getattr(module, "in_channels" if side == "input" else "out_channels", None)
    if isinstance(channels, int) and channels > 0:  # convolutions, also of PyG, where −1 is for lazy ones
        heads = getattr(module, "heads", 1) if side == "output" and getattr(module, "concat", False) else 1
        return channels * heads
    weight = getattr(module, "weight", None)
    if "Norm" in type(module).__name__ and weight is not None and weight.dim() == 1:
        return int(weight.shape[0])
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else None
