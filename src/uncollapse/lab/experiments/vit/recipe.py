"""Train a vision transformer of timm with ContraNorm, DiversePatch's losses, AttnScale, FeatScale, or no cure.

The defaults are DeiT's training recipe. Settings are chosen on held-out training images; the test images are read once,
at the end. Published code reads them after every epoch and reports the best: `test_each_epoch` records that as
`test_max`, next to the result.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.task import TrainingOptions
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.experiments.vit import config as vit_config
from uncollapse.lab.experiments.vit.config import Config as Config
from uncollapse.lab.experiments.vit.config import Data
from uncollapse.lab.experiments.vit.training import Training, avoid_slow_attention
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import fingerprint, round_metrics, summarize_diagnosis
from uncollapse.lab.search.variables import Search
from uncollapse.registry import CURES, LOSSES
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.trial_result import attach_line

NAME = "vit"
LIBRARIES = ("timm", "torchvision", "pillow", "accelerate")
LAST_BLOCK = (
    "mean_cosine",
    "attention_std",
    "effective_rank",
    "dataset_rank",
)  # its measures in a record


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train a vision transformer; return it in evaluation mode, and the record of the run."""
    runtime.report_stage("reading the images")
    data = vit_config.load(config, runtime)
    model = vit_config.build(config, len(data.set.train.classes), data.set.train.classes)
    avoid_slow_attention(model.vit, config.precision, runtime.device)
    training = Training(model, config, data.parts, runtime)
    record = _fit_and_record(training, config, data, runtime)
    saved_models.save_vision_model(runtime, model.vit, config, data.set.train.classes)
    return model.vit, record


run = record_of(train)


def _fit_and_record(training: Training, config: Config, data: Data, runtime: Runtime) -> dict[str, Any]:
    weights = fingerprint(parameter.detach() for parameter in training.model.parameters())
    before = summarize_diagnosis(training.diagnose())
    precision: Any = config.precision
    options = TrainingOptions(
        config.epochs,
        config.seed,
        accumulate=config.accumulate,
        clip=config.clip or None,
        precision=precision,
        ema=config.ema or None,
    )
    teacher = {} if training.teacher is None else {"teacher": training.teacher.fingerprint}
    experiment = "-".join([identity(NAME, config), data.fingerprint(), weights, *teacher.values()])
    with training as task:
        history = fit(task, options, runtime, experiment, vars(config))
    after = training.diagnose()
    last = next(layer for layer in reversed(after.layers) if layer.name.startswith("block"))
    found = {name: value for name, value in history.epochs[-1].items() if name not in ("loss", "epoch")}
    figures = found | {"test": training.accuracy(training.model.vit, "test")}
    if config.test_each_epoch:
        figures["test_max"] = max(each["test"] for each in history.epochs)  # next to the result, never instead of it
    figures |= {name: last.measures[name].mean for name in LAST_BLOCK if name in last.measures}
    return training_record(
        NAME,
        config,
        history,
        LIBRARIES,
        data=data.facts | {"weights": weights, "skipped": training.skipped} | teacher,
        figures=round_metrics(figures),
        pace=round_metrics(history.pace),
        diagnosis={"before": before, "after": summarize_diagnosis(after)},
        spectrum=[float(f"{value:.4g}") for value in last.spectrum],
    )


def data_fingerprint(config: Config, runtime: Runtime) -> str:
    """Return the fingerprint of the images at hand."""
    return vit_config.load(config, runtime).fingerprint()


def attach_code(config: Config) -> str | None:
    """Return the code that attaches a run's cure to another model."""
    defaults = {"temperature": 1.0, "identity": False, "dual": False, "average": "raw"}
    defaults |= dict.fromkeys(("pre_norm", "learnable", "positive"), False)
    given = vit_config.cure_options(config)
    return attach_line(config.cure, {name: value for name, value in given.items() if defaults.get(name) != value})


DIVERSE = ("cosine_loss", "contrast_loss", "mixing_loss")


def variant(config: Mapping[str, Any]) -> str:
    """Return the row of the tables that a run belongs to: its cure and its losses on patches."""
    weights = {name.replace("_", " "): config[name] for name in DIVERSE if config[name]}
    diverse = [name if weight == 1 else f"{name} × {weight:g}" for name, weight in weights.items()]
    if list(weights.values()) == [1] * len(DIVERSE):
        diverse = ["DiversePatch"]
    cure = [config["cure"]] if config["cure"] != "none" else []
    return " + ".join(cure + diverse) or "none"


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    words = variant(asdict(config)).replace(" + ", "+").replace(" × ", "-x").replace(" ", "-")
    scale = f"-s{config.scale:g}" if config.cure == "contra_norm" else ""
    sizes = f"L{config.depth}" if config.depth else "L"
    data = config.data.strip("./").replace("/", "_") or "images"
    return f"{data}-{config.model}-{sizes}-{words}{scale}-seed{config.seed}"[:120]


IMAGES = {"stl10": 5000, "fashion-mnist": 60_000, "digits": 1497, "tinyimagenet20": 9000, "imagenet": 1_281_167}
FAMILIES = {"tiny": (192, 12), "small": (384, 12), "base": (768, 12), "large": (1024, 24), "huge": (1280, 32)}


def _number(word: str, name: str) -> int:
    """Return the number after a word in the name of a model; 16 if there is none."""
    found = re.search(rf"{word}(\d+)", name)
    return int(found[1]) if found else 16


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core, with 50,000 images where their number is not known."""
    family, own_depth = next((sizes for name, sizes in FAMILIES.items() if name in config.model), (192, 12))
    width, depth, patch = (
        config.width or family,
        config.depth or own_depth,
        config.patch or _number("patch", config.model),
    )
    tokens = ((config.image or 224) / patch) ** 2 + 1
    work = 6 * tokens * depth * (12 * width**2 + 2 * tokens * width)  # operations of an image, forward and backward
    speed = 110e9 if config.precision == "bf16" else 60e9
    share = 1.5 if config.cure == "contra_norm" else 1.0
    images = config.examples or IMAGES.get(config.data, 50_000)
    return 60 + config.epochs * images * work / speed * share


OF_CONTRA_NORM = {"cure": ("contra_norm",)}
SEARCH = Search(
    space=(
        OneOf("cure", ("contra_norm", "attn_scale", "feat_scale")),
        Between("scale", 0.01, 1.0, when=OF_CONTRA_NORM),
        OneOf("at", ("norms", "attention.residual", "block"), when=OF_CONTRA_NORM),
        Between("temperature", 0.2, 5.0, when=OF_CONTRA_NORM),
    ),
    baseline={"cure": "none"},
    line=attach_code,
    missing=lambda config: None if config.holdout else "Settings are chosen on held-out images: --holdout 0.1.",
)
DATA = recipe_data.read(__package__, Config, row_of=variant)
RECIPE = Recipe(
    name=NAME,
    title="A vision transformer on images, with ContraNorm, DiversePatch's losses, AttnScale, FeatScale, or nothing",
    paper=f"{CURES['contra_norm'].paper}; {LOSSES['patch_mixing_loss'].paper}",
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    presets=DATA.presets,
    quick=DATA.quick,
    search=SEARCH,
    fingerprint=data_fingerprint,
    reads_images=True,
)
