"""Trainings that several processes share; `python shared_runs.py FOLDER` runs all of them in one of the processes."""

import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import uncollapse as uc
from uncollapse import distributed
from uncollapse.errors import NotFiniteError
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.task import History, Task, TrainingOptions
from uncollapse.lab.experiments.contrastive.objectives import ObjectiveConfig, objective, queue_objective
from uncollapse.lab.models.image_encoder import MomentumEncoder

WIDTH = 6
SIZES = (8, 5, 7, 1)  # rows of the batches of an epoch: with 2 and 4 processes shares differ, and some are empty
PAIRS = ObjectiveConfig(contrast=1.0, temperature=0.5, align=0.5, uniform=0.7)


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def perceptron(dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 3))


def mean_task(model: nn.Module, **more: Any) -> Task:
    """A mean over rows; batches are tuples, which `fit` cuts."""

    def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
        return [(rows(10 * epoch + n, size, WIDTH), rows(90 * epoch + n, size, 3)) for n, size in enumerate(SIZES)]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Task(model, optimiser, batches, loss, **more)


def mean() -> dict[str, Any]:
    """Groups of batches, a clipped gradient, averages, weights chosen by a figure."""
    model = perceptron()

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"size": float(model(rows(5, 20, WIDTH)).square().mean()) + 100 * distributed.rank()}

    task = mean_task(model, evaluate=evaluate, unit="rows")
    settings = TrainingOptions(3, accumulate=3, clip=0.5, ema=0.8, select="size", better="lower")
    return {"weights": model, "history": fit(task, settings, Runtime(device="cpu"))}


def pairs() -> dict[str, Any]:
    """All of the objective's parts, whose negatives are in other processes."""
    model = perceptron()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        x, y = model(batch.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
        return objective(PAIRS, x, y, gather=True)

    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sizes = (9, 6)
    task = Task(
        model, optimiser, lambda epoch: [rows(epoch, size, 2, WIDTH) for size in sizes], loss, sharding="gathered"
    )
    return {"weights": model, "history": fit(task, TrainingOptions(3), Runtime(device="cpu"))}


class Features(nn.Sequential):
    dim = 3


def momentum() -> dict[str, Any]:
    """MoCo: a queue of the outputs of all, shorter than two batches."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = MomentumEncoder(Features(*perceptron()), queue=16, ema=0.9)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return queue_objective(PAIRS, *model(batch[:, 0], batch[:, 1]))

    optimiser = torch.optim.SGD(model.encoder.parameters(), lr=0.05)
    batches = [rows(n, 10, 2, WIDTH) for n in range(3)]
    task = Task(model, optimiser, lambda epoch: batches, loss, sharding="gathered")
    return {"weights": model, "history": fit(task, TrainingOptions(2), Runtime(device="cpu"))}


def cured() -> nn.Module:
    """A transformer with a cure that has parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        uc.attach(model, "contra_norm", scale=0.3)
        uc.attach(model, "feat_scale", at="attention.output")
    return model


def cure() -> dict[str, Any]:
    """DistributedDataParallel, by Accelerate."""
    model = cured()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - x.roll(1, 1)).square().mean()

    task = Task(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda epoch: [rows(epoch, 7, 5, 8)], loss)
    return {"weights": model, "history": fit(task, TrainingOptions(3), Runtime(device="cpu"))}


def sharded() -> dict[str, Any]:
    """FSDP: each process holds a part of every weight. Cures come before."""
    model = cured()
    if distributed.world_size() > 1:
        for block in model.layers:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    count, me = distributed.world_size(), distributed.rank()
    for step in range(3):
        x = rows(step, 8, 5, 8)[me * 8 // count : (me + 1) * 8 // count]
        optimiser.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimiser.step()
    whole = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()}
    return {"state": whole}


