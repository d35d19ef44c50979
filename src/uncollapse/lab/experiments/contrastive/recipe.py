"""A small encoder trained with InfoNCE, alignment and uniformity in any weights, and judged on frozen features.

The defaults are those of Wang & Isola (arXiv 2005.10242) for STL-10. Settings are compared on pictures that were held
back from training; the test pictures are read once, at the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive.config import ContrastConfig, data_fingerprint
from uncollapse.lab.experiments.contrastive.config import cost as cost
from uncollapse.lab.experiments.contrastive.objectives import formula, objective, objective_slug
from uncollapse.lab.experiments.contrastive.training import (
    EncoderTraining,
    data_facts,
    fit_encoder,
    hypersphere_metrics,
    infonce_metrics,
)
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record, round_metrics, summarize_diagnosis
from uncollapse.lab.search.variables import Search
from uncollapse.lab.tables.paper_table import PaperTable, Published
from uncollapse.metrics.hypersphere import PAPER as PAPER
from uncollapse.tuning.space import Between

NAME = "contrast"
TITLE = "A contrastive encoder of images: InfoNCE, alignment and uniformity in any weights"
LIBRARIES = ("torchvision", "pillow", "accelerate", "scikit-learn")


@dataclass(frozen=True)
class Config(ContrastConfig):
    """A run."""


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train an encoder, and give the record of the run."""
    return train(config, runtime)[1]


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained encoder in evaluation mode, and the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        runtime.report_stage("reading the pictures")
        data = contrastive.load_data(config, runtime, labelled=False)
        encoder = contrastive.build_encoder(config)

        def loss(x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
            return objective(config, x, y, gather=True)

        training = EncoderTraining(encoder, config, data, runtime, loss)
        history = fit_encoder(training, f"{identity(NAME, config)}-{data.fingerprint()}")
        found = _judged(training)
        saved_models.save_weights(runtime, encoder, config)
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


def _judged(training: EncoderTraining) -> dict[str, Any]:
    """The figures of a trained encoder, and its diagnosis."""
    pair = training.pairs(training.encoder, "validation")
    figures = hypersphere_metrics(*pair) | infonce_metrics(*pair) | training.probes(training.encoder)
    return {
        "figures": round_metrics(figures),
        "diagnosis": {"after": summarize_diagnosis(training.diagnosis(training.encoder))},
    }


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    data = config.data.strip("./").replace("/", "_") or "images"
    what = f"{objective_slug(asdict(config))}-b{config.batch}" if config.epochs else "untrained"
    return f"{data}-{what}-d{config.dim}-seed{config.seed}"[:120]


def plots(records: Sequence[Mapping[str, Any]]) -> Iterable[Any]:
    """For the page of a table."""
    from uncollapse.lab.experiments.contrastive.encoder_plots import scatter_plots

    return scatter_plots(records)


SMALL: dict[str, Any] = {  # what twenty epochs of ten thousand small pictures allow
    "examples": 10_000,
    "width": 0.25,
    "side": 32,
    "epochs": 20,
    "batch": 256,
    "judged": "whole",
    "precision": "bf16",
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "small": SMALL,
    "paper-stl10": {"data": "stl10", "unlabelled": True, "contrast": 0.0, "align": 0.98, "uniform": 0.96},
}
QUICK: Mapping[str, Any] = {
    "data": "digits",
    "width": 0.1,
    "dim": 32,
    "side": 16,
    "epochs": 15,
    "batch": 128,
    "flip": 0.0,
    "judged": "whole",
}

CHOSEN = "validation_output_linear"


def _row(config: Mapping[str, Any]) -> str:
    """The objective, and the batch and size of the output where they are not the usual ones."""
    batch = SMALL["batch"] if config["width"] == SMALL["width"] else 768
    odd = {"batch": config["batch"] != batch and config["epochs"], "dim": config["dim"] != 128}
    what = formula(config) if config["epochs"] else "untrained"
    return ", ".join([what, *(f"{name} {config[name]}" for name, is_odd in odd.items() if is_odd)])


AXES: dict[str, Any] = {
    "groups": "data",
    "rows": "contrast+temperature+negatives+align+alpha+uniform+t+batch+dim",
    "columns": "epochs",
    "row_of": _row,
    "row_name": "objective",
    "by": CHOSEN,
}
PAPER_ROWS = {  # on the test pictures: output linear, output 5-NN, fc7 linear, fc7 5-NN
    "C(τ=0.19)": (80.46, 78.75, 83.89, 76.33),
    "0.98·A(α=2) + 0.96·U(t=2)": (81.15, 78.89, 84.43, 76.78),
    "C(τ=0.5) + U(t=2)": (81.06, 79.05, 84.14, 76.48),
}
JUDGES = {
    "output": ("test_output_linear", "linear on the output"),
    "output-knn": ("test_output_knn", "five neighbours on the output"),
    "fc7": ("test_fc7_linear", "linear on fc7"),
    "fc7-knn": ("test_fc7_knn", "five neighbours on fc7"),
}


def _board(number: int, figure: str, title: str) -> PaperTable:
    """One judge of the features, beside the paper's STL-10 numbers."""
    published = tuple(
        Published({"data": "stl10", AXES["rows"]: row, "epochs": 200}, values[number])
        for row, values in PAPER_ROWS.items()
    )
    return PaperTable(f"Test accuracy, {title}", where={}, metric=figure, published=published, **AXES)


SEARCH = Search(  # accuracies are only there at the end: alignment and uniformity by epoch do not say which is better
    space=(Between("temperature", 0.05, 1.0), Between("align", 0.05, 2.0), Between("uniform", 0.05, 2.0)),
    baseline={"contrast": 1.0, "temperature": 0.5, "align": 0.0, "uniform": 0.0},
    by="validation_output_linear",
    by_epoch=None,
)
TABLES: Mapping[str, PaperTable] = {
    name: _board(number, figure, title) for number, (name, (figure, title)) in enumerate(JUDGES.items())
}
SHARED = SMALL | {"data": "cifar10"}


def _grid(choose: tuple[str, ...] = (), **values: Any) -> Grid:
    """One encoder, or several where a value is a tuple; some of the values may be chosen on validation."""
    given = SHARED | values
    several = {name: value if isinstance(value, tuple) else (value,) for name, value in given.items()}
    return Grid(several, choose, CHOSEN)


BOTH: dict[str, Any] = {"contrast": 0.0, "align": 1.0, "uniform": 1.0}
SEEDS = (0, 1, 2)
PARTS: dict[str, tuple[Grid, ...]] = {
    "cifar10-seeds": (  # InfoNCE alone against alignment and uniformity alone: the best of each, with three seeds
        _grid(("temperature",), temperature=(0.07, 0.19, 0.5, 1.0), seed=SEEDS),
        _grid(("align",), **BOTH | {"align": (0.5, 1.0, 2.0)}, seed=SEEDS),
    ),
    "cifar10-collapse": (
        _grid(contrast=0.0, align=1.0),
        _grid(contrast=0.0, uniform=1.0),
        _grid(epochs=0),
    ),
    "cifar10-weights": (
        _grid(contrast=0.0, align=(0.25, 4.0, 8.0), uniform=1.0),
        _grid(contrast=0.0, align=3.0, uniform=1.0, t=3.0),
        _grid(contrast=0.5, temperature=0.1),
        _grid(uniform=1.0),
        _grid(align=1.0),
    ),
    "cifar10-sizes": (
        _grid(batch=(64, 1024)),
        _grid(dim=(8, 512)),
        _grid(**BOTH, batch=(64, 1024)),
        _grid(**BOTH, dim=(8, 512)),
    ),
}
GRIDS: Mapping[str, tuple[Grid, ...]] = {**PARTS, "cifar10": tuple(grid for grids in PARTS.values() for grid in grids)}

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
    search=SEARCH,
    fingerprint=data_fingerprint,
    plots=plots,
    reads_images=True,
)
