"""Encoders of sentences whose positive pairs are neighbours in a text, judged by logistic regressions on small tasks.

Wang & Isola (arXiv 2005.10242) train on BookCorpus, with quick-thoughts (arXiv 1803.02893) as a frame, and judge on MR
and CR. Settings are compared on documents that were held back; the tasks are read once, at the end. Their classifiers
learn from the pooled features in front of the output, standardised, and once more from the rows on the sphere.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from uncollapse.diagnosis.run import diagnose_activations
from uncollapse.io import files
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.text.vocabulary import known_word_share
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.engine.task import History, TrainingOptions
from uncollapse.lab.experiments.contrastive.objectives import formula, objective_slug
from uncollapse.lab.experiments.sentences import config as sentence_pairs
from uncollapse.lab.experiments.sentences import probes
from uncollapse.lab.experiments.sentences.config import Config as PairsConfig
from uncollapse.lab.experiments.sentences.config import Data
from uncollapse.lab.experiments.sentences.training import PairTraining
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record, fingerprint, round_metrics, summarize_diagnosis
from uncollapse.lab.tables.paper_table import PaperTable, Published
from uncollapse.metrics.hypersphere import PAPER as PAPER

NAME = "sentences"
TITLE = "Encoders of sentences whose positive pairs are neighbours: InfoNCE, alignment and uniformity in any weights"
LIBRARIES = ("accelerate", "scikit-learn")
SHOWN = 512  # held-back sentences that are diagnosed


@dataclass(frozen=True)
class Config(PairsConfig):
    """A run."""


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train an encoder, and give the record of the run."""
    return train(config, runtime)[1]


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained encoders in evaluation mode, and the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        runtime.report_stage("reading the sentences")
        data = sentence_pairs.load_data(config, runtime)
        encoders = sentence_pairs.build_encoders(config, len(data.vocabulary))
        training = PairTraining(encoders, config, data)
        weights = fingerprint(parameter.detach() for parameter in encoders.parameters())
        before = _diagnosis(training)
        history = _trained(training, runtime, weights)
        found = _judged(training, runtime)
        saved_models.save_weights(runtime, encoders, config)
        if runtime.save_to is not None:
            files.write(runtime.save_to / "vocabulary.txt", "\n".join(data.vocabulary.words) + "\n")
        return encoders, build_record(
            NAME,
            config,
            history.seconds,
            LIBRARIES,
            data=_facts(config, data) | {"weights": weights},
            figures=round_metrics(found),
            ended=history.ended,
            pace=round_metrics(history.pace),
            epochs=[round_metrics(each) for each in history.epochs],
            diagnosis={"before": before, "after": _diagnosis(training)},
        )


def _trained(training: PairTraining, runtime: Runtime, weights: str) -> History:
    """Train. weights: the fingerprint of the start, so that a checkpoint from another start is refused."""
    config = training.config
    if not config.epochs:
        return History([], 0, "untrained", 0.0)
    precision: Any = config.precision
    settings = TrainingOptions(config.epochs, config.seed, clip=config.clip or None, precision=precision)
    experiment = f"{identity(NAME, config)}-{training.data.fingerprint()}-{weights}"
    return fit(training.task(), settings, runtime, experiment, vars(config))


def _judged(training: PairTraining, runtime: Runtime) -> dict[str, float]:
    """The figures of the held-back documents and of the tasks."""
    training.encoders.eval()
    found = training.evaluate(training.encoders)
    for name, (rows, tests) in training.data.tasks.items():
        runtime.report_stage(f"judging on {name}")
        assert rows.labels is not None
        features, outputs = training.of_task(name)
        judged = {name: probes.standardise(features), f"{name}_output": probes.scale_to_sphere(outputs)}
        for figure, x in judged.items():
            found[figure] = probes.probe_accuracy(x, rows.labels, tests, threads=runtime.threads)
    return found


def _diagnosis(training: PairTraining) -> dict[str, Any]:
    """Layer by layer, how sentences of the held-back documents differ from each other."""
    rows = training.data.parts["validation"].rows
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:SHOWN]
    return summarize_diagnosis(diagnose_activations(training.layers(rows, drawn)))


def _facts(config: Config, data: Data) -> dict[str, Any]:
    parts = {name: {"documents": len(part.sizes), "sentences": len(part.rows)} for name, part in data.parts.items()}
    tasks = {}
    for name, (rows, tests) in data.tasks.items():
        assert rows.labels is not None
        shares = round_metrics(
            {"known": known_word_share(rows), "always": probes.majority_accuracy(rows.labels, tests)}
        )
        tasks[name] = {"sentences": len(rows), **shares}
    words_known = len(data.vocabulary)
    return {"name": config.data, "fingerprint": data.fingerprint(), "words": words_known, **parts, "tasks": tasks}


def data_fingerprint(config: Config, runtime: Runtime) -> str:
    """Return the fingerprint of the texts at hand."""
    return sentence_pairs.load_data(config, runtime).fingerprint()


