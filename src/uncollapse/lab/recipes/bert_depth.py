"""An encoder of any depth on a task of GLUE, from scratch or from pretrained blocks: does it live, and how?

After each epoch the record keeps similarity, effective rank and variances of every layer: the depth figures of
ContraNorm's paper (arXiv 2303.06562).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from uncollapse.lab import keeping, sentences
from uncollapse.lab.board import Board, Published
from uncollapse.lab.configs import identity, setting
from uncollapse.lab.data.glue import Glue
from uncollapse.lab.grids import Grid
from uncollapse.lab.models.text_classifier import stacked
from uncollapse.lab.recipes.glue import BERT, MINILM, ROWS, place_name, variant
from uncollapse.lab.records import fingerprint, record, short, summary
from uncollapse.lab.seeding import seeded
from uncollapse.lab.sentences import Data, TextConfig, Training
from uncollapse.lab.sessions import Session
from uncollapse.lab.tasks import Task
from uncollapse.lab.threads import threads
from uncollapse.lab.training import fit
from uncollapse.loading.errors import UsageError
from uncollapse.loading.huggingface import Origin, classifier
from uncollapse.registry import CURES

NAME = "bert-depth"
TITLE = "An encoder of any depth on a task of GLUE, with ContraNorm or without, layer by layer over training"
PAPER = CURES["contra_norm"].paper
MEASURES = ("mean_cosine", "effective_rank", "feature_variance", "token_variance")


@dataclass(frozen=True)
class Config(TextConfig):
    """A run."""

    start: str = setting(
        "scratch", "scratch: random weights; stacked: pretrained blocks, repeated.", choices=("scratch", "stacked")
    )
    depth: int = setting(12, "Blocks.", least=1)
    width: int = setting(128, "scratch: width of the residual stream.", least=8)
    heads: int = setting(2, "scratch: heads of the attention.", least=1)
    task: str = setting("sst2", "A task of GLUE, or a folder with your own train.tsv and dev.tsv.")
    examples: int = setting(10_000, "Training examples, drawn once for all seeds; 0: all.", least=0)
    max_length: int = setting(64, "Tokens of an example.", least=8)
    lr: float = setting(5e-4, "Largest learning rate of AdamW; it falls in a line.", least=0)
    warmup: float = setting(0.1, "Share of the steps in which the learning rate rises.", least=0, most=0.9)
    weight_decay: float = setting(0.01, "Weight decay of AdamW, not of norms and biases.", least=0)
    clip: float = setting(1.0, "Largest length of the gradient; 0: any.", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "scratch" and self.width % self.heads:
            raise UsageError(f"width must be a multiple of heads, got {self.width} and {self.heads}.")


def build(config: Config, origin: Origin, task: Glue) -> nn.Module:
    """The model at its start, with the outputs that its task needs."""
    labels = task.outputs
    with seeded(config.seed):
        if config.start == "stacked":
            model = stacked(origin, labels, config.depth)
        else:
            shape = {"num_hidden_layers": config.depth, "num_attention_heads": config.heads}
            widths = {"hidden_size": config.width, "intermediate_size": 4 * config.width}
            model = classifier(origin, labels, random_weights=True, **shape, **widths)
    sentences.put_cure(model, config)
    return model


def run(config: Config, session: Session | None = None) -> dict[str, Any]:
    """Train an encoder, and give the record of the run."""
    return train(config, session)[1]


def train(config: Config, session: Session | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained model in evaluation mode, and the record of the run."""
    session = session or Session()
    with threads(session.threads):
        origin = Origin(config.model)
        data = sentences.load(config, session, origin)
        model = build(config, origin, data.task)
        sentences.check_length(config, data.tokenizer, model)
        made = _train(model, config, session, data)
        keeping.keep_text(session, model, data.tokenizer, config, data.task.labels)
        return model, made


class _Watched(Training):
    """Training whose evaluations look into every layer; the figures of an epoch are kept in its checkpoints."""

    def __enter__(self) -> Task:
        task = super().__enter__()

        def evaluate(model: nn.Module) -> dict[str, float]:
            layers = summary(sentences.diagnosis(model, self.data.parts[self.data.task.dev[0]]))["layers"]
            return self.evaluate(model) | {f"{m} {at['name']}": at[m] for m in MEASURES for at in layers if m in at}

        return Task(task.model, task.optimiser, task.batches, task.loss, evaluate, task.schedule)