def cured_later() -> dict[str, Any]:
    """A cure without parameters goes into a model that is spread already, one with parameters does not."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = rows(0, 2, 5, 8)
    with uc.attach(model, "contra_norm", scale=0.3):
        expected = model(x)
    fully_shard(model)
    try:
        uc.attach(model, "feat_scale", at="attention.output")
    except ValueError as error:
        told = str(error)
    uc.attach(model, "contra_norm", scale=0.3)
    return {"told": told, "difference": float((model(x) - expected).detach().abs().max())}


def normed() -> dict[str, Any]:
    """Batch norms, whose statistics are each process's own while it trains."""
    model = nn.Sequential(*perceptron(), nn.BatchNorm1d(3))
    task = replace(mean_task(model), batches=lambda epoch: [(rows(epoch, 8, WIDTH), rows(epoch, 8, 3))])
    fit(task, TrainingOptions(2), Runtime(device="cpu"))
    return {"weights": model}


def resumed(folder: Path) -> dict[str, Any]:
    """The last process hears Ctrl-C after a few steps; then the run goes on. Dropout is each process's own."""
    seen: list[int] = []

    def trained(runtime: Runtime, press: bool = False) -> tuple[nn.Module, History]:
        model = perceptron(dropout=0.4)
        plain_task = mean_task(model)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            seen.append(len(seen))
            if press and len(seen) == 6 and distributed.rank() == distributed.world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return plain_task.loss(model, batch)

        task = replace(plain_task, loss=loss)
        return model, fit(task, TrainingOptions(3, seed=4), runtime, "resumed")

    whole, _ = trained(Runtime(device="cpu"))
    seen.clear()
    runtime = Runtime(device="cpu", checkpoints=folder / "run", save_seconds=math.inf)
    try:
        trained(runtime, press=True)
    except KeyboardInterrupt as stopped:
        told = str(stopped)
    written = sorted(path.name for path in (folder / "run").iterdir())
    model, _ = trained(runtime)
    return {"weights": model, "whole": whole.state_dict(), "told": told, "written": written, "steps": len(seen)}


def not_finite() -> dict[str, Any]:
    """The rows of one process alone give no number."""
    model = perceptron()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.cat([rows(0, 7, WIDTH), torch.full((1, WIDTH), math.nan)])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    task = Task(model, optimiser, lambda epoch: [batch], lambda model, x: model(x).square().mean())
    try:
        fit(task, TrainingOptions(1), Runtime(device="cpu"))
    except NotFiniteError as error:
        return {"told": str(error), "before": before, "weights": model}
    return {}


def refused() -> dict[str, Any]:
    """What several processes cannot do."""
    model = perceptron()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    told = {}
    for name, batch, shares, identity in (
        ("graph", torch.ones(4, WIDTH), "none", ""),
        ("type", "words", "rows", ""),
        ("few", torch.ones(1, WIDTH), "gathered", ""),
        ("other data", torch.ones(4, WIDTH), "rows", str(distributed.rank())),
    ):
        task = Task(model, optimiser, lambda epoch, batch=batch: [batch], lambda m, x: m(x).mean(), sharding=shares)
        try:
            fit(task, TrainingOptions(1), Runtime(device="cpu"), identity)
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def failing() -> dict[str, Any]:
    """The last process fails in the middle of a step, and leaves."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if distributed.rank() == distributed.world_size() - 1:
            raise ValueError("a picture is upside down")
        return model(x).mean()

    model = perceptron()
    task = Task(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda epoch: [torch.ones(8, WIDTH)], loss)
    try:
        fit(task, TrainingOptions(1), Runtime(device="cpu"))
    except Exception as error:
        return {"told": f"{type(error).__name__}: {error}"}
    return {}


CASES: tuple[Callable[[], dict[str, Any]], ...] = (mean, pairs, momentum, cure, sharded, not_finite)


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """For a file: weights instead of models, and what matters of a history."""
    made = dict(found)
    if "weights" in found:
        made["weights"] = dict(found["weights"].state_dict())
    if "history" in found:
        history = found["history"]
        made["history"] = {"epochs": history.epochs, "kept": history.selected}
    return made


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.join_group("cpu")
    found = {case.__name__: plain(case()) for case in CASES}
    found["resumed"] = plain(resumed(folder))
    found |= {"normed": plain(normed()), "cured_later": cured_later(), "refused": refused()}
    found["failing"] = failing()  # the last: one of them is gone then
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # all is saved; threads of gloo may still run, and an interpreter that ends under them aborts
