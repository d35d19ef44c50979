"""How much of a scene's depth the layers of a frozen encoder hold: a small head of convolutions reads it from them.

The paper has NYU-Depth-V2 (arXiv 2005.10242). Here it is the labelled part, 1,449 pictures. Its usual split is not in
the file, so the last share of it is held back. In which unit the paper's errors are is not known to us: its numbers
stand in rows of their own, beside ours and not judged. `--data rendered` needs no file: rooms with a floor, a wall and
boxes, which show that all of it works and no more.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.engine.task import TrainingOptions
from uncollapse.lab.experiments.depth_probe import training as depth_probing
from uncollapse.lab.experiments.depth_probe.training import RENDERED, DepthConfig, DepthTraining
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record, round_metrics
from uncollapse.lab.tables.paper_table import PaperTable, Published
from uncollapse.metrics.hypersphere import PAPER as PAPER

NAME = "depth-probe"
TITLE = "Depth of scenes, read from the layers of a frozen encoder"


@dataclass(frozen=True)
class Config(DepthConfig):
    """A run."""


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train a head on a frozen encoder, and give the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        runtime.report_stage("reading the scenes")
        begun = depth_probing.load_start(config)
        parts = depth_probing.load_scenes(config, runtime, begun.side)
        digest = depth_probing.data_fingerprint(config, runtime)
        training = DepthTraining(begun.encoder, config, parts)
        experiment = f"{identity(NAME, config)}-{digest}"
        history = fit(training.task(), TrainingOptions(config.epochs, config.seed), runtime, experiment, asdict(config))
        saved_models.save_weights(runtime, training.head, config)
        sizes = {name: len(scenes.images) for name, scenes in parts.items()}
        depths = {"mean_metres": training.mean, "std_metres": training.std}
        return build_record(
            NAME,
            config,
            history.seconds,
            ("accelerate",) if config.data == RENDERED else ("accelerate", "h5py"),
            data={"name": config.data, "fingerprint": digest, "side": begun.side, **sizes, **round_metrics(depths)},
            figures=round_metrics(training.evaluate(training.head)),
            ended=history.ended,
            pace=round_metrics(history.pace),
            epochs=[round_metrics(each) for each in history.epochs],
        )


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    data, start = (re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("._") for text in (config.data, config.start))
    return f"{data[-40:]}-{start[-50:]}-{config.layer}-seed{config.seed}"


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core."""
    scenes = config.examples or (depth_probing.SCENES if config.data == RENDERED else 1449)
    look = 0.03 * ((config.side or depth_probing.SIDE) / 64) ** 2 * config.width**2
    return 10 + config.epochs * scenes * (look + 0.01 * (config.map_side / 32) ** 2)


SMALL: dict[str, Any] = {"data": RENDERED, "width": 0.25, "epochs": 15}
QUICK: Mapping[str, Any] = SMALL | {"examples": 200, "side": 32, "map_side": 16, "head_width": 32}
AXES: dict[str, Any] = {"where": {}, "groups": "data", "rows": "start", "columns": "layer"}
PAPER_ROWS = {"paper, 0.5·C(τ=0.1)": (0.7024, 0.7575), "paper, 0.75·A(α=2) + 0.5·U(t=2)": (0.7014, 0.7592)}


def _published() -> tuple[Published, ...]:
    data = Config().data
    return tuple(
        Published({"data": data, "start": row, "layer": layer}, value)
        for row, values in PAPER_ROWS.items()
        for layer, value in zip(("conv5", "conv4"), values, strict=True)
    )


TABLES: Mapping[str, PaperTable] = {
    "explained": PaperTable("Share of the error of a mean depth map that is gone", metric="explained", **AXES),
    "mse": PaperTable(
        "Mean squared error of depths in units of their spread; lower is better, the paper's unit is not known",
        metric="mse",
        percent=False,
        published=_published(),
        all_groups=True,
        **AXES,
    ),
}
GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "layers": (Grid({"layer": ("conv5", "conv4", "conv3", "conv2", "conv1")}),),
    "rendered": (Grid({"layer": ("conv5", "conv4", "conv3"), **{name: (value,) for name, value in SMALL.items()}}),),
}

RECIPE = Recipe(
    name=NAME,
    title=TITLE,
    paper=PAPER,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=TABLES,
    grids=GRIDS,
    quick=QUICK,
    fingerprint=depth_probing.data_fingerprint,
)
