"""A deep vision transformer of timm on scikit-learn's handwritten digits, with LayerNorm or with ContraNorm.

As published for DeiT (arXiv 2303.06562), ContraNorm stands in front of every LayerNorm. The two models start from the
same weights. Settings were chosen on the validation images; test images are read once, at the end.
48 blocks are far too many for these images: that is the point. So deep, tokens grow alike from block to block.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.attachment.attach import attach
from uncollapse.backbones import torchvision_ops
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import Plan, diagnose
from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.config.fields import config_field, identity
from uncollapse.lab.engine.loop import fit as train_task
from uncollapse.lab.engine.runtime import Runtime, use_threads
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.grids import Grid
from uncollapse.lab.runs.results import build_record, fingerprint, round_metrics, summarize_diagnosis
from uncollapse.lab.search.variables import Search
from uncollapse.lab.tables.paper_table import PaperTable
from uncollapse.registry import CURES
from uncollapse.tuning.space import Between
from uncollapse.tuning.trial_result import attach_line

NAME = "vit-digits"
TITLE = "A deep vision transformer on 1,797 digits of 8×8 pixels, with LayerNorm or ContraNorm"
PAPER = CURES["contra_norm"].paper

Part = Literal["train", "validation", "test"]

SIZES: dict[Part, int] = {"train": 1197, "validation": 300, "test": 300}
SPLIT_SEED = 0  # the split is the same for every seed of a run
NORMS = ("layer", "contra")


@dataclass(frozen=True)
class Config:
    """A run.

    The default learning rate lies between the best of both norms: on the validation images 1e-3 was best for LayerNorm
    and 3e-3 for ContraNorm, which was ahead at all three.
    """

    norm: str = config_field("contra", "What stands in front of every block's parts.", choices=NORMS)
    scale: float = config_field(0.3, "Scale of ContraNorm.")
    depth: int = config_field(48, "Blocks.", minimum=1)
    dim: int = config_field(48, "Width.", minimum=1)
    heads: int = config_field(4, "Heads of the attention.", minimum=1)
    patch: int = config_field(2, "Side of a patch in pixels.", choices=(1, 2, 4))
    mlp_ratio: float = config_field(2.0, "Width of the MLP, in widths.")
    position_std: float = config_field(0.5, "Deviation of the position embeddings at the start.")
    epochs: int = config_field(6, "Passes over the training images.", minimum=1)
    batch: int = config_field(64, "Images in a step.", minimum=1)
    lr: float = config_field(2e-3, "Largest learning rate of AdamW.", minimum=0)
    warmup: float = config_field(
        0.1, "Share of the steps in which the learning rate rises; it then falls along a cosine.", minimum=0, maximum=1
    )
    weight_decay: float = config_field(0.05, "Weight decay of AdamW.")
    clip: float = config_field(1.0, "Largest length of the gradient.")
    seed: int = config_field(0, "Of the weights and of the order of the images.", minimum=0, maximum=2**31)

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise UsageError(f"dim must be a multiple of heads, got {self.dim} and {self.heads}.")

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.epochs * math.ceil(SIZES["train"] / self.batch)


def digits() -> dict[Part, tuple[Tensor, Tensor]]:
    """Images (n, 1, 8, 8), standardised by the mean and deviation of the training images, and labels (n,)."""
    bunch: Any = import_optional("sklearn.datasets", "train").load_digits()
    images, labels = torch.from_numpy(bunch.images).float().unsqueeze(1), torch.from_numpy(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    parts = dict(zip(SIZES, torch.split(order, list(SIZES.values())), strict=True))
    deviation, mean = torch.std_mean(images[parts["train"]])
    return {name: ((images[part] - mean) / deviation, labels[part]) for name, part in parts.items()}


def build(config: Config) -> nn.Module:
    """The model at its start. The same seed gives the same weights with both norms; the random state is not touched."""
    torchvision_ops.declare()
    transformer: Any = import_optional("timm.models.vision_transformer", "timm").VisionTransformer
    if config.norm not in NORMS:
        raise ValueError(f"norm must be one of {NORMS}, got {config.norm!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = transformer(
            img_size=8,
            patch_size=config.patch,
            in_chans=1,
            num_classes=10,
            embed_dim=config.dim,
            depth=config.depth,
            num_heads=config.heads,
            mlp_ratio=config.mlp_ratio,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            weight_init="jax",  # Xavier: timm's own, of deviation 0.02, is far too small for so narrow a model
        )
        # A patch is a few grey pixels: where it is says more than what it is.
        nn.init.normal_(model.pos_embed, std=config.position_std)
    built: nn.Module = model
    if config.norm == "contra":
        attach(built, "contra_norm", scale=config.scale, at="norms", tokens="all")
    return built


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model and train it; give it in evaluation mode with the record of the run."""
    model = build(config)
    return model, fit(model, config, runtime)


