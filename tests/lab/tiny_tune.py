"""A recipe whose figures are a formula of its settings, for searches whose workers are processes of their own."""

import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.config.fields import config_field, identity
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import PrunedError, Runtime
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.recipe import RECIPES, Recipe
from uncollapse.lab.runs.results import build_record
from uncollapse.lab.search.variables import Search
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.trial_result import attach_line

NAME = "tiny-tune"


@dataclass(frozen=True)
class Config:
    """The figure after an epoch is best at scale 0.5 of the cure "good"; "bad" is behind from the start."""

    cure: str = config_field("good", "Which.", choices=("none", "good", "bad", "broken"))
    scale: float = config_field(0.1, "How strong.")
    test: float = config_field(0.5, "What the test figure is.")
    epochs: int = config_field(5, "How long.")
    fault: str = config_field("", "What goes wrong: raise, kill, nan, slow.")
    holdout: float = config_field(0.1, "Share that is held out.")
    seed: int = config_field(0, "Of the search.")

    def __post_init__(self) -> None:
        if self.cure == "broken" and self.scale > 0.2:
            raise UsageError("broken takes a scale up to 0.2.")


def figure(config: Config, epoch: int) -> float:
    """On validation, after an epoch."""
    strength = 1 - abs(math.log10(config.scale) - math.log10(0.5)) / 4
    top = {"none": 0.3, "good": strength, "bad": 0.1, "broken": 0.2}[config.cure]
    return top * (0.5 + 0.5 * epoch / config.epochs)


def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    """Train nothing, for so many epochs. Each beginning is a line in data_root/log."""
    begun = _log(runtime.data_root, config)
    _fail(config, begun)
    epochs = _trained(config, runtime, begun) if config.fault == "slow" else _counted(config, runtime)
    found = {"validation": figure(config, config.epochs), "test": config.test}
    return build_record(
        NAME,
        config,
        0.5,
        (),
        data={"fingerprint": _data(runtime.data_root)},
        figures=found,
        epochs=epochs,
        ended="last",
    )


def _counted(config: Config, runtime: Runtime) -> list[dict[str, float]]:
    """Epochs that take no time."""
    epochs: list[dict[str, float]] = []
    for epoch in range(1, config.epochs + 1):
        epochs.append({"epoch": epoch, "loss": 0.0, "validation": figure(config, epoch)})
        if config.fault == "nan" and config.cure != "none":
            raise NotFiniteError("The loss became nan in epoch 1.")
        if epoch < config.epochs and runtime.should_prune is not None and runtime.should_prune(epoch, epochs[-1]):
            raise PrunedError(f"stopped after epoch {epoch}")
    return epochs


def _trained(config: Config, runtime: Runtime, begun: int) -> list[dict[str, float]]:
    """Epochs of a real training, slow ones where the run is begun for the first time."""
    epoch = [0]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(0.0 if begun else 0.1)
        return model(batch).sum()

    def batches(number: int) -> list[Tensor]:
        epoch[0] = number
        return [torch.ones(1, 1)]

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        return {"validation": figure(config, epoch[0])}

    model = nn.Linear(1, 1)
    task = Task(model, torch.optim.SGD(model.parameters(), lr=0.0), batches, loss, evaluate)
    return fit(task, TrainingOptions(config.epochs, config.seed), runtime, identity(NAME, config)).epochs


def _log(folder: Path | None, config: Config) -> int:
    """How often this was begun before."""
    assert folder is not None
    with (folder / "log").open("a+") as log:
        log.seek(0)
        before = log.read().splitlines().count(name_of(config))
        log.write(f"{name_of(config)}\n")
    return before


def _data(folder: Path | None) -> str:
    path = (folder or Path()) / "data"
    return path.read_text() if path.exists() else "same"


def _fail(config: Config, begun: int) -> None:
    if config.fault == "raise":
        raise ValueError("It broke.")
    if config.fault == "kill" and config.cure != "none" and not begun:
        os.kill(os.getpid(), signal.SIGKILL)


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    return f"{config.cure}-s{config.scale:g}"


def line(config: Config) -> str:
    """The code to copy."""
    return attach_line("contra_norm", {"scale": config.scale})


SEARCH = Search(
    space=(OneOf("cure", ("good", "bad")), Between("scale", 0.01, 10.0, when={"cure": ("good",)})),
    baseline={"cure": "none"},
    line=line,
    missing=lambda config: None if config.holdout else "Nothing is held out to choose on: --holdout 0.1.",
)
RECIPE = Recipe(
    name=NAME,
    title="A tiny one",
    paper="arXiv",
    config=Config,
    run=run,
    name_of=name_of,
    cost=lambda config: 1.0,
    search=SEARCH,
)

if __name__ == "tiny_tune":  # as workers and the fixture import it, not as pytest does when it looks for tests
    RECIPES.add(NAME, RECIPE)
