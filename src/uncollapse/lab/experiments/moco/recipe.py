"""Recipe moco: a ResNet with a momentum encoder and a queue; InfoNCE, alignment and uniformity in any weights.

Section 5 of Wang & Isola (arXiv 2005.10242) on ImageNet-100 with MoCo (arXiv 1911.05722), and on ImageNet with MoCo v2
(arXiv 2003.04297). The evaluation is a linear classifier on the frozen features before the output, trained on new crops
of the images. Settings are compared on held-out images; the test images are read at the end.
"""

from dataclasses import asdict
from typing import Any

from torch import nn

from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.experiments.contrastive.config import data_fingerprint, data_slug, load_data
from uncollapse.lab.experiments.contrastive.objectives import formula, objective_slug
from uncollapse.lab.experiments.contrastive.training import data_facts, fit_encoder
from uncollapse.lab.experiments.moco.config import MomentumConfig, build_momentum_encoder, cost
from uncollapse.lab.experiments.moco.training import MomentumTraining, OnlineProbe
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import round_metrics, summarize_diagnosis
from uncollapse.metrics.hypersphere import PAPER

NAME = "moco"
LIBRARIES = (*contrast.LIBRARIES, "timm")
Config = MomentumConfig


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train an encoder. Return it in evaluation mode, without its follower, with the record of the run."""
    runtime.report_stage("reading the images")
    data = load_data(config, runtime)
    training = MomentumTraining(build_momentum_encoder(config), config, data, runtime)
    experiment = f"{identity(NAME, config)}-{data.fingerprint()}"
    history = fit_encoder(training, experiment)
    encoder = training.encoder.encoder
    saved_models.save_weights(runtime, encoder, config)
    diagnosis = summarize_diagnosis(training.diagnosis(encoder))
    probe = OnlineProbe(encoder, config, data.splits["train"], runtime, experiment)
    metrics = training.evaluate(encoder) | training.leak() | training.accuracies(probe)
    probe.clear()
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
    return f"{data_slug(config)}-{config.encoder}-{objective_slug(asdict(config))}-seed{config.seed}"[:120]


DATA = recipe_data.read(__package__, Config, row_of=formula)
RECIPE = Recipe(
    name=NAME,
    title="MoCo: a momentum encoder and a queue, with InfoNCE, alignment and uniformity in any weights",
    paper=PAPER,
    config=Config,
    run=record_of(train),
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    presets=DATA.presets,
    quick=DATA.quick,
    fingerprint=data_fingerprint,
    reads_images=True,
)
