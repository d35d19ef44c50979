"""Recipe asymptotics: InfoNCE with M negatives minus log M, compared with its limit.

The features are points spread evenly, or those of random and trained encoders. Theorem 1 of Wang & Isola
(arXiv 2005.10242) bounds the distance by M^−1/2. That is how much a single draw of negatives fluctuates; the bias
itself falls as 1/M. The recipe fits both slopes, see `infonce_limit`.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, identity, reset_idle, set_fields
from uncollapse.lab.engine.checkpoints import Checkpoints
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.experiments.contrastive.config import EncoderConfig
from uncollapse.lab.experiments.contrastive.training import EncoderTraining
from uncollapse.lab.experiments.sphere.infonce_limit import (
    Curves,
    Pair,
    Population,
    Terms,
    collapsed_terms,
    measure_curves,
    uniform_pair,
    uniform_terms,
)
from uncollapse.lab.experiments.training_run import with_threads
from uncollapse.lab.models.image_encoder import SmallAlexNet
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.results import build_record, round_metrics
from uncollapse.lab.tables.selection import freeze
from uncollapse.metrics.hypersphere import PAPER

NAME = "asymptotics"
SPHERE, RANDOM = "sphere", "random"
TRAINED: Mapping[str, Mapping[str, Any]] = {  # weights of the objective
    "contrast": {"contrast": 1.0},
    "align": {"contrast": 0.0, "align": 1.0},
    "uniform": {"contrast": 0.0, "uniform": 1.0},
    "align+uniform": {"contrast": 0.0, "align": 1.0, "uniform": 1.0},
}
ENCODERS = (SPHERE, RANDOM, *TRAINED)
MEASURE = "Measure"  # panel of the help
OF_ENCODER = tuple(field.name for field in fields(EncoderConfig) if field.name not in ("dim", "seed"))
OF_TRAINING = ("epochs", "batch", "partial_batch", "lr", "momentum", "weight_decay", "falls", "precision")
SMALL: Mapping[str, Any] = {"data": "cifar10", **contrast.DATA.presets["small"]}  # as in the sweep `all`


@dataclass(frozen=True)
class Config(EncoderConfig):
    """Configuration of a run. Fields without an effect get their defaults, so that they make no other run."""

    encoder: str = config_field(
        SPHERE,
        "Source of the features: uniform points on the sphere, an untrained small AlexNet, or one trained for an "
        "objective.",
        choices=ENCODERS,
        group=MEASURE,
    )
    temperature: float = config_field(
        0.5, "Of the loss that is measured; encoder contrast is trained with it too.", minimum=0.01, group=MEASURE
    )
    anchors: int = config_field(512, "Views whose loss is measured, each with its partner.", minimum=2, group=MEASURE)
    draws: int = config_field(32, "Sets of `largest` negatives that are drawn per pair.", minimum=2, group=MEASURE)
    largest: int = config_field(
        65_536,
        "Largest number of negatives; powers of two up to it are measured.",
        minimum=4,
        maximum=2**20,
        group=MEASURE,
    )
    fit_from: int = config_field(1024, "Least number of negatives in the fit of slopes.", minimum=1, group=MEASURE)

    def __post_init__(self) -> None:
        super().__post_init__()
        largest, least = 1 << (self.largest.bit_length() - 1), 1 << (self.fit_from - 1).bit_length()
        set_fields(self, largest=largest, fit_from=least)  # powers of two are measured
        if largest < 4 * least:
            raise UsageError(
                f"A slope is fitted through at least three numbers of negatives: largest must be at least {4 * least}, "
                f"four times fit_from, got {largest}."
            )
        reset_idle(self, idle_fields(self.encoder))


def idle_fields(encoder: str) -> tuple[str, ...]:
    """Return the fields without an effect on an encoder."""
    if encoder == SPHERE:
        return OF_ENCODER
    return OF_TRAINING if encoder == RANDOM else ()


@with_threads
def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    """Measure an encoder, after training it if the config says so. Return the record of the run."""
    if config.encoder == SPHERE:
        return _run_on_sphere(config, runtime)
    encoder, facts = _load_encoder(config, runtime)
    began = time.perf_counter()
    runtime.report_stage("encoding two views of each image")
    training_config = trained_config(config)
    data = contrastive.load_data(training_config, runtime)
    x, y = EncoderTraining(encoder, training_config, data, runtime, _no_training).pairs(encoder, data.measured)
    population = Population(x, y, config.temperature)
    pairs = list(population.pairs(population.anchors(config.anchors, config.seed)))
    measured = _measure(config, population.terms(), pairs, runtime)
    _clear_checkpoints(runtime, config)
    seconds = time.perf_counter() - began + facts.get("trained", {"seconds": 0.0})["seconds"]
    return build_record(NAME, config, seconds, contrast.LIBRARIES, data=data.facts, **measured, **facts)


def _run_on_sphere(config: Config, runtime: Runtime) -> dict[str, Any]:
    began = time.perf_counter()
    terms = uniform_terms(config.dim, config.temperature)
    pairs = [uniform_pair(config.dim, config.temperature)] * config.anchors
    measured = _measure(config, terms, pairs, runtime)
    return build_record(NAME, config, time.perf_counter() - began, (), **measured)


def _load_encoder(config: Config, runtime: Runtime) -> tuple[SmallAlexNet, dict[str, Any]]:
    """Return the encoder, untrained or trained, and what the record says of its training."""
    training_config = trained_config(config)
    if config.encoder == RANDOM:
        return contrastive.build_encoder(training_config), {}
    encoder: Any
    encoder, record = contrast.train(training_config, runtime)
    return encoder, {"trained": {name: record[name] for name in ("config", "figures", "seconds", "ended")}}


def _no_training(*_: Tensor) -> Tensor:
    raise AssertionError("Nothing is trained here.")


def trained_config(config: Config) -> contrast.Config:
    """Return the config of the encoder's training."""
    shared: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(EncoderConfig)}
    weights = TRAINED.get(config.encoder, {})
    return contrast.Config(**shared, **weights, temperature=config.temperature)


