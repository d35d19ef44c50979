"""Train a deep vision transformer of timm on scikit-learn's handwritten digits, with LayerNorm or ContraNorm.

As published for DeiT (arXiv 2303.06562), ContraNorm precedes every LayerNorm. Both models start from the same weights.
Settings were chosen on the validation images; test images are read once, at the end. 48 blocks are far too many for
these images, on purpose: at this depth tokens become similar from block to block.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.attachment.attach import attach
from uncollapse.backbones import torchvision_ops
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import diagnose
from uncollapse.diagnosis.target import Plan
from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.config.fields import config_field, identity
from uncollapse.lab.engine.loop import fit as train_task
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import fingerprint, summarize_diagnosis
from uncollapse.lab.search.variables import Search
from uncollapse.registry import CURES
from uncollapse.tuning.space import Between
from uncollapse.tuning.trial_result import attach_line

NAME = "vit-digits"
Split = Literal["train", "validation", "test"]

SIZES: dict[Split, int] = {"train": 1197, "validation": 300, "test": 300}
SPLIT_SEED = 0  # the split is the same for every seed of a run
NORMS = ("layer", "contra")


@dataclass(frozen=True)
class Config:
    """Configuration of a run.

    The default learning rate is between the best ones of both norms: on the validation images 1e-3 was best for
    LayerNorm and 3e-3 for ContraNorm, which was better at all three.
    """

    norm: str = config_field("contra", "The norm before attention and MLP.", choices=NORMS)
    scale: float = config_field(0.3, "Scale of ContraNorm.")
    depth: int = config_field(48, "Number of blocks.", minimum=1)
    dim: int = config_field(48, "Width.", minimum=1)
    heads: int = config_field(4, "Attention heads.", minimum=1)
    patch: int = config_field(2, "Side of a patch in pixels.", choices=(1, 2, 4))
    mlp_ratio: float = config_field(2.0, "Width of the MLP as a multiple of the width.")
    position_std: float = config_field(0.5, "Initial standard deviation of the position embeddings.")
    epochs: int = config_field(6, "Number of epochs.", minimum=1)
    batch: int = config_field(64, "Images per step.", minimum=1)
    lr: float = config_field(2e-3, "Peak learning rate of AdamW.", minimum=0)
    warmup: float = config_field(
        0.1, "Share of the steps for linear warm-up; a cosine decay follows.", minimum=0, maximum=1
    )
    weight_decay: float = config_field(0.05, "Weight decay of AdamW.")
    clip: float = config_field(1.0, "Largest norm of the gradient.")
    seed: int = config_field(0, "Seed of the weights and of the order of the images.", minimum=0, maximum=2**31)

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise UsageError(f"dim must be a multiple of heads, got {self.dim} and {self.heads}.")

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.epochs * math.ceil(SIZES["train"] / self.batch)


def digits() -> dict[Split, tuple[Tensor, Tensor]]:
    """Return images (n, 1, 8, 8), standardized by the training images, and labels (n,) of each split."""
    bunch: Any = import_optional("sklearn.datasets", "train").load_digits()
    images, labels = torch.from_numpy(bunch.images).float().unsqueeze(1), torch.from_numpy(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    splits = dict(zip(SIZES, torch.split(order, list(SIZES.values())), strict=True))
    deviation, mean = torch.std_mean(images[splits["train"]])
    return {name: ((images[split] - mean) / deviation, labels[split]) for name, split in splits.items()}


def build(config: Config) -> nn.Module:
    """Return the model before training. Both norms get the same weights; the global random state is not changed."""
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
            weight_init="jax",  # Xavier: timm's own, with a standard deviation of 0.02, is far too small at this width
        )
        # A patch is a few gray pixels: its position says more than its content.
        nn.init.normal_(model.pos_embed, std=config.position_std)
    built: nn.Module = model
    if config.norm == "contra":
        attach(built, "contra_norm", scale=config.scale, at="norms", tokens="all")
    return built


def train(config: Config, runtime: Runtime | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model and train it; return it in evaluation mode, and the record of the run."""
    model = build(config)
    return model, fit(model, config, runtime)


run = record_of(train)


def fit(model: nn.Module, config: Config, runtime: Runtime | None = None) -> dict[str, Any]:
    """Train a model that was built already; return the record of the run."""
    return with_threads(partial(_fit, model))(config, runtime)


def _fit(model: nn.Module, config: Config, runtime: Runtime) -> dict[str, Any]:
    splits = digits()
    before = summarize_diagnosis(_diagnose(model, splits["test"][0]))
    options = TrainingOptions(config.epochs, config.seed, clip=config.clip)
    data = fingerprint(tensor for pair in splits.values() for tensor in pair)
    experiment = f"{identity(NAME, config)}-{data}"
    history = train_task(build_task(model, config, splits), options, runtime, experiment, vars(config))
    after = summarize_diagnosis(_diagnose(model, splits["test"][0]))
    saved_models.save_weights(runtime, model, config)
    sizes = {str(name): len(labels) for name, (_, labels) in splits.items()}
    return training_record(
        NAME,
        config,
        history,
        ("timm", "scikit-learn", "accelerate"),
        data={"name": "scikit-learn's digits", "fingerprint": data, **sizes},
        figures={**{name: accuracy(model, *split) for name, split in splits.items()}, "epoch": history.selected},
        diagnosis={"before": before, "after": after},
    )


def build_task(model: nn.Module, config: Config, splits: dict[Split, tuple[Tensor, Tensor]]) -> Task:
    """Return the training of a model on the digits."""
    images, labels = splits["train"]

    def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
        shuffle = torch.Generator().manual_seed(config.seed)
        for _ in range(epoch):  # the seed gives one order after the other
            order = torch.randperm(len(images), generator=shuffle)
        return [(images[rows], labels[rows]) for rows in torch.split(order, config.batch)]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"validation": accuracy(model, *splits["validation"])}

    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True)
    return Task(model, optimizer, batches, loss, evaluate, cosine(config.steps, config.warmup))


def _diagnose(model: nn.Module, images: Tensor) -> Diagnosis:
    return diagnose(model, torch.split(images, 50), plan=Plan(baseline=0))


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy of a model, which is left in evaluation mode."""
    model.eval()
    device = next(model.parameters()).device
    right: Tensor = model(images.to(device)).argmax(1).cpu() == labels
    return float(right.float().mean())


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    scale = f"-s{config.scale:g}" if config.norm == "contra" else ""
    return f"{config.norm}{scale}-depth{config.depth}-seed{config.seed}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    tokens, width = (8 / config.patch) ** 2 / 16, config.dim / 48
    return 0.0066 * config.steps * config.depth * (config.batch / 64) * tokens * width


SEARCH = Search(
    space=(Between("scale", 0.02, 2.0, when={"norm": ("contra",)}),),
    baseline={"norm": "layer"},
    line=lambda config: attach_line("contra_norm", {"scale": config.scale, "at": "norms"}),
)
DATA = recipe_data.read(__package__, Config, prefix="digits_")
RECIPE = Recipe(
    name=NAME,
    title="A deep vision transformer on 1,797 digits of 8×8 pixels, with LayerNorm or ContraNorm",
    paper=CURES["contra_norm"].paper,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    quick=DATA.quick,
    search=SEARCH,
)
