"""A recipe that only counts and waits, for sweeps whose workers are processes of their own."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from uncollapse.errors import import_optional
from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.checkpoints import Checkpoints
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.recipe import RECIPES, Recipe
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record

NAME = "tiny-sweep"
PAUSE = 0.02  # seconds


@dataclass(frozen=True)
class Config:
    size: int = 1
    scale: float = 1.0
    fault: str = "none"
    steps: int = 1
    slow: int = 0
    seed: int = 0


def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    """Count to `steps`, slowly when it begins the first `slow` times.

    Each beginning is a line in data_root/log: the name of the run, the step it goes on from, the number of threads.
    """
    checkpoints = Checkpoints(runtime.checkpoints, identity(NAME, config))
    found = checkpoints.load()
    done = 0 if found is None else found.step
    with (runtime.data_root / "log").open("a+") as log:
        log.seek(0)
        pause = PAUSE if len(log.readlines()) < config.slow else 0.0
        log.write(f"{name_of(config)} {done} {os.environ['OMP_NUM_THREADS']}\n")
    if config.fault == "raise":
        raise ValueError("The loss became nan.\nTry another one.")
    if config.fault == "library":
        import_optional("no_such_library", "pyg")
    if config.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while done < config.steps:
            time.sleep(pause)
            done += 1
            if runtime.progress is not None:  # a run on a cluster reports nothing
                runtime.progress(done, config.steps, {"epoch": done})
    except KeyboardInterrupt:
        checkpoints.save(done, {}, {})
        raise
    figures = {"validation": 1 - abs(config.scale - config.size / 10), "test": 0.5}
    return build_record(NAME, config, 0.5 * config.size, (), figures=figures)


def name_of(config: Config) -> str:
    return f"{config.fault}-size{config.size}-s{config.scale:g}-seed{config.seed}"


RECIPE = Recipe(
    name=NAME,
    title="A tiny one",
    paper="arXiv",
    config=Config,
    run=run,
    name_of=name_of,
    cost=lambda config: float(config.size),
    grids={"both": (Grid({"size": (1, 2)}), Grid({"size": (2, 3)})), "one": (Grid({"seed": (0, 1, 2)}),)},
)

if __name__ == "tiny_sweep":  # as workers and the fixture import it, not as pytest does when it looks for tests
    RECIPES.add(NAME, RECIPE)