def _measure(config: Config, terms: Terms, pairs: list[Pair], runtime: Runtime) -> dict[str, Any]:
    """Return what the record has. terms: of all pairs. pairs: those whose bias and fluctuation are measured."""
    runtime.report_stage("drawing negatives")
    curves = measure_curves(pairs, config.largest, config.draws, config.seed)
    slopes = {"bias": curves.bias_slope(config.fit_from), "fluctuation": curves.fluctuation_slope(config.fit_from)}
    positive, variance = (sum(getattr(pair, name) for pair in pairs) / len(pairs) for name in ("positive", "variance"))
    metrics = {f"{name}_slope": slope.value for name, slope in slopes.items() if slope is not None}
    metrics |= {"limit": terms.limit, "alignment_term": terms.alignment, "uniformity_term": terms.uniformity}
    metrics |= {"bias_times_negatives": curves.counts[-1] * float(curves.bias[-1])}
    expected = {"bias": positive - variance / 2, "fluctuation": variance**0.5, "positive": positive}
    return {
        "figures": round_metrics(metrics | {"bias_constant": expected["bias"]}),
        "terms": terms_record(terms),
        "references": references(config.dim, config.temperature),
        "slopes": {name: slope and round_metrics(asdict(slope)) for name, slope in slopes.items()},
        "constants": round_metrics(expected),
        "curve": _curve(curves, terms),
    }


def references(dim: int, temperature: float) -> dict[str, dict[str, float]]:
    """Return the terms of the limit where all points are one, and where pairs are aligned and points spread evenly."""
    return {
        "collapsed": terms_record(collapsed_terms(temperature)),
        "uniform": terms_record(uniform_terms(dim, temperature)),
    }


def terms_record(terms: Terms) -> dict[str, float]:
    """Return the terms as a record has them."""
    return round_metrics({**asdict(terms), "limit": terms.limit})


def _curve(curves: Curves, terms: Terms) -> list[dict[str, float]]:
    """Return one row per number of negatives. value: the mean of loss − log M, which is the limit plus the bias."""
    rows = zip(curves.counts, curves.bias.tolist(), curves.error.tolist(), curves.fluctuation.tolist(), strict=True)
    return [
        {"negatives": count}
        | round_metrics({"value": terms.limit + bias, "bias": bias, "error": error, "fluctuation": deviation})
        for count, bias, error, deviation in rows
    ]


def _clear_checkpoints(runtime: Runtime, config: Config) -> None:
    """Remove the checkpoints of the training, which have its identity and not that of this run."""
    if runtime.checkpoints is not None:
        Checkpoints(runtime.checkpoints, identity(contrast.NAME, trained_config(config)), exact=False).clear()


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of the images at hand; None for points on the sphere, which need none."""
    return None if config.encoder == SPHERE else contrastive.data_fingerprint(trained_config(config), runtime)


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    data = "" if config.encoder == SPHERE else f"{contrastive.data_slug(config)}-"
    return f"{data}{config.encoder}-tau{config.temperature:g}-d{config.dim}-seed{config.seed}"[:120]


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    negatives = config.anchors * config.draws * config.largest
    trained = contrastive.cost(trained_config(config)) if config.encoder in TRAINED else 0.0
    return 5 + trained + negatives * (1e-7 if config.encoder == SPHERE else 2.5e-8)


def row_of(config: Mapping[str, Any]) -> str:
    """Return the encoder, with the fields in which it differs from the sweep `all`."""
    encoder = config["encoder"]
    usual = asdict(Config(encoder=encoder, **SMALL))
    others = {name: freeze(config[name]) for name in OF_ENCODER if freeze(config[name]) != usual[name]}
    return ", ".join([encoder, *(f"{name} {value}" for name, value in others.items())])


DATA = recipe_data.read(__package__, Config, row_of=row_of, prefix="asymptotics_")
RECIPE = Recipe(
    name=NAME,
    title="InfoNCE with an increasing number of negatives and its limit, with the rates of bias and fluctuation",
    paper=PAPER,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    quick=DATA.quick,
    fingerprint=data_fingerprint,
    reads_images=True,
    single_process=True,  # most of its time is not training
)
