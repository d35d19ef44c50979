"""Write your own experiment: settings, resumable training, stored results and
a table over seeds.

    python examples/own_recipe.py --seeds 3

A small network learns the sign of a product in a few seconds. Results go to
results/parity and checkpoints to runs/parity, both below --folder. A second
run trains nothing again.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.lab.config.fields import config_field, identity
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.results import Results, build_record
from uncollapse.lab.runs.run_one import run_one, with_run_folder
from uncollapse.lab.tables.markdown import to_markdown
from uncollapse.lab.tables.paper_table import PaperTable

NAME = "parity"
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Config:
    """Settings of the experiment. Every field has a default, and there is a seed."""

    width: int = config_field(32, "Width of the hidden layer.")
    epochs: int = config_field(30, "Number of epochs.")
    optimizer: str = config_field("adam", "Optimizer.", choices=("adam", "sgd"))
    seed: int = config_field(0, "Seed of the weights.")


def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    """Train and evaluate. The config defines the result; the runtime only says where it is computed."""
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    with use_seed(config.seed):
        model = nn.Sequential(nn.Linear(8, config.width), nn.ReLU(), nn.Linear(config.width, 2))

    def batches(
        epoch: int,
    ) -> Iterator[Batch]:  # the same ones whenever an epoch is asked for, so that a run can resume
        order = torch.randperm(200, generator=torch.Generator().manual_seed(epoch))
        yield from ((x[part], y[part]) for part in order.chunk(4))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        right = (model(x).argmax(1) == y).float()
        return {"validation": float(right[200:300].mean()), "test": float(right[300:].mean())}

    optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[config.optimizer](model.parameters(), lr=0.02)
    task = Task(model, optimizer, batches, loss, evaluate, cosine(total=4 * config.epochs, warmup=0.1))
    options = TrainingOptions(config.epochs, config.seed, select="validation")
    history = fit(task, options, runtime, identity(NAME, config))  # the model then has the selected weights
    return build_record(NAME, config, history.seconds, ("accelerate",), figures=evaluate(model), epochs=history.epochs)


RECIPE = Recipe(
    name=NAME,
    title="The sign of a product",
    paper="none",
    config=Config,
    run=run,
    name_of=lambda config: f"{config.optimizer}-w{config.width}-seed{config.seed}",
    cost=lambda config: 1.0,  # seconds on one core, roughly; a sweep runs the cheapest first
    tables={"all": PaperTable("Accuracy", where={}, groups="optimizer", rows="width", columns="epochs")},
)


def main() -> None:
    """Run both optimizers with each seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path())
    arguments = parser.parse_args()
    results = Results(arguments.folder / "results")
    for config in (Config(optimizer=name, seed=seed) for name in ("adam", "sgd") for seed in range(arguments.seeds)):
        runtime = with_run_folder(Runtime(device="cpu"), RECIPE, config, arguments.folder / "runs")
        run_one(RECIPE, config, results, runtime)
    print(to_markdown(RECIPE.tables["all"], results.all(RECIPE)))


if __name__ == "__main__":
    main()
