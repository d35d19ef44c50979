"""A recipe that processes share, as the command `python shared_recipe.py train shared …`.

It writes down each step, keeps a checkpoint of each, and may wait or fail in one process.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse import distributed
from uncollapse.cli.app import app
from uncollapse.lab.config.fields import config_field, identity
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.recipe import RECIPES, Recipe
from uncollapse.lab.runs.results import build_record

NAME = "shared"


@dataclass(frozen=True)
class Config:
    epochs: int = config_field(30, "How long.")
    seed: int = config_field(0, "Of nothing.")


def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    folder = runtime.data_root or Path()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        (folder / f"step-of-{distributed.rank()}").touch()
        if (folder / "wait").exists():  # for a signal
            time.sleep(0.1)
        if (folder / "fail").exists() and distributed.rank() == 1:
            raise ValueError("the disk of the second process is gone")
        return (model(x) - 1).square().mean()

    source = torch.Generator().manual_seed(0)
    batches = [torch.randn(5, 2, generator=source)]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    task = Task(model, optimiser, lambda epoch: batches, loss, lambda model: {"rank": distributed.rank()})
    runtime = replace(runtime, save_seconds=0.0)
    history = fit(task, TrainingOptions(config.epochs), runtime, identity(NAME, config))
    figures = {"found": model.bias.item(), "rank": history.epochs[-1]["rank"]}
    return build_record(NAME, config, history.seconds, (), figures=figures, ended=history.ended, epochs=history.epochs)


def name_of(config: Config) -> str:
    return f"seed{config.seed}"


if __name__ == "__main__":
    recipe = Recipe(
        name=NAME,
        title="Shared",
        paper="Nobody",
        config=Config,
        run=run,
        name_of=name_of,
        cost=lambda config: 1.0,
    )
    RECIPES.add(NAME, recipe)
    app(prog_name="uncollapse")
