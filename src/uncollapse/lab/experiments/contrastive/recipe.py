"""Recipe contrast: train a small image encoder with InfoNCE, alignment and uniformity in any weights.

The preset `paper-stl10` follows Wang & Isola (arXiv 2005.10242). The encoder is evaluated on frozen features. Settings
are compared on images held out from training; the test images are read once, at the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.contrastive.config import (
    ContrastConfig,
    build_encoder,
    cost,
    data_fingerprint,
    data_slug,
    load_data,
)
from uncollapse.lab.experiments.contrastive.objectives import formula, objective, objective_slug
from uncollapse.lab.experiments.contrastive.training import (
    EncoderTraining,
    data_facts,
    fit_encoder,
    hypersphere_metrics,
    infonce_metrics,
)
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import round_metrics, summarize_diagnosis
from uncollapse.lab.search.variables import Search
from uncollapse.metrics.hypersphere import PAPER
from uncollapse.tuning.space import Between

NAME = "contrast"
LIBRARIES = ("torchvision", "pillow", "accelerate", "scikit-learn")
Config = ContrastConfig


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train an encoder. Return it in evaluation mode, with the record of the run."""
    runtime.report_stage("reading the images")
    data = load_data(config, runtime, labelled=False)
    encoder = build_encoder(config)

    def loss(x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        return objective(config, x, y, gather=True)

    training = EncoderTraining(encoder, config, data, runtime, loss)
    history = fit_encoder(training, f"{identity(NAME, config)}-{data.fingerprint()}")
    pair = training.pairs(encoder, data.measured)
    metrics = hypersphere_metrics(*pair) | infonce_metrics(*pair) | training.probes(encoder)
    diagnosis = summarize_diagnosis(training.diagnosis(encoder))
    saved_models.save_weights(runtime, encoder, config)
    return encoder, training_record(
        NAME,
        config,
        history,
        LIBRARIES,
        data=data_facts(data, training),
        figures=round_metrics(metrics),
        pace=round_metrics(history.pace),
        diagnosis={"after": diagnosis},
    )


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    what = f"{objective_slug(asdict(config))}-b{config.batch}" if config.epochs else "untrained"
    return f"{data_slug(config)}-{what}-d{config.dim}-seed{config.seed}"[:120]


def plots(records: Sequence[Mapping[str, Any]]) -> Iterable[Any]:
    """Return the plots of the page of a table."""
    from uncollapse.lab.experiments.contrastive.encoder_plots import scatter_plots

    return scatter_plots(records)


def statistics(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how alignment and uniformity correlate with accuracy, for each group of comparable encoders."""
    from uncollapse.lab.experiments.contrastive.predictors import correlation_record

    return correlation_record(records)


def row_of(config: Mapping[str, Any]) -> str:
    """Return the objective, with the batch size and the output size where they are unusual."""
    small = DATA.presets["small"]
    batch = small["batch"] if config["width"] == small["width"] else 768
    odd = {"batch": config["batch"] != batch and config["epochs"], "dim": config["dim"] != 128}
    what = formula(config) if config["epochs"] else "untrained"
    return ", ".join([what, *(f"{name} {config[name]}" for name, is_odd in odd.items() if is_odd)])


# Accuracy is only known at the end: alignment and uniformity per epoch do not show which trial is better.
SEARCH = Search(
    space=(Between("temperature", 0.05, 1.0), Between("align", 0.05, 2.0), Between("uniform", 0.05, 2.0)),
    baseline={"contrast": 1.0, "temperature": 0.5, "align": 0.0, "uniform": 0.0},
    by="validation_output_linear",
    by_epoch=None,
)
DATA = recipe_data.read(__package__, Config, row_of=row_of)
RECIPE = Recipe(
    name=NAME,
    title="A contrastive encoder of images: InfoNCE, alignment and uniformity in any weights",
    paper=PAPER,
    config=Config,
    run=record_of(train),
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    presets=DATA.presets,
    quick=DATA.quick,
    search=SEARCH,
    fingerprint=data_fingerprint,
    plots=plots,
    statistics=statistics,
    reads_images=True,
)
