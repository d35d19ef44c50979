"""Fine-tune an encoder on a GLUE task with ContraNorm, the uniformity loss, or no cure: ContraNorm's Table 1.

The defaults are the protocol of the published code (arXiv 2303.06562), except that padding is masked and a tenth of
the training examples is held out. Settings are chosen on what is held out; the labels of the development set are read
once, at the end.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from uncollapse.io.hf_models import Origin, load_classifier
from uncollapse.lab.data.text.glue import GlueTask
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.glue import config as glue_config
from uncollapse.lab.experiments.glue.config import Config as Config
from uncollapse.lab.experiments.glue.training import Training, fit_and_record
from uncollapse.lab.experiments.training_run import record_of, with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.registry import CURES

NAME = "glue"


def build(config: Config, origin: Origin, task: GlueTask) -> nn.Module:
    """Return the model before training, with the outputs that its task needs."""
    with use_seed(config.seed):
        model = load_classifier(origin, task.outputs, random_weights=config.model == glue_config.REMARKS)
    glue_config.put_cure(model, config)
    return model


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Fine-tune an encoder; return it in evaluation mode, and the record of the run."""
    model, data = glue_config.prepare(config, runtime, build)
    _, record = fit_and_record(NAME, Training(model, config, data), runtime)
    saved_models.save_text_model(runtime, model, data.tokenizer, config, data.task.labels)
    return model, record


run = record_of(train)


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    parts = (short_place(config.task), short_place(config.model), variant(asdict(config)).replace(" ", "-"))
    return f"{'-'.join(parts)}-seed{config.seed}"


def short_place(place: str) -> str:
    """Return the end of a name on the hub or of a folder's path, round_metrics enough for a file name."""
    where = str(Path(place).resolve()) if os.path.isdir(place) else place.removeprefix("package:")
    parts = where.strip("/").split("/")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts[-2:]))[-60:]


PLACES = {"attention.residual": "", "attention.output": "before residual", "3": "before residual"}


def variant(config: Mapping[str, Any]) -> str:
    """Return the row of the paper's table that a run belongs to."""
    if config["cure"] != "contra_norm":
        return str(config["cure"])
    at = f"place {config['at']}" if config["at"].isdecimal() else config["at"]  # BERT's and ALBERT's numbers differ
    words = ["contra_norm", "v2" if config["axis"] == "features" else "", PLACES.get(config["at"], at)]
    words += ["both terms" if config["dual"] else "", "l2" if config["norm"] == "l2" else ""]
    return " ".join(word for word in words if word)


EXAMPLES = {"cola": 8551, "sst2": 67349, "mrpc": 3668, "qqp": 363846, "stsb": 5749, "mnli": 392702, "qnli": 104743}
EXAMPLES |= {"rte": 2490, "wnli": 635}
LENGTHS = {"cola": 11, "sst2": 14, "mrpc": 53, "qqp": 30, "stsb": 31, "mnli": 39, "qnli": 50, "rte": 68, "wnli": 37}


def cost(config: Config, depth: int | None = None) -> float:
    """Return an estimate of a run's seconds on one core; a guess for own data and for models that are not here.

    depth: the number of blocks, if it differs from the model's.
    """
    examples = (1 - config.holdout) * (config.examples or EXAMPLES.get(config.task, 5000))
    tokens = config.epochs * examples * min(LENGTHS.get(config.task, 30), config.max_length)
    speed = 115e9 if config.precision == "bf16" else 70e9  # operations per second
    return 20 + 6 * tokens * count_weights(config.model, depth) / speed


def count_weights(place: str, depth: int | None = None) -> float:
    """Return roughly the number of weights in an encoder's blocks; that of BERT-base if the model is not here."""
    try:
        sizes = json.loads((Path(Origin(place).place) / "config.json").read_text(encoding="utf-8"))
        return 12.0 * float(sizes["hidden_size"]) ** 2 * float(depth or sizes["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return 12.0 * 768**2 * (depth or 12)


DATA = recipe_data.read(__package__, Config, row_of=variant)
RECIPE = Recipe(
    name=NAME,
    title="An encoder of transformers on a task of GLUE, with ContraNorm, the uniformity loss, or nothing",
    paper=CURES["contra_norm"].paper,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    presets=DATA.presets,
    quick=DATA.quick,
    search=glue_config.SEARCH,
    fingerprint=glue_config.data_fingerprint,
    check_data=glue_config.check_data,
)
