"""The user's model inside the wrappers of several devices and processes."""

from torch import nn

from uncollapse.backbones import forward

WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside `torch.compile`, DistributedDataParallel and DataParallel, in any order."""
    while True:
        inner = model.module if isinstance(model, WRAPPERS) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_whole(model: nn.Module) -> None:
    """Raise if the weights are spread over processes: one process alone cannot run such a model."""
    kinds = forward.class_names(model)
    spread = any(type(p).__name__ == "DTensor" or hasattr(p, "ds_id") for p in model.parameters())
    if spread or kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        raise ValueError(
            "The model's weights are spread over processes (FSDP, tensor parallel or ZeRO 3), and one process alone "
            "runs it here. Gather a checkpoint and use `uncollapse diagnose` on it instead."
        )
