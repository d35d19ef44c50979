"""Recipe depth-probe: how much of a scene's depth the layers of a frozen encoder hold.

A small convolutional head predicts the depth map from a layer. Wang & Isola (arXiv 2005.10242) use NYU-Depth-V2; this
is the labelled part, 1,449 images. The usual split is not in the file, so the last share of it is held out. The unit of
the paper's errors is not known: its numbers are rows of their own, and no verdict compares them with ours.
`--data rendered` needs no file: rooms with a floor, a wall and boxes, which only show that the recipe works.
"""

import re
from dataclasses import asdict
from typing import Any

from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.task import TrainingOptions
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.depth_probe.config import (
    RENDERED,
    SCENES,
    SIDE,
    Config,
    data_fingerprint,
    load_frozen_encoder,
    load_scenes,
)
from uncollapse.lab.experiments.depth_probe.training import DepthTraining
from uncollapse.lab.experiments.training_run import training_record, with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import round_metrics
from uncollapse.metrics.hypersphere import PAPER

NAME = "depth-probe"


@with_threads
def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    """Train a head on a frozen encoder. Return the record of the run."""
    runtime.report_stage("reading the scenes")
    frozen = load_frozen_encoder(config)
    splits = load_scenes(config, runtime, frozen.side)
    digest = data_fingerprint(config, runtime)
    training = DepthTraining(frozen.encoder, config, splits, frozen.pixel_stats)
    options = TrainingOptions(config.epochs, config.seed)
    history = fit(training.task(), options, runtime, f"{identity(NAME, config)}-{digest}", asdict(config))
    saved_models.save_weights(runtime, training.head, config)
    sizes = {name: len(scenes.images) for name, scenes in splits.items()}
    depths = round_metrics({"mean_metres": training.mean, "std_metres": training.std})
    return training_record(
        NAME,
        config,
        history,
        ("accelerate",) if config.data == RENDERED else ("accelerate", "h5py"),
        data={"name": config.data, "fingerprint": digest, "side": frozen.side, **sizes, **depths},
        figures=round_metrics(training.evaluate(training.head)),
        pace=round_metrics(history.pace),
    )


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    data, start = (re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("._") for text in (config.data, config.start))
    return f"{data[-40:]}-{start[-50:]}-{config.layer}-seed{config.seed}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    scenes = config.examples or (SCENES if config.data == RENDERED else 1449)
    encoder = 0.03 * ((config.side or SIDE) / 64) ** 2 * config.width**2
    return 10 + config.epochs * scenes * (encoder + 0.01 * (config.map_side / 32) ** 2)


DATA = recipe_data.read(__package__, Config)
RECIPE = Recipe(
    name=NAME,
    title="Depth of scenes, read from the layers of a frozen encoder",
    paper=PAPER,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    quick=DATA.quick,
    fingerprint=data_fingerprint,
)
