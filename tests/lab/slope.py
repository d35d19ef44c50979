"""A recipe that trains in no time: the slope of a line. Its configuration has fields of every type."""

import math
import signal
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from uncollapse.lab.config.fields import config_field, identity
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.results import build_record

NAME = "slope"
runs: list[int] = []  # seeds of the runs that were begun
interrupt_at: list[int] = []  # epochs in which Ctrl-C is pressed, once each


@dataclass(frozen=True)
class Config:
    slope: float = config_field(2.0, "What is to be found; any number in [-9, 9].")
    epochs: int = config_field(6, "How long.")
    shape: str = config_field("line", "Of the data.", choices=("line", "none"))
    noise: float | None = config_field(None, "Deviation, if any.")
    steps: tuple[int, ...] = config_field((1, 2), "Batches of an epoch.")
    precision: Literal["no", "bf16"] = config_field("no", "Of the numbers.")
    bias: bool = config_field(False, "Whether there is a constant.")
    weight_decay: float = config_field(0.0, "L2 penalty.")
    seed: int = config_field(0, "Of the weights.")

    def __post_init__(self) -> None:
        if abs(self.slope) > 9:
            raise ValueError(f"slope must lie within [-9, 9], got {self.slope}.")


def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    runs.append(config.seed)
    torch.manual_seed(config.seed)
    model = nn.Linear(1, 1, bias=config.bias)
    x = torch.linspace(-1, 1, 9).unsqueeze(1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        epoch = int(batch)
        if epoch in interrupt_at:
            interrupt_at.remove(epoch)
            signal.raise_signal(signal.SIGINT)
        return ((model(x) - config.slope * x) ** 2).mean()

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"validation": math.exp(-float(loss(model, torch.tensor(0))))}

    optimiser = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=config.weight_decay)
    task = Task(model, optimiser, lambda epoch: [torch.tensor(epoch)], loss, evaluate)
    history = fit(
        task, TrainingOptions(config.epochs, config.seed), runtime, f"{identity(NAME, config)}-of9"
    )  # and its data
    figures = {"found": next(model.parameters()).item(), "epoch": history.selected, "broken": math.nan}
    figures |= {"validation": history.epochs[-1]["validation"]}
    return build_record(
        NAME,
        config,
        history.seconds,
        (),
        figures=figures,
        ended=history.ended,
        epochs=history.epochs,
        data={"fingerprint": "x9"},
    )


def name_of(config: Config) -> str:
    return f"{config.slope:g}-seed{config.seed}"


RECIPE = Recipe(
    name=NAME,
    title="A straight line [1]",
    paper="Euclid, arXiv 0000.00000",
    config=Config,
    run=run,
    name_of=name_of,
    cost=lambda config: 50.0 * config.epochs,
)
