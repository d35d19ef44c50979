"""Training step: one optimizer step, the evaluation and the weights of a model, wrapped by Accelerate."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse import distributed
from uncollapse.backbones.nonfinite import first_fault
from uncollapse.errors import NotFiniteError, UsageError, import_optional
from uncollapse.lab.engine.seeding import preserve_random_state
from uncollapse.lab.engine.sharding import Shard
from uncollapse.lab.engine.snapshot import TrainingState
from uncollapse.lab.engine.task import Task, TrainingOptions


class Stepper:
    """The model of a task, its optimizer and, if requested, its averaged weights, as Accelerate wraps them.

    Args:
        task: What is trained; its model is the same object, wrapped for several processes and for half precision.
        settings: How it is trained.
        device: None lets Accelerate decide.
    """

    def __init__(self, task: Task, settings: TrainingOptions, device: str | None) -> None:
        self.task, self.settings = task, settings
        self.accelerator = build_accelerator(task.model, device, settings.precision)
        self.own_forward = "forward" in vars(task.model)  # Accelerate puts a wrapper there for half precision
        self.model, self.optimizer = self.accelerator.prepare(task.model, task.optimizer)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.average = build_weight_average(task.model, settings.ema)

    @property
    def state(self) -> tuple[nn.Module, Any, Any, Any]:
        """What a checkpoint stores: the model, its optimizer, averaged weights and the gradient scaler."""
        return self.task.model, self.optimizer, self.average, self.accelerator.scaler

    def close(self) -> None:
        """Unwrap the model."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if not self.own_forward:
            vars(self.task.model).pop("forward", None)  # bound to this model, even in copies of it
        self.accelerator.free_memory()

    def step(self, portions: list[Shard], at: TrainingState) -> float:
        """Take one optimizer step on the mean loss of some batches, and return that loss. at: progress of the run."""
        utils: Any = import_optional("accelerate.utils", "train")
        for parameters, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            parameters["lr"] = rate if self.task.schedule is None else rate * self.task.schedule(at.step)
        self.optimizer.zero_grad()
        losses = []
        for number, (batch, weight, _) in enumerate(portions, 1):
            last = number == len(portions)
            with nullcontext() if last else self.accelerator.no_sync(self.model):  # gradients are averaged once
                with self.accelerator.autocast():
                    loss = self.task.loss(self.model, utils.send_to_device(batch, self.accelerator.device))
                losses.append(weight * loss.item())
                self.accelerator.backward(weight * loss / len(portions))
        mean = self._mean(losses, portions, at)
        if self.settings.clip is not None:
            self.accelerator.clip_grad_norm_(self.task.model.parameters(), self.settings.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.task.model)
        return mean

    def _mean(self, losses: list[float], portions: list[Shard], at: TrainingState) -> float:
        """Return the mean loss of a step over all ranks. If it is not finite, all stop before weights change."""
        mean = distributed.sum_over_ranks([sum(losses) / len(losses)])[0] / distributed.world_size()
        if not math.isfinite(mean):
            where = f"epoch {at.epoch + 1}, step {at.step + 1}"
            raise NotFiniteError(
                f"The loss became {mean} in {where}. {self._find_fault(portions)} "
                "Try a smaller learning rate, a smaller scale, or clipping of the gradient."
            )
        return mean

    def _find_fault(self, portions: list[Shard]) -> str:
        """Return where values stopped being finite: the first module, found in another pass of all ranks."""
        utils: Any = import_optional("accelerate.utils", "train")
        batches = (utils.send_to_device(portion.batch, self.accelerator.device) for portion in portions)
        with preserve_random_state(), self.accelerator.autocast():
            faults = [first_fault(self.task.model, partial(self.task.loss, self.model, batch)) for batch in batches]
        found = (str(fault) for fault in chain.from_iterable(distributed.gather_objects(faults)) if fault is not None)
        return next(found, "All outputs of the model's modules are finite, so it begins in the loss.")

    def evaluate(self, evaluate: Callable[[nn.Module], Mapping[str, float]]) -> Mapping[str, float]:
        """Return rank zero's metrics of the current weights; the random state does not change."""
        model = self.task.model if self.average is None else self.average.module
        model.eval()
        with torch.no_grad(), preserve_random_state(), self.accelerator.autocast():
            found = evaluate(model)
        return distributed.on_rank_zero(lambda: found)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the current weights, averaged if that is on."""
        model = self.task.model if self.average is None else self.average.module
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


WHOLE = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_MLU",
)  # a whole model per process


def build_accelerator(model: nn.Module, device: str | None, precision: str) -> Any:
    """Return the Accelerator of a run. On GPUs, batch norms use the statistics of all processes."""
    state: Any = import_optional("accelerate.state", "train").AcceleratorState
    state._reset_state(reset_partial_state=True)  # else the precision of an earlier run in this process persists
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":  # first: without a GPU Accelerate fails on it
        raise _split_error("FSDP")
    several = distributed.world_size() > 1
    on_processor = device == "cpu" or (several and not torch.accelerator.is_available())
    made: Any = import_optional("accelerate", "train").Accelerator(mixed_precision=precision, cpu=on_processor)
    if device is not None and ":" in device:
        raise UsageError(f"Name the kind of device without its number, got {device!r}; CUDA_VISIBLE_DEVICES chooses.")
    if device is not None and made.device.type != device:
        raise UsageError(f"The device {device!r} is not available; Accelerate found {made.device.type!r}.")
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
        raise _split_error(made.distributed_type.name)


def _split_error(kind: str) -> UsageError:
    return UsageError(
        f"Each process trains a whole model, but Accelerate is set to {kind}, which splits it; start with "
        "torchrun, or with accelerate launch without {kind}."
    )


def build_weight_average(model: nn.Module, decay: float | None) -> Any:
    """Return a model of exponentially averaged weights; None without a decay."""
    if decay is None:
        return None
    tools: Any = torch.optim.swa_utils
    return tools.AveragedModel(model, multi_avg_fn=tools.get_ema_multi_avg_fn(decay), use_buffers=True)
