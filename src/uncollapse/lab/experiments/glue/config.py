"""What recipes on sentences share: their settings, their data, and the model at its start."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from uncollapse.attachment.save import DESCRIPTION
from uncollapse.backbones.huggingface_blocks import NUMBERS
from uncollapse.errors import UsageError
from uncollapse.io.files import user_cache
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.io.text_batches import token_limit
from uncollapse.lab.config.fields import config_field
from uncollapse.lab.data.text import glue
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, encode
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.models.text_classifier import parse_place
from uncollapse.lab.models.text_classifier import put_cure as cure
from uncollapse.lab.runs.records import fingerprint
from uncollapse.lab.search.variables import Search
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.trial_result import attach_line

SPLIT_SEED = 0  # what is held out, and what a subset has, is the same for every seed of a run
CURES = ("none", "contra_norm", "uniform_loss")
_PLACES = ", ".join(f"{place} ({number})" for number, place in NUMBERS.items())
OF_CONTRA_NORM = ("at", "layers", "scale", "axis", "identity", "dual", "norm")
OF_UNIFORM_LOSS = ("weight", "uniform_on")
IDLE = {  # settings that do nothing with a cure
    "none": (*OF_CONTRA_NORM, *OF_UNIFORM_LOSS, "temperature"),
    "contra_norm": OF_UNIFORM_LOSS,
    "uniform_loss": OF_CONTRA_NORM,
}


@dataclass(frozen=True)
class TextConfig:
    """A run on a task of GLUE. Settings of another cure than its own get their defaults: they make no other run."""

    task: str = config_field(
        "rte", f"A folder with your train.tsv and dev.tsv, or a task of GLUE: {', '.join(glue.NAMES)}."
    )
    model: str = config_field(
        "google-bert/bert-base-uncased", "Encoder: a name on the hub, a folder, or package:NAME/FOLDER."
    )
    max_length: int = config_field(128, "Tokens of an example.", minimum=8)
    examples: int = config_field(0, "Training examples, drawn once for all seeds; 0: all.", minimum=0)
    holdout: float = config_field(
        0.1, "Share of the training examples that is kept back to choose settings on; 0: none.", minimum=0, maximum=0.9
    )
    cure: str = config_field("contra_norm", "What acts against the collapse.", choices=CURES)
    at: str = config_field("attention.residual", f"contra_norm: its place, or the paper's number. For BERT: {_PLACES}.")
    layers: str = config_field("all", "contra_norm: its blocks: all, first 4, last 4, or 2:8 counted from 0.")
    scale: float = config_field(0.1, "contra_norm: its scale.")
    temperature: float = config_field(1.0, "contra_norm, uniform_loss: the temperature.", minimum=1e-3)
    axis: str = config_field("tokens", "contra_norm: features is its second version.", choices=("tokens", "features"))
    identity: bool = config_field(
        True, "contra_norm: (1 + s)x − s·m as published for BERT; else x − s·m, as for ALBERT."
    )
    dual: bool = config_field(False, "contra_norm: both terms of the gradient.")
    norm: str = config_field("layer", "contra_norm: the norm behind it, the model's or L2.", choices=("layer", "l2"))
    padding: str = config_field(
        "masked", "counted: padding is taken for tokens, in batches as published.", choices=("masked", "counted")
    )
    weight: float = config_field(1.0, "uniform_loss: its weight.", minimum=0)
    uniform_on: str = config_field(
        "tokens", "uniform_loss: on the last layer's tokens, or on pooled rows.", choices=("tokens", "pooled")
    )
    epochs: int = config_field(5, "Passes over the training examples.", minimum=1)
    batch: int = config_field(32, "Examples in a step.", minimum=1)
    lr: float = config_field(2e-5, "Largest learning rate of AdamW; it falls in a line.", minimum=0)
    warmup: float = config_field(0.0, "Share of the steps in which the learning rate rises.", minimum=0, maximum=0.9)
    weight_decay: float = config_field(0.0, "Weight decay of AdamW, not of norms and biases.", minimum=0)
    clip: float = config_field(0.0, "Largest length of the gradient; 0: any.", minimum=0)
    precision: str = config_field("no", "Half precision in training.", choices=("no", "bf16", "fp16"))
    seed: int = config_field(0, "Of a new head, of dropout and of the order of the examples.", minimum=0, maximum=2**31)

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in IDLE[self.cure]:
                object.__setattr__(self, field.name, field.default)


Config = TypeVar("Config", bound=TextConfig)


@dataclass(frozen=True)
class Data:
    """Token ids of all parts: train, validation if a share is held out, dev or dev_matched and dev_mismatched.

    skipped: damaged rows that were left out. task: what is learnt from them.
    """

    parts: Mapping[str, EncodedTexts]
    tokenizer: Any
    skipped: int
    task: glue.GlueTask

    def fingerprint(self) -> str:
        """16 hex digits that change when any token or label does."""
        tensors = (t for part in self.parts.values() for t in (part.ids, part.starts, part.labels) if t is not None)
        return fingerprint(tensors)


def prepared(
    config: Config, runtime: Runtime, build: Callable[[Config, Origin, glue.GlueTask], nn.Module]
) -> tuple[nn.Module, Data]:
    """The model of a run at its start, and its data. build: makes the model, cure and all."""
    origin = start_of(config)
    data = load(config, runtime, origin)
    model = build(config, origin, data.task)
    fit_to(data.tokenizer, model, config)
    return model, data


def start_of(config: TextConfig) -> Origin:
    """Where the model of a run is; refused if it has a cure, which would be lost without a word."""
    origin = Origin(config.model)
    if (Path(origin.place) / DESCRIPTION).is_file():
        raise UsageError(
            f"{config.model} was kept with a cure in it ({DESCRIPTION}), which a new run would lose. Name the model "
            "it was trained from, or load it with uncollapse.lab.runs.saved_models.load_text_model and train it."
        )
    return origin


def data_fingerprint(config: TextConfig, runtime: Runtime) -> str | None:
    """Return the fingerprint of the sentences at hand; None for those of the hub, which do not change."""
    local = runtime.data_root is not None or config.task not in glue.TASKS
    origin = Origin(config.model)
    return load(config, runtime, origin).fingerprint() if local and Path(origin.place).is_dir() else None


def load(config: TextConfig, runtime: Runtime, origin: Origin) -> Data:
    """The data of a run, in tokens of its model."""
    task = glue.find_task(config.task)
    words = load_tokenizer(origin)
    whole = glue.load_split(task, "train", runtime.data_root)
    if config.examples > len(whole):
        raise UsageError(f"{config.task} has {len(whole)} training examples, got examples {config.examples}.")
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(SPLIT_SEED))
    order = order[: config.examples or len(whole)]
    held = round(config.holdout * len(order))
    texts = {"train": whole.chosen(order[held:].tolist())}
    if config.holdout and not (held and len(order) - held):
        raise UsageError(f"holdout {config.holdout} of {len(order)} examples leaves a part empty.")
    if held:
        texts["validation"] = whole.chosen(order[:held].tolist())
    texts |= {part: glue.load_split(task, part, runtime.data_root) for part in task.dev}
    parts = {name: encoded(part, words, config, task) for name, part in texts.items()}
    skipped = whole.skipped + sum(texts[part].skipped for part in task.dev)
    return Data(parts, words, skipped, task)


def encoded(part: glue.Examples, words: Any, config: TextConfig, task: glue.GlueTask) -> EncodedTexts:
    """Examples in tokens, from the cache if they are there."""
    return encode(part, words, config.max_length, classes=not task.scores, cache=user_cache())


def put_cure(model: nn.Module, config: TextConfig) -> None:
    """The cure of a run, in its model."""
    options = {name: getattr(config, name) for name in ("scale", "temperature", "axis", "identity", "dual", "padding")}
    cure(model, config.cure, at=config.at, layers=config.layers, norm=config.norm, **options)


def fit_to(words: Any, model: Any, config: TextConfig) -> None:
    """Tell the model what fills up, which decoders have to know; raise if it cannot read that many tokens."""
    if model.config.pad_token_id is None:
        model.config.pad_token_id = words.pad_token_id
    try:
        token_limit(words, model, config.max_length)
    except UsageError as error:
        raise UsageError(str(error).replace("--max-length", "max_length")) from error


def attach_options(config: TextConfig) -> dict[str, Any]:
    """What `uc.attach` is told to put the cure of a run into another model, but for what it takes by itself."""
    options: dict[str, Any] = {"scale": config.scale, "at": parse_place(config.at)}
    options |= {"layers": None if config.layers == "all" else config.layers}
    options |= {"temperature": config.temperature if config.temperature != 1 else None}
    options |= {"axis": "features"} if config.axis == "features" else {}
    return options | {"identity": config.identity or None, "dual": config.dual or None}


def line(config: TextConfig) -> str | None:
    """The code for a model of one's own."""
    if config.cure == "contra_norm":
        return attach_line("contra_norm", attach_options(config))
    if config.cure == "uniform_loss" and config.uniform_on == "tokens":
        return (
            f'with uc.tokens(model, "last") as held: …; loss = loss + {config.weight:g} * '
            f'uc.contra_uniform_loss(held["last"], temperature={config.temperature:g}, mask=held.mask("last"))'
        )
    return None


SEARCH = Search(
    space=(
        OneOf("cure", ("contra_norm", "uniform_loss")),
        Between("scale", 0.005, 1.0, when={"cure": ("contra_norm",)}),
        OneOf("at", ("attention.residual", "attention.output", "block"), when={"cure": ("contra_norm",)}),
        OneOf("layers", ("all", ":4", "-4:"), when={"cure": ("contra_norm",)}),
        Between("temperature", 0.2, 5.0),
        Between("weight", 0.01, 1.0, when={"cure": ("uniform_loss",)}),
    ),
    baseline={"cure": "none"},
    line=line,
    missing=lambda config: None if config.holdout else "Settings are chosen on what is held out, and holdout is 0.",
)
