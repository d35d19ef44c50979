"""Recipe sentences: encoders whose positive pairs are neighboring sentences, evaluated on small tasks.

Wang & Isola (arXiv 2005.10242) train on BookCorpus like quick-thoughts (arXiv 1803.02893) and evaluate on MR and CR.
Settings are compared on held-out documents; the tasks are read once, at the end. Logistic regressions learn the tasks
from the standardized pooled features before the output, and once more from the rows on the sphere.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from uncollapse.diagnosis.activations import diagnose_activations
from uncollapse.io import files
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.text.running_text import known_word_share
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.task import History, TrainingOptions
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.contrastive.objectives import formula, objective_slug
from uncollapse.lab.experiments.sentences import training as probes
from uncollapse.lab.experiments.sentences.config import Config, Data, build_encoders, load_data
from uncollapse.lab.experiments.sentences.training import PairTraining
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import fingerprint, round_metrics, summarize_diagnosis
from uncollapse.metrics.hypersphere import PAPER

NAME = "sentences"
LIBRARIES = ("accelerate", "scikit-learn")
SHOWN = 512  # held-out sentences that are diagnosed
SENTENCES = {"brown": 57_340, "wikitext2": 17_398, "pydoc": 2_600}


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train encoders. Return them in evaluation mode, with the record of the run."""
    runtime.report_stage("reading the sentences")
    data = load_data(config, runtime)
    encoders = build_encoders(config, len(data.vocabulary))
    training = PairTraining(encoders, config, data)
    weights = fingerprint(parameter.detach() for parameter in encoders.parameters())
    before = _diagnose(training)
    history = _fit(training, runtime, weights)
    metrics = _evaluate(training, runtime)
    saved_models.save_weights(runtime, encoders, config)
    if runtime.save_to is not None:
        files.write(runtime.save_to / "vocabulary.txt", "\n".join(data.vocabulary.words) + "\n")
    return encoders, training_record(
        NAME,
        config,
        history,
        LIBRARIES,
        data=_data_facts(config, data) | {"weights": weights},
        figures=round_metrics(metrics),
        pace=round_metrics(history.pace),
        diagnosis={"before": before, "after": _diagnose(training)},
    )


def _fit(training: PairTraining, runtime: Runtime, weights: str) -> History:
    """Train. weights: the fingerprint of the initial weights, so that checkpoints of other ones are refused."""
    config = training.config
    if not config.epochs:
        return History([], 0, "untrained", 0.0)
    precision: Any = config.precision
    options = TrainingOptions(config.epochs, config.seed, clip=config.clip or None, precision=precision)
    experiment = f"{identity(NAME, config)}-{training.data.fingerprint()}-{weights}"
    return fit(training.task(), options, runtime, experiment, vars(config))


def _evaluate(training: PairTraining, runtime: Runtime) -> dict[str, float]:
    """Return the metrics of the held-out documents and of the tasks."""
    training.encoders.eval()
    metrics = training.evaluate(training.encoders)
    for name, (rows, tests) in training.data.tasks.items():
        runtime.report_stage(f"evaluating on {name}")
        assert rows.labels is not None
        features, outputs = training.task_features(name)
        inputs = {name: probes.standardise(features), f"{name}_output": probes.scale_to_sphere(outputs)}
        for metric, x in inputs.items():
            metrics[metric] = probes.probe_accuracy(x, rows.labels, tests, threads=runtime.threads)
    return metrics


def _diagnose(training: PairTraining) -> dict[str, Any]:
    """Diagnose the encoders layer by layer on held-out sentences."""
    rows = training.data.splits["validation"].rows
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:SHOWN]
    return summarize_diagnosis(diagnose_activations(training.layers(rows, drawn)))


def _data_facts(config: Config, data: Data) -> dict[str, Any]:
    """Return what a record says of the documents and tasks."""
    splits = {name: {"documents": len(each.sizes), "sentences": len(each.rows)} for name, each in data.splits.items()}
    tasks = {}
    for name, (rows, tests) in data.tasks.items():
        assert rows.labels is not None
        shares = {"known": known_word_share(rows), "always": probes.majority_accuracy(rows.labels, tests)}
        tasks[name] = {"sentences": len(rows), **round_metrics(shares)}
    words = len(data.vocabulary)
    return {"name": config.data, "fingerprint": data.fingerprint(), "words": words, **splits, "tasks": tasks}


def data_fingerprint(config: Config, runtime: Runtime) -> str:
    """Return the fingerprint of the texts at hand."""
    return load_data(config, runtime).fingerprint()


def row_of(config: Mapping[str, Any]) -> str:
    """Return the objective of a run, which is its row in the tables."""
    return formula(config) if config["epochs"] else "untrained"


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    data = config.data.strip("./").replace("/", "_") or "text"
    what = objective_slug(asdict(config)) if config.epochs else "untrained"
    return f"{data}-{config.encoder}-{what}-seed{config.seed}"[:120]


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core, for 100,000 sentences where their number is not known."""
    read = config.epochs * SENTENCES.get(config.data, 100_000) * min(config.max_words, 20)
    block = 3 * config.width * (config.embedding + config.width) if config.encoder == "gru" else 10 * config.width**2
    speed = 8e9 if config.precision == "bf16" else 7e9  # weights times words per second
    return 20 + 10 * len(config.tasks) + read * block * config.depth * (1 + config.two_encoders) / speed


DATA = recipe_data.read(__package__, Config, row_of=row_of)
RECIPE = Recipe(
    name=NAME,
    title="Encoders of sentences whose positive pairs are neighbors: InfoNCE, alignment and uniformity in any weights",
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
)
