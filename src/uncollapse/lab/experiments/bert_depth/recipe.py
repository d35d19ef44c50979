"""Train an encoder of any depth on a GLUE task, from scratch or from pretrained blocks: does it collapse, and where?

The record has similarity, effective rank and variances of every layer after each epoch, as the depth figures of
ContraNorm's paper (arXiv 2303.06562).
"""

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
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.glue import config as glue_config
from uncollapse.lab.experiments.glue import recipe as glue_recipe
from uncollapse.lab.experiments.glue.recipe import short_place, variant
from uncollapse.lab.experiments.glue.training import Training, diagnose_split, fit_and_record
from uncollapse.lab.experiments.training_run import record_of, with_threads
from uncollapse.lab.models.text_classifier import build_deepened, build_random
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import round_metrics, summarize_diagnosis
from uncollapse.registry import CURES

NAME = "bert-depth"
WIDTH, HEADS = 128, 2
MEASURES = ("mean_cosine", "effective_rank", "feature_variance", "token_variance")


@dataclass(frozen=True)
class Config(glue_config.Config):
    """Configuration of a run."""

    start: str = config_field(
        "scratch",
        "scratch: random weights; stacked: pretrained blocks, repeated; extended: random blocks after them.",
        choices=("scratch", "stacked", "extended"),
    )
    depth: int = config_field(12, "Number of blocks.", minimum=1)
    width: int = config_field(WIDTH, "scratch: width of the residual stream.", minimum=8)
    heads: int = config_field(HEADS, "scratch: attention heads.", minimum=1)
    task: str = config_field("sst2", "A task of GLUE, or a folder with your own train.tsv and dev.tsv.")
    model: str = config_field(
        glue_config.BERT, "Encoder whose architecture and tokenizer are taken, and weights unless start is scratch."
    )
    examples: int = config_field(10_000, "Training examples, drawn once for all seeds; 0: all.", minimum=0)
    max_length: int = config_field(64, "Largest number of tokens in an example.", minimum=8)
    lr: float = config_field(5e-4, "Peak learning rate of AdamW; it decays linearly.", minimum=0)
    warmup: float = config_field(0.1, "Share of the steps for linear warm-up.", minimum=0, maximum=0.9)
    weight_decay: float = config_field(0.01, "Weight decay of AdamW, without norms and biases.", minimum=0)
    clip: float = config_field(1.0, "Largest norm of the gradient; 0: no clipping.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "scratch" and self.width % self.heads:
            raise UsageError(f"width must be a multiple of heads, got {self.width} and {self.heads}.")
        if self.start != "scratch" and (self.width, self.heads) != (WIDTH, HEADS):
            raise UsageError(f"With start {self.start}, width and heads are the pretrained model's; leave them out.")


def build(config: Config, origin: Origin, task: GlueTask) -> nn.Module:
    """Return the model before training, with the outputs that its task needs."""
    labels = task.outputs
    with use_seed(config.seed):
        if config.start == "scratch":
            model = build_random(origin, labels, depth=config.depth, width=config.width, heads=config.heads)
        else:
            model = build_deepened(origin, labels, config.depth, repeated=config.start == "stacked")
    glue_config.put_cure(model, config)
    return model


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train an encoder; return it in evaluation mode, and the record of the run."""
    model, data = glue_config.prepare(config, runtime, build)
    history, record = fit_and_record(NAME, _LayerwiseTraining(model, config, data), runtime)
    before = record["diagnosis"]["before"]["layers"]
    record["layers"] = _measures_by_epoch(before, [round_metrics(each) for each in history.epochs])
    saved_models.save_text_model(runtime, model, data.tokenizer, config, data.task.labels)
    return model, record


run = record_of(train)


class _LayerwiseTraining(Training):
    """Training whose evaluations measure every layer; checkpoints contain these metrics."""

    def __enter__(self) -> Task:
        task = super().__enter__()

        def evaluate(model: nn.Module) -> dict[str, float]:
            layers = summarize_diagnosis(diagnose_split(model, self.data.parts[self.data.task.dev[0]]))["layers"]
            return self.evaluate(model) | {f"{m} {at['name']}": at[m] for m in MEASURES for at in layers if m in at}

        return replace(task, evaluate=evaluate)


def _measures_by_epoch(before: list[dict[str, Any]], epochs: list[dict[str, float]]) -> dict[str, Any]:
    """Return each measure as a table with one row per epoch, the start first, and one column per layer."""
    names = [layer["name"] for layer in before]
    start = {measure: [layer.get(measure) for layer in before] for measure in MEASURES}
    rows = {m: [start[m], *([each.get(f"{m} {name}") for name in names] for each in epochs)] for m in MEASURES}
    return {"names": names, **rows}


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    words = variant(asdict(config)).replace(" ", "-")
    scale = f"-s{config.scale:g}" if config.cure == "contra_norm" else ""
    return f"{short_place(config.task)}-{config.start}-L{config.depth}-{words}{scale}-seed{config.seed}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    if config.start != "scratch":
        return glue_recipe.cost(config, config.depth)
    examples = (1 - config.holdout) * (config.examples or 50_000)
    share = 1.3 if config.cure == "contra_norm" else 1.0
    return 10 + config.epochs * examples / 32 * config.depth * 3e-3 * share * (config.width / 128)


DATA = recipe_data.read(__package__, Config, row_of=variant)
RECIPE = Recipe(
    name=NAME,
    title="An encoder of any depth on a task of GLUE, with or without ContraNorm, measured layer by layer",
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
