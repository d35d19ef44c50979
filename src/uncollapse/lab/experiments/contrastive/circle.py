"""Features on the circle: a small encoder with two outputs that learned nothing, from labels, or from pairs of views.

Figure 3 of Wang & Isola (arXiv 2005.10242): how close the two views of a picture come, how the pictures are spread over
the circle, all of them and each class, and what a linear classifier makes of the two features.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.lab.config.fields import config_field, identity
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import History
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive import frozen_probe
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.experiments.contrastive.config import DATA, MODEL, TRAINING, EncoderConfig, data_fingerprint
from uncollapse.lab.experiments.contrastive.training import (
    OUTPUT,
    EncoderTraining,
    Loss,
    data_facts,
    fit_encoder,
    hypersphere_metrics,
)
from uncollapse.lab.models.image_encoder import SmallAlexNet
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record, round_metrics, summarize_diagnosis
from uncollapse.lab.tables.paper_table import PaperTable, Published
from uncollapse.losses.info_nce import info_nce
from uncollapse.metrics.hypersphere import PAPER as PAPER
from uncollapse.pairwise import all_ranks

NAME = "circle"
TITLE = "Features on the circle: an encoder with two outputs, random, supervised or contrastive"
LEARNED = ("random", "supervised", "contrastive")
BINS = 40  # of the histogram of distances, from 0 to 2
DIGITS = 4  # of an angle


@dataclass(frozen=True)
class Config(EncoderConfig):
    """A run. Settings that an encoder does not need get their defaults: they make no other run."""

    learned: str = config_field(
        "contrastive",
        "How the encoder learns: not at all, from labels, or from pairs of views.",
        choices=LEARNED,
        group=TRAINING,
    )
    temperature: float = config_field(0.5, "contrastive: of InfoNCE.", minimum=1e-3, group=TRAINING)
    data: str = config_field(
        "cifar10",
        "cifar10, cifar100, stl10, fashion-mnist, digits, or a folder in --data-root with train/CLASS and val/CLASS.",
        group=DATA,
    )
    dim: int = config_field(2, "Features of the output; two lie on the circle.", choices=(2,), group=MODEL)
    side: int = config_field(32, "Side in pixels to which pictures and views are brought.", minimum=15, group=MODEL)
    batch: int = config_field(256, "Pictures in a step; each has two views.", minimum=2, group=TRAINING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learned != "contrastive":
            object.__setattr__(self, "temperature", 0.5)


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train an encoder, and give the record of the run."""
    return train(config, runtime)[1]


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The encoder in evaluation mode, and the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        runtime.report_stage("reading the pictures")
        data = contrastive.load_data(config, runtime)
        encoder = contrastive.build_encoder(config)
        training = EncoderTraining(encoder, config, data, runtime, _loss(config, encoder, len(data.set.train.classes)))
        history = _learn(training, f"{identity(NAME, config)}-{data.fingerprint()}")
        found = _judged(training)
        saved_models.save_weights(runtime, encoder, config)
        return encoder, build_record(
            NAME,
            config,
            history.seconds,
            contrast.LIBRARIES,
            data=data_facts(data, training) | {"classes": list(data.set.train.classes)},
            ended=history.ended,
            epochs=[round_metrics(each) for each in history.epochs],
            **found,
        )


def _loss(config: Config, encoder: SmallAlexNet, classes: int) -> Loss:
    """InfoNCE, or a cross entropy of a linear layer on the circle that is trained along, the encoder's `head`."""
    if config.learned == "contrastive":
        return lambda x, y, labels: info_nce(x, y, temperature=config.temperature, symmetric=True, gather=True)
    if config.learned == "supervised":
        with use_seed(config.seed):
            encoder.add_module("head", nn.Linear(config.dim, classes))
    return partial(_labelled, encoder)


def _labelled(encoder: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    logits = encoder.head(F.normalize(torch.cat([x, y]), dim=-1))
    return all_ranks.mean(F.cross_entropy(logits, labels.repeat(2), reduction="none"))


def _learn(training: EncoderTraining, experiment: str) -> History:
    config: Any = training.config
    return fit_encoder(training, experiment) if config.learned != "random" else History([], 0, "untrained", 0.0)


def _judged(training: EncoderTraining) -> dict[str, Any]:
    """Figures, and what the pictures of the circle show: angles of the pictures, distances of their views."""
    encoder, runtime = training.encoder.eval(), training.runtime
    x, y = training.pairs(encoder, "validation")
    runtime.report_stage("judging the features")
    parts = {part: training.features(encoder, part, (OUTPUT,)) for part in ("train", "validation", "test")}
    labelled = {part: (rows[OUTPUT], rows["labels"]) for part, rows in parts.items()}
    figures = hypersphere_metrics(x, y) | frozen_probe.linear_probe(labelled.pop("train"), labelled)
    shown = parts["validation"]
    angles = torch.atan2(shown[OUTPUT][:, 1], shown[OUTPUT][:, 0])
    distances = torch.histc((x - y).norm(dim=1).clamp(max=2), BINS, 0, 2)  # rounding goes beyond
    return {
        "figures": round_metrics(figures),
        "circle": {
            "angles": [round(angle, DIGITS) for angle in angles.tolist()],
            "labels": shown["labels"].tolist(),
            "distances": distances.int().tolist(),
        },
        "diagnosis": {"after": summarize_diagnosis(training.diagnosis(encoder))},
    }


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    data = config.data.strip("./").replace("/", "_") or "images"
    return f"{data}-{config.learned}-seed{config.seed}"[:120]


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core."""
    return contrastive.cost(config) if config.learned != "random" else 30.0


def plots(records: Sequence[Mapping[str, Any]]) -> Iterable[Any]:
    """For the page of a table."""
    from uncollapse.lab.experiments.contrastive.encoder_plots import circle_plots

    return circle_plots(records)


SMALL: dict[str, Any] = {"examples": 20_000, "width": 0.25, "epochs": 20, "judged": "whole", "precision": "bf16"}
PRESETS: Mapping[str, Mapping[str, Any]] = {"small": SMALL}
QUICK: Mapping[str, Any] = {
    "data": "digits",
    "width": 0.1,
    "side": 16,
    "epochs": 15,
    "batch": 128,
    "flip": 0.0,
    "judged": "whole",
}
PUBLISHED = {"random": 12.71, "supervised": 57.19, "contrastive": 28.60}
TABLES: Mapping[str, PaperTable] = {
    "accuracy": PaperTable(
        "Linear accuracy of two features on the circle",
        where={},
        groups="data",
        rows="learned",
        columns="dim",
        published=tuple(
            Published({"data": "cifar10", "learned": learned, "dim": 2}, mean) for learned, mean in PUBLISHED.items()
        ),
        free=("examples", "width", "epochs", "precision", "judged", "temperature"),
    )
}
GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "cifar10": (Grid({"learned": LEARNED, **{name: (value,) for name, value in SMALL.items()}}),)
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
    presets=PRESETS,
    quick=QUICK,
    fingerprint=data_fingerprint,
    plots=plots,
    reads_images=True,
)