def _train(model: nn.Module, config: Config, session: Session, data: Data) -> dict[str, Any]:
    dev = data.task.dev
    before = summary(sentences.diagnosis(model, data.parts[dev[0]]))
    weights = fingerprint(parameter.detach() for parameter in model.parameters())
    experiment = f"{identity(NAME, config)}-{data.fingerprint()}-{weights}"
    with _Watched(model, config, data) as task:
        history = fit(task, sentences.settings_of(config), session, experiment, vars(config))
    after = summary(sentences.diagnosis(model, data.parts[dev[0]]))
    epochs = [short(each) for each in history.epochs]
    figures = {name: value for name, value in epochs[-1].items() if " " not in name and name != "loss"}
    for part in dev:
        found = sentences.scores(model, data.parts[part], config, data.task)
        figures |= sentences.named(part.removesuffix("_matched"), found)
    figures |= {"always": _always(data, dev[0])}
    return record(
        NAME,
        config,
        history.seconds,
        ("transformers", "accelerate", "scikit-learn", "scipy"),
        data={
            "name": Path(data.task.folder).name,
            "metric": data.task.metrics[0],
            "fingerprint": data.fingerprint(),
            "weights": weights,
            "skipped": data.skipped,
            **{part: len(tokens) for part, tokens in data.parts.items()},
        },
        figures=short(figures),
        ended=history.ended,
        epochs=[{name: value for name, value in each.items() if " " not in name} for each in epochs],
        layers=_layers(before["layers"], epochs),
        diagnosis={"before": before, "after": after},
    )


def _always(data: Data, part: str) -> float:
    """The share of the most frequent class: what a dead model reaches."""
    labels = data.parts[part].labels
    assert labels is not None
    return float(torch.unique(labels, return_counts=True)[1].max()) / len(labels)


def _layers(before: list[dict[str, Any]], epochs: list[dict[str, float]]) -> dict[str, Any]:
    """Each measure as rows of epochs, the start first, with a column a layer."""
    names = [layer["name"] for layer in before]
    start = {measure: [layer.get(measure) for layer in before] for measure in MEASURES}
    rows = {m: [start[m], *([each.get(f"{m} {name}") for name in names] for each in epochs)] for m in MEASURES}
    return {"names": names, **rows}


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    words = variant(asdict(config)).replace(" ", "-")
    scale = f"-s{config.scale:g}" if config.cure == "contra_norm" else ""
    return f"{place_name(config.task)}-{config.start}-L{config.depth}-{words}{scale}-seed{config.seed}"


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core."""
    examples = (1 - config.holdout) * (config.examples or 50_000)
    share = 1.3 if config.cure == "contra_norm" else 1.0
    return 10 + config.epochs * examples / 32 * config.depth * 3e-3 * share * (config.width / 128)


DEPTHS = (12, 24, 36, 48, 60, 72)
FIGURE = {"none": (55.28, 59.83, 44.11, 0.0, 0.0, 0.0), "contra_norm": (58.04, 58.08, 58.79, 58.95, 58.85, 56.38)}
PUBLISHED = tuple(
    Published({"task": "cola", ROWS: row, "depth": depth}, number, None, "ContraNorm, read off a figure")
    for row, numbers in FIGURE.items()
    for depth, number in zip(DEPTHS, numbers, strict=True)
)
WIDE = {"model": BERT, "start": "stacked", "width": 768, "heads": 12, "examples": 0, "holdout": 0.0, "max_length": 128}
BOARDS: Mapping[str, Board] = {
    "depth": Board(
        "Encoders of growing depth on GLUE's development sets",
        where={},
        groups="task",
        rows=ROWS,
        columns="depth",
        figure="dev",
        row_of=variant,
        chosen=("scale",),
        published=PUBLISHED,
        against="none",
        usual=asdict(Config()) | WIDE | {"scale": 0.2},
        whole=True,
    ),
}
SMALL: dict[str, tuple[Any, ...]] = {"model": (MINILM,), "epochs": (3,)}


def _pairs(depths: tuple[int, ...], seed: int) -> tuple[Grid, ...]:
    shared = SMALL | {"depth": depths, "seed": (seed,)}
    return Grid(shared | {"cure": ("none",)}), Grid(shared | {"cure": ("contra_norm",), "scale": (0.2,)})


GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "sst2": (*_pairs((24, 48), 0), *_pairs((12,), 0), *_pairs((12, 24, 48), 1), *_pairs((72,), 0)),
}
