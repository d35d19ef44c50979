"""MoCo: a ResNet with a momentum encoder and a queue, trained with InfoNCE, alignment and uniformity in any weights.

Section 5 of Wang & Isola (arXiv 2005.10242) on ImageNet-100 with MoCo (arXiv 1911.05722), and on ImageNet with MoCo v2
(arXiv 2003.04297). It is judged by a linear classifier of the frozen features before the output, which is trained on
new crops of the pictures. Settings are compared on pictures that were held back; the test pictures are read at the end.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.experiments.contrastive.config import data_fingerprint
from uncollapse.lab.experiments.contrastive.objectives import formula, objective_slug
from uncollapse.lab.experiments.contrastive.training import data_facts, fit_encoder
from uncollapse.lab.experiments.moco import training as momentum
from uncollapse.lab.experiments.moco.online_probe import OnlineProbe
from uncollapse.lab.experiments.moco.training import MomentumConfig, MomentumTraining
from uncollapse.lab.experiments.moco.training import cost as cost
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record, round_metrics, summarize_diagnosis
from uncollapse.lab.tables.paper_table import PaperTable, Published
from uncollapse.metrics.hypersphere import PAPER as PAPER

NAME = "moco"
TITLE = "MoCo: a momentum encoder and a queue, with InfoNCE, alignment and uniformity in any weights"
LIBRARIES = (*contrast.LIBRARIES, "timm")


@dataclass(frozen=True)
class Config(MomentumConfig):
    """A run."""


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train an encoder, and give the record of the run."""
    return train(config, runtime)[1]


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained encoder in evaluation mode, without its follower, and the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        runtime.report_stage("reading the pictures")
        data = contrastive.load_data(config, runtime)
        training = MomentumTraining(momentum.build_momentum_encoder(config), config, data, runtime)
        experiment = f"{identity(NAME, config)}-{data.fingerprint()}"
        history = fit_encoder(training, experiment)
        encoder = training.encoder.encoder
        saved_models.save_weights(runtime, encoder, config)
        found = _judged(training, experiment)
        return encoder, build_record(
            NAME,
            config,
            history.seconds,
            LIBRARIES,
            data=data_facts(data, training),
            ended=history.ended,
            pace=round_metrics(history.pace),
            epochs=[round_metrics(each) for each in history.epochs],
            **found,
        )


def _judged(training: MomentumTraining, experiment: str) -> dict[str, Any]:
    """The figures of a trained encoder, and its diagnosis."""
    encoder = training.encoder.encoder
    diagnosis = summarize_diagnosis(training.diagnosis(encoder))
    probe = OnlineProbe(encoder, training.config, training.data.parts["train"], training.runtime, experiment)
    figures = training.evaluate(encoder) | training.judged(probe)
    probe.clear()
    return {"figures": round_metrics(figures), "diagnosis": {"after": diagnosis}}


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    data = config.data.strip("./").replace("/", "_") or "images"
    return f"{data}-{config.encoder}-{objective_slug(asdict(config))}-seed{config.seed}"[:120]


BOTH: dict[str, Any] = {"contrast": 0.0, "align": 3.0, "uniform": 1.0, "t": 3.0}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper-imagenet100": BOTH  # a folder with the hundred classes, or ImageNet's with --class-list
    | {
        "data": "imagenet100",
        "batch": 128,
        "lr": 0.06,  # for 256: 0.03 for the batch
        "epochs": 240,
        "falls": (1 / 2, 2 / 3, 5 / 6),
        "queue": 16_384,  # ours: the paper's is not known to us
        "holdout": 0.01,
        "probe_lr": 10.0,
        "probe_epochs": 60,
        "probe_falls": (1 / 2, 2 / 3, 5 / 6),
        "probe_drop": 0.2,
    },
    "paper-imagenet": BOTH
    | {
        "data": "imagenet",
        "mlp": True,
        "schedule": "cosine",
        "hue": 0.1,
        "jitter_chance": 0.8,
        "blur": 0.5,
        "holdout": 0.01,
        "neighbours": False,
    },
}
QUICK: Mapping[str, Any] = BOTH | {
    "data": "digits",
    "encoder": "small_alexnet",
    "width": 0.1,
    "dim": 32,
    "side": 16,
    "queue": 512,
    "ema": 0.99,
    "epochs": 10,
    "batch": 128,
    "lr": 0.12,
    "flip": 0.0,
    "judged": "whole",
    "probe_epochs": 5,
    "probe_batch": 128,
    "probe_lr": 5.0,
}
SMALL: dict[str, Any] = {  # what a few hundred pictures and minutes allow: that it runs, not what it can do
    "data": "tinyimagenet20",
    "examples": 500,
    "encoder": "resnet18",
    "side": 32,
    "queue": 1024,
    "ema": 0.99,
    "epochs": 15,
    "batch": 64,
    "lr": 0.12,
    "precision": "bf16",
    "judged": "whole",
    "probe_epochs": 10,
    "probe_batch": 64,
    "probe_lr": 0.1,  # features are large so early
}


AXES: dict[str, Any] = {
    "groups": "data",
    "rows": "contrast+temperature+align+alpha+uniform+t",
    "columns": "encoder",
    "row_of": formula,
    "row_name": "objective",
}
FREE = ("class_list", "holdout", "precision", "neighbours")


def _beside(title: str, preset: str, figure: str, table: Mapping[str, float]) -> PaperTable:
    """A table of the paper, with the results that were run as it was."""
    protocol = asdict(Config(**PRESETS[preset]))
    axes = (AXES["groups"], AXES["rows"], AXES["columns"])
    numbers = tuple(
        Published(dict(zip(axes, (protocol["data"], row, "resnet50"), strict=True)), value)
        for row, value in table.items()
    )
    where = {"data": protocol["data"]}
    return PaperTable(
        title, where=where, metric=figure, published=numbers, protocol=protocol, free=FREE, all_groups=True, **AXES
    )


TABLES: Mapping[str, PaperTable] = {
    "accuracy": PaperTable("Test accuracy of a linear classifier", where={}, **AXES),
    "imagenet100": _beside(
        "MoCo on ImageNet-100, top 1",
        "paper-imagenet100",
        "test",
        {"C(τ=0.07)": 72.80, "3·A(α=2) + U(t=3)": 74.60},
    ),
    "imagenet100-top5": _beside(
        "MoCo on ImageNet-100, top 5",
        "paper-imagenet100",
        "test_top5",
        {"C(τ=0.07)": 91.64, "3·A(α=2) + U(t=3)": 92.74},
    ),
    "imagenet": _beside(
        "MoCo v2 on ImageNet, top 1", "paper-imagenet", "test", {"C(τ=0.2)": 67.5, "3·A(α=2) + U(t=3)": 67.69}
    ),
}


def _grid(**values: Any) -> Grid:
    """One run, or several where a value is a tuple."""
    given = SMALL | values
    return Grid({name: value if isinstance(value, tuple) else (value,) for name, value in given.items()})


GRIDS: Mapping[str, tuple[Grid, ...]] = {"small": (_grid(temperature=0.2), _grid(**BOTH))}

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
    presets=PRESETS,
    quick=QUICK,
    fingerprint=data_fingerprint,
    reads_images=True,
)
