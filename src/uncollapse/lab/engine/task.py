"""Training task, training options, and the history of a training."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from uncollapse.errors import UsageError


@dataclass(frozen=True)
class Task:
    """What is trained, and how it is evaluated.

    batches: the batches of an epoch, counted from 1; the same ones at every call. loss: a scalar of the model and a
    batch. evaluate: metrics of the model, which is in evaluation mode and without gradients. schedule: the factor of
    the learning rate at a step, counted from 0. unit: what `len` of a batch counts, such as "images", to report the
    speed. sharding: how processes share a batch. "rows": each takes some rows, and the loss is a mean over rows.
    "gathered": the same, but the loss already covers all rows, as losses with gather=True do. "none": the batch cannot
    be shared, such as a graph.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Callable[[int], Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None
    schedule: Callable[[int], float] | None = None
    unit: str | None = None
    sharding: Literal["rows", "gathered", "none"] = "rows"


@runtime_checkable
class Skippable(Protocol):
    """Batches that can be skipped without building them."""

    def after(self, count: int) -> Iterable[Any]:
        """Return the batches after the first `count`, which draw no random numbers."""
        ...


@runtime_checkable
class Shareable(Protocol):
    """Batches of which each rank can build only its own part."""

    def share(self, number: int, count: int) -> Iterable[Any]:
        """Return the same batches with only the rows of rank `number` of `count`, see `sharding.shard_slice`."""
        ...


@dataclass(frozen=True)
class TrainingOptions:
    """How long and how a task is trained.

    accumulate: batches per step. clip: largest norm of the gradient. ema: decay of the averaged weights, which are then
    evaluated and saved. evaluate_every: epochs between two evaluations; the last epoch is always evaluated. select: the
    metric that selects the final weights; None takes the last epoch. patience: evaluations without improvement after
    which training stops.
    """

    epochs: int
    seed: int = 0
    accumulate: int = 1
    clip: float | None = None
    precision: Literal["no", "bf16", "fp16"] = "no"
    ema: float | None = None
    evaluate_every: int = 1
    select: str | None = None
    better: Literal["higher", "lower"] = "higher"
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "evaluate_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.patience is not None and (self.select is None or self.patience < 1):
            raise UsageError(f"patience needs `select` and at least 1, got {self.patience} with {self.select!r}.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"ema is a decay between 0 and 1, got {self.ema}.")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"clip must be a norm above 0, or None, got {self.clip}.")
        if self.better not in ("higher", "lower"):
            raise UsageError(f"better must be 'higher' or 'lower', got {self.better!r}.")


@dataclass(frozen=True)
class History:
    """Metrics per epoch, the epoch of the final weights (`selected`), why training ended, and its total seconds.

    pace: speed since the last resumption, see `Throughput.summary`.
    """

    epochs: list[dict[str, float]]
    selected: int
    ended: str
    seconds: float
    pace: dict[str, float] = field(default_factory=dict)
