"""InfoNCE with M negatives minus log M, beside its limit, on points spread evenly and on random and trained encoders.

Theorem 1 of Wang & Isola (arXiv 2005.10242) bounds the distance by M^−1/2. That is how much a single draw of negatives
fluctuates; the bias itself falls as 1/M. Both slopes are fitted here, see `contrastive_limit`.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, identity
from uncollapse.lab.engine.checkpoints import Checkpoints
from uncollapse.lab.engine.runtime import Runtime, use_threads
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
from uncollapse.lab.models.image_encoder import SmallAlexNet
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record, round_metrics
from uncollapse.lab.tables.paper_table import PaperTable
from uncollapse.lab.tables.selection import freeze
from uncollapse.metrics.hypersphere import PAPER as PAPER

NAME = "asymptotics"
TITLE = "InfoNCE with more and more negatives against its limit, with the rates of bias and fluctuation"
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
OF_TRAINING = ("epochs", "batch", "lr", "momentum", "weight_decay", "falls", "precision")
PART = "validation"


@dataclass(frozen=True)
class Config(EncoderConfig):
    """A run. Settings that do nothing for an encoder get their defaults: they make no other run."""

    encoder: str = config_field(
        SPHERE,
        "Whose features: points evenly on the sphere, a small AlexNet at its start, or one trained for an objective.",
        choices=ENCODERS,
        group=MEASURE,
    )
    temperature: float = config_field(
        0.5, "Of the loss that is measured; encoder contrast is trained with it too.", minimum=0.01, group=MEASURE
    )
    anchors: int = config_field(512, "Views whose loss is measured, each with its partner.", minimum=2, group=MEASURE)
    draws: int = config_field(32, "Sets of `largest` negatives that are drawn for each pair.", minimum=2, group=MEASURE)
    largest: int = config_field(
        65_536, "Most negatives; powers of two up to it are measured.", minimum=4, maximum=2**20, group=MEASURE
    )
    fit_from: int = config_field(1024, "Negatives from which on slopes are fitted.", minimum=1, group=MEASURE)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "largest", 1 << (self.largest.bit_length() - 1))  # only powers of two are measured
        object.__setattr__(self, "fit_from", 1 << (self.fit_from - 1).bit_length())
        if self.largest < 4 * self.fit_from:
            raise UsageError(
                f"A slope is fitted through three numbers of negatives or more: largest must be at least "
                f"{4 * self.fit_from}, four times fit_from, got {self.largest}."
            )
        for field in fields(self):
            if field.name in unused_fields(self.encoder):
                object.__setattr__(self, field.name, field.default)


def unused_fields(encoder: str) -> tuple[str, ...]:
    """Settings that do nothing for an encoder."""
    if encoder == SPHERE:
        return OF_ENCODER
    return OF_TRAINING if encoder == RANDOM else ()


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Measure an encoder, trained before where it is to be, and give the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        if config.encoder == SPHERE:
            return _run_on_sphere(config, runtime)
        encoder, facts = _encoder(config, runtime)
        began = time.perf_counter()
        runtime.report_stage("looking at two views of each picture")
        settings = trained_config(config)
        data = contrastive.load_data(settings, runtime)
        x, y = EncoderTraining(encoder, settings, data, runtime, _no_training).pairs(encoder, PART)
        population = Population(x, y, config.temperature)
        pairs = list(population.pairs(population.anchors(config.anchors, config.seed)))
        found = _measure(config, population.terms(), pairs, runtime)
        _clear(runtime, config)
        seconds = time.perf_counter() - began + facts.get("trained", {"seconds": 0.0})["seconds"]
        return build_record(NAME, config, seconds, contrast.LIBRARIES, data=data.facts, **found, **facts)


def _run_on_sphere(config: Config, runtime: Runtime) -> dict[str, Any]:
    began = time.perf_counter()
    terms = uniform_terms(config.dim, config.temperature)
    pairs = [uniform_pair(config.dim, config.temperature)] * config.anchors
    found = _measure(config, terms, pairs, runtime)
    return build_record(NAME, config, time.perf_counter() - began, (), **found)


def _encoder(config: Config, runtime: Runtime) -> tuple[SmallAlexNet, dict[str, Any]]:
    """The encoder at its start or trained, and what the record says of its training."""
    settings = trained_config(config)
    if config.encoder == RANDOM:
        return contrastive.build_encoder(settings), {}
    encoder: Any
    encoder, done = contrast.train(settings, runtime)
    return encoder, {"trained": {name: done[name] for name in ("config", "figures", "seconds", "ended")}}


def _no_training(*_: Tensor) -> Tensor:
    raise AssertionError("Nothing is trained here.")


def trained_config(config: Config) -> contrast.Config:
    """The settings of the training."""
    shared: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(EncoderConfig)}
    weights = TRAINED.get(config.encoder, {})
    return contrast.Config(**shared, **weights, temperature=config.temperature)


def _measure(config: Config, terms: Terms, pairs: list[Pair], runtime: Runtime) -> dict[str, Any]:
    """What the record has. terms: of all pairs. pairs: those whose bias and fluctuation are measured."""
    runtime.report_stage("drawing negatives")
    curves = measure_curves(pairs, config.largest, config.draws, config.seed)
    slopes = {"bias": curves.bias_slope(config.fit_from), "fluctuation": curves.fluctuation_slope(config.fit_from)}
    positive, variance = (sum(getattr(pair, name) for pair in pairs) / len(pairs) for name in ("positive", "variance"))
    figures = {f"{name}_slope": found.value for name, found in slopes.items() if found is not None}
    figures |= {"limit": terms.limit, "alignment_term": terms.alignment, "uniformity_term": terms.uniformity}
    figures |= {"bias_times_negatives": curves.counts[-1] * float(curves.bias[-1])}
    expected = {"bias": positive - variance / 2, "fluctuation": variance**0.5, "positive": positive}
    return {
        "figures": round_metrics(figures | {"bias_constant": expected["bias"]}),
        "terms": terms_record(terms),
        "references": references(config.dim, config.temperature),
        "slopes": {name: found and round_metrics(asdict(found)) for name, found in slopes.items()},
        "constants": round_metrics(expected),
        "curve": _curve(curves, terms),
    }


def references(dim: int, temperature: float) -> dict[str, dict[str, float]]:
    """The terms of the limit where all points are one, and where pairs are aligned and points spread evenly."""
    return {
        "collapsed": terms_record(collapsed_terms(temperature)),
        "uniform": terms_record(uniform_terms(dim, temperature)),
    }


def terms_record(terms: Terms) -> dict[str, float]:
    """The terms for a record."""
    return round_metrics({**asdict(terms), "limit": terms.limit})


def _curve(curves: Curves, terms: Terms) -> list[dict[str, float]]:
    """A row for each number of negatives. value: of the mean loss minus log M, which is the limit plus the bias."""
    rows = zip(curves.counts, curves.bias.tolist(), curves.error.tolist(), curves.fluctuation.tolist(), strict=True)
    return [
        {"negatives": count}
        | round_metrics({"value": terms.limit + bias, "bias": bias, "error": error, "fluctuation": deviation})
        for count, bias, error, deviation in rows
    ]


def _clear(runtime: Runtime, config: Config) -> None:
    """Remove the checkpoints of the training: they have its identity, not that of this run."""
    if runtime.checkpoints is not None:
        Checkpoints(runtime.checkpoints, identity(contrast.NAME, trained_config(config)), exact=False).clear()


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of the images at hand; points on the sphere need none."""
    return None if config.encoder == SPHERE else contrastive.data_fingerprint(trained_config(config), runtime)


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    data = "" if config.encoder == SPHERE else f"{config.data.strip('./').replace('/', '_') or 'images'}-"
    return f"{data}{config.encoder}-tau{config.temperature:g}-d{config.dim}-seed{config.seed}"[:120]


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core."""
    negatives = config.anchors * config.draws * config.largest
    trained = contrast.cost(trained_config(config)) if config.encoder in TRAINED else 0.0
    return 5 + trained + negatives * (1e-7 if config.encoder == SPHERE else 2.5e-8)


def row_of(config: Mapping[str, Any]) -> str:
    """The encoder in words, with the settings in which it differs from those of the named grid."""
    encoder = config["encoder"]
    usual = asdict(Config(encoder=encoder, **SMALL))
    others = {name: freeze(config[name]) for name in OF_ENCODER if freeze(config[name]) != usual[name]}
    return ", ".join([encoder, *(f"{name} {value}" for name, value in others.items())])


def _board(title: str, figure: str) -> PaperTable:
    rows = "+".join(["encoder", *OF_ENCODER])
    return PaperTable(
        title,
        where={},
        groups="dim",
        rows=rows,
        columns="temperature",
        metric=figure,
        percent=False,
        row_of=row_of,
    )


SMALL: dict[str, Any] = {"data": "cifar10", **contrast.SMALL}
TABLES: Mapping[str, PaperTable] = {
    "bias": _board("How the bias of InfoNCE − log M falls with M: slope of logarithms", "bias_slope"),
    "fluctuation": _board("How the deviation of a single draw falls with M: slope of logarithms", "fluctuation_slope"),
    "constant": _board("M · bias, for ever more negatives", "bias_constant"),
    "limit": _board("The limit of InfoNCE − log M", "limit"),
    "alignment": _board("Its first term: −E x·y/τ", "alignment_term"),
    "uniformity": _board("Its second term: E log E exp(x·x⁻/τ)", "uniformity_term"),
}


def _grid(encoders: tuple[str, ...], temperatures: tuple[float, ...], **settings: Any) -> Grid:
    values = {name: (value,) for name, value in settings.items()}
    return Grid({"encoder": encoders, "temperature": temperatures, **values})


GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "all": (
        _grid((SPHERE,), (0.07, 0.2, 0.5)),
        _grid((RANDOM, "contrast"), (0.07, 0.2, 0.5), **SMALL),
        _grid(("align", "uniform", "align+uniform"), (0.5,), **SMALL),
    ),
}
QUICK: Mapping[str, Any] = {
    **contrast.QUICK,
    "encoder": "contrast",
    "epochs": 5,
    "anchors": 64,
    "draws": 8,
    "largest": 16_384,
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
    fingerprint=data_fingerprint,
    reads_images=True,
    single_process=True,  # most of its time is not training
)
