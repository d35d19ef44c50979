"""Training in several processes: the first one measures and writes, and all learn what it found."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed, nn

from uncollapse import running

T = TypeVar("T")
WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def is_first() -> bool:
    """Whether this process is the one that measures: the first, or the only one."""
    return not _several() or distributed.get_rank() == 0


def together(work: Callable[[], T]) -> T:
    """What `work` gives in the first process, in all of them; all must call this. An error is raised in all, too."""
    if not _several():
        return work()
    told: list[Any] = [None, None]
    problem: Exception | None = None
    if is_first():
        try:
            told[0] = work()
        except Exception as error:  # the others wait: they are told before it goes on
            problem, told[1] = error, f"{type(error).__name__}: {error}"
    distributed.broadcast_object_list(told, src=0)
    if problem is not None:
        raise problem
    if told[1] is not None:
        raise RuntimeError(f"The monitor failed in the first process: {told[1]}")
    result: T = told[0]
    return result


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside `torch.compile`, DistributedDataParallel and DataParallel, in any order."""
    while True:
        inner = model.module if isinstance(model, WRAPPERS) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_whole(model: nn.Module) -> None:
    """Raise if the weights are spread over processes: one process alone cannot run such a model."""
    kinds = running.class_names(model)
    spread = any(type(p).__name__ == "DTensor" or hasattr(p, "ds_id") for p in model.parameters())
    if spread or kinds & {"FullyShardedDataParallel", "FSDPModule"}:
        raise ValueError(
            "The model's weights are spread over processes (FSDP, tensor parallel or ZeRO 3), and the monitor runs it "
            "in one. Gather a checkpoint and use `uncollapse diagnose` on it instead."
        )


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
