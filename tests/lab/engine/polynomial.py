"""A small task with everything that a checkpoint has to hold: dropout, momentum, a schedule, averages, a choice."""

import math
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.task import History, Task, TrainingOptions

SETTINGS: dict[str, Any] = {
    "epochs": 6,
    "seed": 3,
    "accumulate": 2,
    "clip": 1.0,
    "ema": 0.9,
    "select": "error",
    "better": "lower",
}


def task(batches: int = 5) -> Task:
    """Learn x³ from noisy points; all three sources of random numbers take part in the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.2), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)

    def data(epoch: int) -> list[Tensor]:
        source = torch.Generator().manual_seed(epoch)
        return [torch.rand(16, 1, generator=source) * 2 - 1 for _ in range(batches)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        noise = 0.01 * (random.random() + numpy.random.rand())  # noqa: NPY002 - what a user's code draws from
        return (model(x) - x**3 - noise).square().mean()

    def evaluate(model: nn.Module) -> dict[str, float]:
        x = torch.linspace(-1, 1, 50).unsqueeze(1)
        torch.rand(7), random.random(), numpy.random.rand()  # noqa: NPY002 - must not disturb the training
        return {"error": float((model(x) - x**3).square().mean())}

    return Task(model, optimiser, data, loss, evaluate, cosine(6 * math.ceil(batches / 2)))


def trained(folder: Path | None = None, **changes: Any) -> tuple[History, dict[str, Tensor]]:
    """Train it; a checkpoint after every step."""
    made = task()
    history = fit(
        made, TrainingOptions(**{**SETTINGS, **changes}), Runtime(checkpoints=folder, save_seconds=0.0), "polynomial"
    )
    return history, dict(made.model.state_dict())
