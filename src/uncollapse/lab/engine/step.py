"""A model in training: a step of its optimiser, its figures, its weights."""

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
    """The model of a task with its optimiser, and its averaged weights if they are asked for, as Accelerate wraps them.

    Args:
        task: what is trained; its model is the same object, wrapped for several processes and for half precision.
        settings: how.
        device: None lets Accelerate decide.
    """

    def __init__(self, task: Task, settings: TrainingOptions, device: str | None) -> None:
        self.task, self.settings = task, settings
        self.accelerator = build_accelerator(task.model, device, settings.precision)
        self.own_forward = "forward" in vars(task.model)  # Accelerate puts a wrapper there for half precision
        self.model, self.optimiser = self.accelerator.prepare(task.model, task.optimizer)
        self.rates = [group["lr"] for group in self.optimiser.param_groups]
        self.average = build_weight_average(task.model, settings.ema)

    @property
    def state(self) -> tuple[nn.Module, Any, Any, Any]:
        """What a checkpoint holds of it: the model, its optimiser, averages and what scales half precision."""
        return self.task.model, self.optimiser, self.average, self.accelerator.scaler

    def close(self) -> None:
        """Leave the model as it came, but for its weights."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if not self.own_forward:
            vars(self.task.model).pop("forward", None)  # bound to this very model, also in copies of it
        self.accelerator.free_memory()

    def step(self, portions: list[Shard], at: TrainingState) -> float:
        """One step of the optimiser on the mean loss of a few batches, which it gives. at: where the run is."""
        utils: Any = import_optional("accelerate.utils", "train")
        for parameters, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            parameters["lr"] = rate if self.task.schedule is None else rate * self.task.schedule(at.step)
        self.optimiser.zero_grad()
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
        self.optimiser.step()
        if self.average is not None:
            self.average.update_parameters(self.task.model)
        return mean

    def _mean(self, losses: list[float], portions: list[Shard], at: TrainingState) -> float:
        """The mean loss of a step over all processes. If it is not finite, all stop before weights change."""
        mean = distributed.sum_over_ranks([sum(losses) / len(losses)])[0] / distributed.world_size()
        if not math.isfinite(mean):
            where = f"epoch {at.epoch + 1}, step {at.step + 1}"
            raise NotFiniteError(
                f"The loss became {mean} in {where}. {self._begins(portions)} "
                "Try a smaller learning rate, a smaller scale, or clipping of the gradient."
            )
        return mean

    def _begins(self, portions: list[Shard]) -> str:
        """Where numbers stopped being finite: the first module, looked for in another pass of all processes."""
        utils: Any = import_optional("accelerate.utils", "train")
        batches = (utils.send_to_device(portion.batch, self.accelerator.device) for portion in portions)
        with preserve_random_state(), self.accelerator.autocast():
            faults = [first_fault(self.task.model, partial(self.task.loss, self.model, batch)) for batch in batches]
        told = (str(fault) for fault in chain.from_iterable(distributed.gather_objects(faults)) if fault is not None)
        return next(told, "All outputs of the model's parts are finite, so it begins in the loss.")

    def figures(self, evaluate: Callable[[nn.Module], Mapping[str, float]]) -> Mapping[str, float]:
        """The first process's figures of the weights that would be kept now; none of the random numbers is used up."""
        model = self.task.model if self.average is None else self.average.module
        model.eval()
        with torch.no_grad(), preserve_random_state(), self.accelerator.autocast():
            found = evaluate(model)
        return distributed.on_rank_zero(lambda: found)

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights that would be kept now."""
        model = self.task.model if self.average is None else self.average.module
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


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