def fit(model: nn.Module, config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train a model, and give the record of the run."""
    runtime = runtime or Runtime()
    with use_threads(runtime.threads):
        return _fit(model, config, runtime)


def _fit(model: nn.Module, config: Config, runtime: Runtime) -> dict[str, Any]:
    parts = digits()
    before = summarize_diagnosis(_diagnosis(model, parts["test"][0]))
    settings = TrainingOptions(config.epochs, config.seed, clip=config.clip)
    data = fingerprint(tensor for pair in parts.values() for tensor in pair)
    experiment = f"{identity(NAME, config)}-{data}"
    history = train_task(_task(model, config, parts), settings, runtime, experiment, vars(config))
    after = summarize_diagnosis(_diagnosis(model, parts["test"][0]))
    accuracies = {part: accuracy(model, *parts[part]) for part in SIZES}
    saved_models.save_weights(runtime, model, config)
    return build_record(
        NAME,
        config,
        history.seconds,
        ("timm", "scikit-learn", "accelerate"),
        data={"name": "scikit-learn's digits", "fingerprint": data, **SIZES},
        figures={**accuracies, "epoch": history.kept},
        ended=history.ended,
        epochs=[round_metrics(figures) for figures in history.epochs],
        diagnosis={"before": before, "after": after},
    )


def _task(model: nn.Module, config: Config, parts: dict[Part, tuple[Tensor, Tensor]]) -> Task:
    images, labels = parts["train"]

    def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
        shuffle = torch.Generator().manual_seed(config.seed)
        for _ in range(epoch):  # the order of an epoch is the next one that the seed gives
            order = torch.randperm(len(images), generator=shuffle)
        return [(images[chosen], labels[chosen]) for chosen in torch.split(order, config.batch)]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"validation": accuracy(model, *parts["validation"])}

    optimiser = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    return Task(model, optimiser, batches, loss, evaluate, cosine(config.steps, config.warmup))


def _diagnosis(model: nn.Module, images: Tensor) -> Diagnosis:
    return diagnose(model, torch.split(images, 50), plan=Plan(baseline=0))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images that the model names rightly; it is left in evaluation mode."""
    model.eval()
    device = next(model.parameters()).device
    right: Tensor = model(images.to(device)).argmax(1).cpu() == labels
    return float(right.float().mean())


def run(config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train a model, and give the record of the run."""
    return train(config, runtime)[1]


def name_of(config: Config) -> str:
    """What a run is called in the names of files."""
    scale = f"-s{config.scale:g}" if config.norm == "contra" else ""
    return f"{config.norm}{scale}-depth{config.depth}-seed{config.seed}"


def cost(config: Config) -> float:
    """Roughly the seconds of a run on one core."""
    tokens, width = (8 / config.patch) ** 2 / 16, config.dim / 48
    return 0.0066 * config.steps * config.depth * (config.batch / 64) * tokens * width


QUICK: Mapping[str, Any] = {"depth": 12, "epochs": 4}
SEARCH = Search(
    space=(Between("scale", 0.02, 2.0, when={"norm": ("contra",)}),),
    baseline={"norm": "layer"},
    line=lambda config: attach_line("contra_norm", {"scale": config.scale, "at": "norms"}),
)
TABLES: Mapping[str, PaperTable] = {
    "depth": PaperTable(
        "Test accuracy on digits", where={}, groups="dim", rows="norm", columns="depth", choose=("scale",)
    ),
}
GRIDS: Mapping[str, tuple[Grid, ...]] = {
    "depth": (Grid({"norm": NORMS, "depth": (12, 24, 48), "seed": (0, 1, 2)}),),
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
    quick=QUICK,
    search=SEARCH,
)
