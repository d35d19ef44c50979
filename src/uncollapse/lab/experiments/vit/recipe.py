"""A vision transformer of timm on images, with ContraNorm, DiversePatch's losses, AttnScale, FeatScale, or nothing.

The defaults are DeiT's training recipe. Settings are chosen on images held back from training; the test images are read
once, at the end.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from uncollapse.lab.config.fields import identity
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.engine.task import TrainingOptions
from uncollapse.lab.experiments.vit import config as vision
from uncollapse.lab.experiments.vit.config import Config as VisionConfig
from uncollapse.lab.experiments.vit.config import Data
from uncollapse.lab.experiments.vit.paper import (
    BASE_1000,
    CONTRA_NORM,
    RELEASED,
    SMALL_1000,
    TINY_100,
    Table,
    published,
)
from uncollapse.lab.experiments.vit.paper import PRESETS as PAPERS
from uncollapse.lab.experiments.vit.training import Training, without_slow_attention
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record, fingerprint, round_metrics, summarize_diagnosis
from uncollapse.lab.search.variables import Search
from uncollapse.lab.tables.paper_table import PaperTable
from uncollapse.registry import CURES, LOSSES
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.trial_result import attach_line

NAME = "vit"
TITLE = "A vision transformer on images, with ContraNorm, DiversePatch's losses, AttnScale, FeatScale, or nothing"
PAPER = f"{CURES['contra_norm'].paper}; {LOSSES['patch_mixing_loss'].paper}"
LIBRARIES = ("timm", "torchvision", "pillow", "accelerate")
LAST = ("mean_cosine", "attention_std", "effective_rank", "dataset_rank")  # of the last block, among the figures


@dataclass(frozen=True)
class Config(VisionConfig):
    """A run."""


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train a vision transformer, and give the record of the run."""
    return train(config, runtime)[1]


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained model in evaluation mode, and the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        runtime.report_stage("reading the pictures")
        data = vision.load(config, runtime)
        model = vision.build(config, len(data.set.train.classes), data.set.train.classes)
        without_slow_attention(model.vit, config.precision, runtime.device)
        training = Training(model, config, data.parts, runtime)
        found = _trained(training, config, data, runtime)
        saved_models.save_vision_model(runtime, model.vit, config, data.set.train.classes)
        return model.vit, found


