"""Where and in which precision a model is trained: Accelerate decides, and wraps models and optimisers for it."""

import os
from typing import Any

import torch
from torch import nn

from uncollapse import distributed
from uncollapse.errors import UsageError, import_optional

WHOLE = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU", "MULTI_MLU")  # a model in each process


def build_accelerator(model: nn.Module, device: str | None, precision: str) -> Any:
    """Accelerate's Accelerator for a run. On GPUs, batch norms of several processes take the statistics of all."""
    state: Any = import_optional("accelerate.state", "train").AcceleratorState
    state._reset_state(reset_partial_state=True)  # else the precision of an earlier run in this process stays
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":  # first: without a GPU Accelerate fails on it
        raise _splits("FSDP")
    several = distributed.world_size() > 1
    on_processor = device == "cpu" or (several and not torch.accelerator.is_available())
    made: Any = import_optional("accelerate", "train").Accelerator(mixed_precision=precision, cpu=on_processor)
    if device is not None and ":" in device:
        raise UsageError(
            f"Name the kind of device alone, without its number, got {device!r}; CUDA_VISIBLE_DEVICES chooses."
        )
    if device is not None and made.device.type != device:
        raise UsageError(f"The device {device!r} is not here; Accelerate found {made.device.type!r}.")
    _check_processes(made)
    if several and made.device.type == "cuda":
        nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return made


def _check_processes(made: Any) -> None:
    if made.num_processes != distributed.world_size():
        raise UsageError(
            f"There are {distributed.world_size()} processes, and Accelerate sees {made.num_processes}; start them "
            "with torchrun or accelerate launch."
        )
    if made.distributed_type.name not in WHOLE:
        raise _splits(made.distributed_type.name)


def _splits(kind: str) -> UsageError:
    return UsageError(
        f"Each process trains a whole model here, and Accelerate is set to {kind}, which splits it; start with "
        "torchrun, or with accelerate launch without that."
    )


def build_weight_average(model: nn.Module, decay: float | None) -> Any:
    """The model of averaged weights; None without a decay."""
    if decay is None:
        return None
    tools: Any = torch.optim.swa_utils
    return tools.AveragedModel(model, multi_avg_fn=tools.get_ema_multi_avg_fn(decay), use_buffers=True)
