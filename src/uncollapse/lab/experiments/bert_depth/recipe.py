"""An encoder of any depth on a task of GLUE, from scratch or from pretrained blocks: does it live, and how?

After each epoch the record keeps similarity, effective rank and variances of every layer: the depth figures of
ContraNorm's paper (arXiv 2303.06562).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from uncollapse.errors import UsageError
from uncollapse.io.hf_models import Origin
from uncollapse.lab.config.fields import config_field
from uncollapse.lab.data.text.glue import GlueTask
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task
from uncollapse.lab.engine.threads import use_threads
from uncollapse.lab.experiments.glue import config as sentences
from uncollapse.lab.experiments.glue.config import TextConfig, data_fingerprint
from uncollapse.lab.experiments.glue.recipe import BERT, MINILM, PROTOCOL, ROWS, place_name, variant
from uncollapse.lab.experiments.glue.training import Training, diagnosis, trained
from uncollapse.lab.models.text_classifier import build_deepened, build_random
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.records import round_metrics, summarize_diagnosis
from uncollapse.lab.tables.paper_table import PaperTable, Published
from uncollapse.registry import CURES

NAME = "bert-depth"
TITLE = "An encoder of any depth on a task of GLUE, with ContraNorm or without, layer by layer over training"
PAPER = CURES["contra_norm"].paper
WIDTH, HEADS = 128, 2
MEASURES = ("mean_cosine", "effective_rank", "feature_variance", "token_variance")


@dataclass(frozen=True)
class Config(TextConfig):
    """A run."""

    start: str = config_field(
        "scratch",
        "scratch: random weights; stacked: pretrained blocks, repeated; extended: random blocks behind them.",
        choices=("scratch", "stacked", "extended"),
    )
    depth: int = config_field(12, "Blocks.", minimum=1)
    width: int = config_field(WIDTH, "scratch: width of the residual stream.", minimum=8)
    heads: int = config_field(HEADS, "scratch: heads of the attention.", minimum=1)
    task: str = config_field("sst2", "A task of GLUE, or a folder with your own train.tsv and dev.tsv.")
    model: str = config_field(BERT, "Encoder whose architecture and tokenizer it has, and weights but from scratch.")
    examples: int = config_field(10_000, "Training examples, drawn once for all seeds; 0: all.", minimum=0)
    max_length: int = config_field(64, "Tokens of an example.", minimum=8)
    lr: float = config_field(5e-4, "Largest learning rate of AdamW; it falls in a line.", minimum=0)
    warmup: float = config_field(0.1, "Share of the steps in which the learning rate rises.", minimum=0, maximum=0.9)
    weight_decay: float = config_field(0.01, "Weight decay of AdamW, not of norms and biases.", minimum=0)
    clip: float = config_field(1.0, "Largest length of the gradient; 0: any.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "scratch" and self.width % self.heads:
            raise UsageError(f"width must be a multiple of heads, got {self.width} and {self.heads}.")
        if self.start != "scratch" and (self.width, self.heads) != (WIDTH, HEADS):
            raise UsageError(f"width and heads are the pretrained model's where start is {self.start}; leave them out.")


def build(config: Config, origin: Origin, task: GlueTask) -> nn.Module:
    """The model at its start, with the outputs that its task needs."""
    labels = task.outputs
    with use_seed(config.seed):
        if config.start == "scratch":
            model = build_random(origin, labels, depth=config.depth, width=config.width, heads=config.heads)
        else:
            model = build_deepened(origin, labels, config.depth, repeated=config.start == "stacked")
    sentences.put_cure(model, config)
    return model


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train an encoder, and give the record of the run."""
    return train(config, runtime)[1]


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The trained model in evaluation mode, and the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        model, data = sentences.prepared(config, runtime, build)
        history, made = trained(NAME, _Watched(model, config, data), runtime)
        made["layers"] = _layers(
            made["diagnosis"]["before"]["layers"], [round_metrics(each) for each in history.epochs]
        )
        saved_models.save_text_model(runtime, model, data.tokenizer, config, data.task.labels)
        return model, made


class _Watched(Training):
    """Training whose evaluations look into every layer; the figures of an epoch are kept in its checkpoints."""

    def __enter__(self) -> Task:
        task = super().__enter__()

        def evaluate(model: nn.Module) -> dict[str, float]:
            layers = summarize_diagnosis(diagnosis(model, self.data.parts[self.data.task.dev[0]]))["layers"]
            return self.evaluate(model) | {f"{m} {at['name']}": at[m] for m in MEASURES for at in layers if m in at}

        return replace(task, evaluate=evaluate)


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
PUBLISHED_AS = {  # the published code asks transformers for more blocks than the files have
    **{name: PROTOCOL[name] for name in PROTOCOL if name not in ("seed", "cure", "at", "axis", "dual", "norm")},
    "start": "extended",
}
SEARCH = sentences.SEARCH
TABLES: Mapping[str, PaperTable] = {
    "depth": PaperTable(
        "Encoders of growing depth on GLUE's development sets",
        where={},
        groups="task",
        rows=ROWS,
        columns="depth",
        metric="dev",
        row_of=variant,
        choose=("scale",),
        published=PUBLISHED,
        baseline="none",
        protocol={name: value for name, value in (asdict(Config()) | PUBLISHED_AS).items() if name != "scale"},
        free=("identity", "padding", "holdout", "uniform_on"),
        all_groups=True,
    ),
    "rates": PaperTable(
        "The same with other learning rates",
        where={"task": "sst2"},
        groups="depth",
        rows=ROWS,
        columns="lr",
        metric="dev",
        row_of=variant,
        choose=("scale",),
        baseline="none",
    ),
}
SMALL: dict[str, tuple[Any, ...]] = {"model": (MINILM,), "epochs": (3,)}


def _pairs(depths: tuple[int, ...], seed: int) -> tuple[Grid, ...]:
    shared = SMALL | {"depth": depths, "seed": (seed,)}
    return Grid(shared | {"cure": ("none",)}), Grid(shared | {"cure": ("contra_norm",), "scale": (0.2,)})


GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "sst2": (*_pairs((24, 48), 0), *_pairs((12,), 0), *_pairs((12, 24, 48), 1), *_pairs((72,), 0)),
    "sst2-rates": (
        Grid(SMALL | {"depth": (24,), "cure": ("none",), "lr": (1e-4, 2e-4)}),
        Grid(SMALL | {"depth": (48,), "cure": ("none",), "lr": (1e-4,)}),
    ),
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
    search=SEARCH,
    fingerprint=data_fingerprint,
)