def variant(config: Mapping[str, Any]) -> str:
    """What an encoder was trained for: the rows of the tables."""
    return formula(config) if config["epochs"] else "untrained"


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    data = config.data.strip("./").replace("/", "_") or "text"
    what = objective_slug(asdict(config)) if config.epochs else "untrained"
    return f"{data}-{config.encoder}-{what}-seed{config.seed}"[:120]


SENTENCES = {"brown": 57_340, "wikitext2": 17_398, "pydoc": 2_600}


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core; of 100,000 sentences, where it is not said how many there are."""
    read = config.epochs * SENTENCES.get(config.data, 100_000) * min(config.max_words, 20)
    block = 3 * config.width * (config.embedding + config.width) if config.encoder == "gru" else 10 * config.width**2
    speed = 8e9 if config.precision == "bf16" else 7e9  # weights times words in a second
    return 20 + 10 * len(config.tasks) + read * block * config.depth * (1 + config.two_encoders) / speed


SMALL: dict[str, Any] = {"epochs": 3, "dropout": 0.2, "precision": "bf16"}  # a few minutes on one core
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": SMALL,
    "quick-thoughts": {  # arXiv 1803.02893 and its code, but for the rows of length one
        "data": "bookcorpus",
        "vocabulary": 50_001,
        "embedding": 620,
        "width": 2400,
        "bidirectional": True,
        "pooling": "last",
        "dim": 0,
        "two_encoders": True,
        "epochs": 1,
        "batch": 400,
        "lr": 5e-4,
        "clip": 5.0,
        "temperature": 0.075,
    },
}
QUICK: Mapping[str, Any] = {
    "data": "pydoc",
    "tasks": ("topics",),
    "vocabulary": 3000,
    "embedding": 64,
    "width": 64,
    "dim": 32,
    "dropout": 0.3,
    "holdout": 0.1,
    "epochs": 8,
    "batch": 64,
    "temperature": 0.2,
    "lr": 3e-3,
}

OBJECTIVE = "contrast+temperature+negatives+align+alpha+uniform+t"
AXES: dict[str, Any] = {
    "groups": "data",
    "rows": OBJECTIVE,
    "columns": "encoder",
    "row_of": variant,
    "row_name": "objective",
    "choose": ("lr",),
}
SOURCE = "Wang & Isola, on BookCorpus"
PAPER_ROWS = {
    "mr": {"C(τ=0.075)": 77.51, "0.9·A(α=2) + 0.1·U(t=5)": 73.76},
    "cr": {"C(τ=0.05)": 83.86, "0.9·A(α=2) + 0.1·U(t=5)": 80.95},
}
TITLES = {"mr": "MR, movie reviews", "cr": "CR, customer reviews", "subj": "SUBJ", "mpqa": "MPQA", "trec": "TREC"}


def _board(task: str, suffix: str = "") -> PaperTable:
    """One task, beside the paper's numbers: those are of BookCorpus, and a group of their own."""
    published = tuple(
        Published({"data": "bookcorpus", OBJECTIVE: row, "encoder": "gru"}, value, None, SOURCE)
        for row, value in ({} if suffix else PAPER_ROWS.get(task, {})).items()
    )
    title = f"Accuracy on {TITLES[task]}, by ten folds" if task != "trec" else "Accuracy on TREC's test questions"
    where = "" if not suffix else ", from rows on the sphere"
    return PaperTable(f"{title}{where}", where={}, metric=task + suffix, published=published, all_groups=True, **AXES)


TABLES: Mapping[str, PaperTable] = {
    **{task: _board(task) for task in TITLES},
    **{f"{task}-output": _board(task, "_output") for task in ("mr", "cr")},
    "neighbours": PaperTable(
        "How often the neighbour is the nearest of 256 held-back sentences",
        where={},
        metric="validation",
        **AXES | {"choose": ()},
    ),
}


def _grid(**values: Any) -> Grid:
    """One encoder, or several where a value is a tuple."""
    given = SMALL | values
    return Grid({name: value if isinstance(value, tuple) else (value,) for name, value in given.items()})


BOTH: dict[str, Any] = {"contrast": 0.0, "align": 0.9, "uniform": 0.1, "t": 5.0}
PARTS: dict[str, tuple[Grid, ...]] = {
    "brown-main": (  # the paper's two, what they are to be beaten by, and the two collapses
        _grid(temperature=0.075),
        _grid(**BOTH),
        Grid({"epochs": (0,)}),
        _grid(contrast=0.0, align=1.0),
        _grid(contrast=0.0, uniform=1.0),
    ),
    "brown-more": (
        _grid(temperature=(0.05, 0.5)),
        _grid(contrast=0.0, align=1.0, uniform=1.0),
        _grid(temperature=0.075, uniform=1.0),
    ),
    "brown-seeds": (_grid(temperature=0.075, seed=(1, 2)), _grid(**BOTH, seed=(1, 2))),
    "brown-transformer": (_grid(temperature=0.075, encoder="transformer", depth=2, lr=1e-3),),
}
GRIDS: Mapping[str, tuple[Grid, ...]] = {**PARTS, "brown": PARTS["brown-main"] + PARTS["brown-more"]}

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
)
