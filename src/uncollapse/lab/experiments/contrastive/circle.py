"""Recipe circle: features of a small encoder with two outputs that is random, supervised or contrastive.

Figure 3 of Wang & Isola (arXiv 2005.10242): how close the two views of an image are, how images spread over the circle,
all of them and per class, and how well a linear classifier does on the two features.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.lab.config.fields import config_field, identity, reset_idle
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import History
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive.config import DATA, MODEL, TRAINING, EncoderConfig, data_fingerprint
from uncollapse.lab.experiments.contrastive.recipe import LIBRARIES
from uncollapse.lab.experiments.contrastive.training import (
    OUTPUT,
    EncoderTraining,
    Loss,
    data_facts,
    fit_encoder,
    hypersphere_metrics,
    linear_probe,
)
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.models.image_encoder import SmallAlexNet
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import round_metrics, summarize_diagnosis
from uncollapse.losses.info_nce import info_nce
from uncollapse.metrics.hypersphere import PAPER
from uncollapse.pairwise import all_ranks

NAME = "circle"
LEARNED = ("random", "supervised", "contrastive")
BINS = 40  # of the histogram of distances, from 0 to 2
DIGITS = 4  # of an angle


@dataclass(frozen=True)
class Config(EncoderConfig):
    """Configuration of a run. Fields without an effect get their defaults, so that they make no other run."""

    learned: str = config_field(
        "contrastive",
        "How the encoder learns: not at all, from labels, or from pairs of views.",
        choices=LEARNED,
        group=TRAINING,
    )
    temperature: float = config_field(0.5, "contrastive: temperature of InfoNCE.", minimum=1e-3, group=TRAINING)
    data: str = config_field(
        "cifar10",
        "cifar10, cifar100, stl10, fashion-mnist, digits, or a folder in --data-root with train/CLASS and val/CLASS.",
        group=DATA,
    )
    dim: int = config_field(2, "Output features; two lie on the circle.", choices=(2,), group=MODEL)
    side: int = config_field(32, "Side in pixels to which images and views are resized.", minimum=15, group=MODEL)
    batch: int = config_field(256, "Images per step; each has two views.", minimum=2, group=TRAINING)

    def __post_init__(self) -> None:
        super().__post_init__()
        reset_idle(self, ["temperature"] if self.learned != "contrastive" else [])


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train an encoder. Return it in evaluation mode, with the record of the run."""
    runtime.report_stage("reading the images")
    data = contrastive.load_data(config, runtime)
    encoder = contrastive.build_encoder(config)
    classes = data.set.train.classes
    training = EncoderTraining(encoder, config, data, runtime, _loss(config, encoder, len(classes)))
    if config.learned == "random":
        history = History([], 0, "untrained", 0.0)
    else:
        history = fit_encoder(training, f"{identity(NAME, config)}-{data.fingerprint()}")
    metrics, circle = _evaluate(training)
    diagnosis = summarize_diagnosis(training.diagnosis(encoder))
    saved_models.save_weights(runtime, encoder, config)
    return encoder, training_record(
        NAME,
        config,
        history,
        LIBRARIES,
        data=data_facts(data, training) | {"classes": list(classes)},
        figures=round_metrics(metrics),
        circle=circle,
        diagnosis={"after": diagnosis},
    )


def _loss(config: Config, encoder: SmallAlexNet, classes: int) -> Loss:
    """Return InfoNCE, or the cross entropy of a linear layer on the circle: the encoder's `head`, trained with it."""
    if config.learned == "contrastive":
        return lambda x, y, labels: info_nce(x, y, temperature=config.temperature, symmetric=True, gather=True)
    if config.learned == "supervised":
        with use_seed(config.seed):
            encoder.add_module("head", nn.Linear(config.dim, classes))
    return partial(_supervised_loss, encoder)


def _supervised_loss(encoder: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    logits = encoder.head(F.normalize(torch.cat([x, y]), dim=-1))
    return all_ranks.mean(F.cross_entropy(logits, labels.repeat(2), reduction="none"))


def _evaluate(training: EncoderTraining) -> tuple[dict[str, float], dict[str, Any]]:
    """Return metrics, and what the plots show: the angle of each image and the distances between two views."""
    encoder = training.encoder.eval()
    measured = training.data.measured
    x, y = training.pairs(encoder, measured)
    training.runtime.report_stage("evaluating the features")
    splits = {split: training.features(encoder, split, (OUTPUT,)) for split in training.data.splits}
    labelled = {split: (rows[OUTPUT], rows["labels"]) for split, rows in splits.items()}
    train_rows = training.probe_rows(encoder, OUTPUT, labelled.pop("train"))
    metrics = hypersphere_metrics(x, y) | linear_probe(train_rows, labelled)
    shown = splits[measured]
    angles = torch.atan2(shown[OUTPUT][:, 1], shown[OUTPUT][:, 0])
    distances = torch.histc((x - y).norm(dim=1).clamp(max=2), BINS, 0, 2)  # rounding exceeds 2
    return metrics, {
        "angles": [round(angle, DIGITS) for angle in angles.tolist()],
        "labels": shown["labels"].tolist(),
        "distances": distances.int().tolist(),
    }


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    return f"{contrastive.data_slug(config)}-{config.learned}-seed{config.seed}"[:120]


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    return contrastive.cost(config if config.learned != "random" else replace(config, epochs=0))


def plots(records: Sequence[Mapping[str, Any]]) -> Iterable[Any]:
    """Return the plots of the page of a table."""
    from uncollapse.lab.experiments.contrastive.encoder_plots import circle_plots

    return circle_plots(records)


RECIPE_DATA = recipe_data.read(__package__, Config, prefix="circle_")
RECIPE = Recipe(
    name=NAME,
    title="Features on the circle: an encoder with two outputs, random, supervised or contrastive",
    paper=PAPER,
    config=Config,
    run=record_of(train),
    name_of=name_of,
    cost=cost,
    tables=RECIPE_DATA.tables,
    grids=RECIPE_DATA.grids,
    presets=RECIPE_DATA.presets,
    quick=RECIPE_DATA.quick,
    fingerprint=data_fingerprint,
    plots=plots,
    reads_images=True,
)