def _trained(training: Training, config: Config, data: Data, runtime: Runtime) -> dict[str, Any]:
    weights = fingerprint(parameter.detach() for parameter in training.model.parameters())
    before = summarize_diagnosis(training.diagnosis())
    precision: Any = config.precision
    settings = TrainingOptions(
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
        history = fit(task, settings, runtime, experiment, vars(config))
    after = training.diagnosis()
    last = next(layer for layer in reversed(after.layers) if layer.name.startswith("block"))
    found = {name: value for name, value in history.epochs[-1].items() if name not in ("loss", "epoch")}
    figures = found | {"test": training.accuracy(training.model.vit, "test")}
    figures |= {name: last.measures[name].mean for name in LAST if name in last.measures}
    return build_record(
        NAME,
        config,
        history.seconds,
        LIBRARIES,
        data=data.facts | {"weights": weights, "skipped": training.skipped} | teacher,
        figures=round_metrics(figures),
        ended=history.ended,
        pace=round_metrics(history.pace),
        epochs=[round_metrics(each) for each in history.epochs],
        diagnosis={"before": before, "after": summarize_diagnosis(after)},
        spectrum=[float(f"{value:.4g}") for value in last.spectrum],
    )


def data_fingerprint(config: Config, runtime: Runtime) -> str:
    """Return the fingerprint of the images at hand."""
    return vision.load(config, runtime).fingerprint()


def line(config: Config) -> str | None:
    """The code for a model of one's own."""
    usual = {"temperature": 1.0, "identity": False, "dual": False, "average": "raw"}
    usual |= {"learnable": False, "positive": False}
    given = vision.cure_options(config)
    return attach_line(config.cure, {name: value for name, value in given.items() if usual.get(name) != value})


DIVERSE = ("cosine_loss", "contrast_loss", "mixing_loss")
ROWS = "cure+" + "+".join(DIVERSE)


def variant(config: Mapping[str, Any]) -> str:
    """What acts in a run, in words: the rows of the tables."""
    weights = {name.replace("_", " "): config[name] for name in DIVERSE if config[name]}
    diverse = [name if weight == 1 else f"{name} × {weight:g}" for name, weight in weights.items()]
    if list(weights.values()) == [1] * len(DIVERSE):
        diverse = ["DiversePatch"]
    cure = [config["cure"]] if config["cure"] != "none" else []
    return " + ".join(cure + diverse) or "none"


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    words = variant(asdict(config)).replace(" + ", "+").replace(" × ", "-x").replace(" ", "-")
    scale = f"-s{config.scale:g}" if config.cure == "contra_norm" else ""
    sizes = f"L{config.depth}" if config.depth else "L"
    data = config.data.strip("./").replace("/", "_") or "images"
    return f"{data}-{config.model}-{sizes}-{words}{scale}-seed{config.seed}"[:120]


IMAGES = {"stl10": 5000, "fashion-mnist": 60_000, "digits": 1497, "tinyimagenet20": 9000, "imagenet": 1_281_167}
FAMILIES = {"tiny": (192, 12), "small": (384, 12), "base": (768, 12), "large": (1024, 24), "huge": (1280, 32)}


def _number(word: str, name: str) -> int:
    """What follows a word in the name of a model; 16 if nothing does."""
    found = re.search(rf"{word}(\d+)", name)
    return int(found[1]) if found else 16


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core; of 50,000 images, where it is not said how many there are."""
    family, own_depth = next((sizes for name, sizes in FAMILIES.items() if name in config.model), (192, 12))
    width, depth, patch = (
        config.width or family,
        config.depth or own_depth,
        config.patch or _number("patch", config.model),
    )
    tokens = ((config.image or 224) / patch) ** 2 + 1
    work = 6 * tokens * depth * (12 * width**2 + 2 * tokens * width)  # operations of an image, there and back
    speed = 110e9 if config.precision == "bf16" else 60e9
    share = 1.5 if config.cure == "contra_norm" else 1.0
    images = config.examples or IMAGES.get(config.data, 50_000)
    return 60 + config.epochs * images * work / speed * share


SMALL: dict[str, Any] = {  # what ten epochs of ten thousand small images allow
    "width": 96,
    "heads": 3,
    "image": 32,
    "patch": 4,
    "examples": 10_000,
    "holdout": 0.1,
    "epochs": 10,
    "batch": 64,
    "warmup": 1.0,
    "decay_positions": True,
    "clip": 1.0,
    "drop_path": 0.0,
    "crop": "padded",
    "auto_augment": "",
    "color_jitter": 0.0,
    "erasing": 0.0,
    "repeats": 1,
    "mixup": 0.0,
    "cutmix": 1.0,
    "mix_chance": 0.5,
    "smoothing": 0.0,
    "precision": "bf16",
}
PRESETS: Mapping[str, Mapping[str, Any]] = {"small": SMALL, **PAPERS}
QUICK: Mapping[str, Any] = SMALL | {
    "data": "digits",
    "depth": 8,
    "width": 48,
    "image": 16,
    "examples": 0,
    "epochs": 4,
    "cutmix": 0.0,
    "precision": "no",
}
AXES: dict[str, Any] = {
    "groups": "data",
    "rows": ROWS,
    "columns": "depth",
    "row_of": variant,
    "choose": ("scale",),
    "baseline": "none",
}


def _beside(title: str, protocol: Mapping[str, Any], data: str, model: str, table: Table) -> PaperTable:
    """A table of a paper, with the results that were run as it was."""
    numbers = published((AXES["groups"], AXES["rows"], AXES["columns"]), data, table)
    usual = asdict(Config(**protocol))
    free = ("class_list", "holdout", "precision")
    where = {"data": data, "model": model}
    return PaperTable(title, where=where, published=numbers, protocol=usual, free=free, all_groups=True, **AXES)


OF_CONTRA_NORM = {"cure": ("contra_norm",)}
SEARCH = Search(
    space=(
        OneOf("cure", ("contra_norm", "attn_scale", "feat_scale")),
        Between("scale", 0.01, 1.0, when=OF_CONTRA_NORM),
        OneOf("at", ("norms", "attention.residual", "block"), when=OF_CONTRA_NORM),
        Between("temperature", 0.2, 5.0, when=OF_CONTRA_NORM),
    ),
    baseline={"cure": "none"},
    line=line,
    missing=lambda config: None if config.holdout else "Settings are chosen on held-out images: --holdout 0.1.",
)
TABLES: Mapping[str, PaperTable] = {
    "accuracy": PaperTable("Test accuracy", where={}, **AXES),
    "imagenet100": _beside(
        "ContraNorm: DeiT-T on ImageNet-100", CONTRA_NORM, "imagenet100", "deit_tiny_patch16_224", TINY_100
    ),
    "imagenet": _beside(
        "ContraNorm: DeiT-S on ImageNet", CONTRA_NORM, "imagenet", "deit_small_patch16_224", SMALL_1000
    ),
    "diversepatch": _beside(
        "DiversePatch: DeiT-B on ImageNet", RELEASED, "imagenet", "deit_base_patch16_224", BASE_1000
    ),
}


def _grid(data: str, depth: int, seed: int = 0, **values: Any) -> Grid:
    """One run, or several where a value is a tuple."""
    given = SMALL | {"data": data, "depth": depth, "seed": seed} | values
    return Grid({name: value if isinstance(value, tuple) else (value,) for name, value in given.items()})


ALL_THREE: dict[str, Any] = dict.fromkeys(DIVERSE, 1.0)


def _three(depth: int, seed: int) -> tuple[Grid, ...]:
    """Nothing, ContraNorm and the whole of DiversePatch."""
    plain = _grid("cifar10", depth, seed, cure=("none", "contra_norm"))
    return plain, _grid("cifar10", depth, seed, cure="none", **ALL_THREE)


TINY = {"image": 64, "patch": 8, "examples": 0}
GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "cifar10-24": tuple(grid for seed in range(3) for grid in _three(24, seed)),
    "cifar10-12": (
        *_three(12, 0),
        *(_grid("cifar10", 12, 0, cure="none", **{loss: 1.0}) for loss in DIVERSE),
        _grid("cifar10", 12, cure="contra_norm", **ALL_THREE),
        _grid("cifar10", 12, cure=("attn_scale", "feat_scale")),
    ),
    "tinyimagenet20": (_grid("tinyimagenet20", 12, cure=("none", "contra_norm"), **TINY),),
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
    quick=QUICK,
    search=SEARCH,
    fingerprint=data_fingerprint,
    reads_images=True,
)
