"""Configuration, images and model of the recipe `vit`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, reset_idle
from uncollapse.lab.data.image import image_sets
from uncollapse.lab.data.image.image_source import Images, ImageSet, split_images
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.vit import start_weights
from uncollapse.lab.experiments.vit.patch_losses import FORMS, WithPatchHead
from uncollapse.lab.experiments.vit.start_weights import SCRATCH
from uncollapse.lab.models import vision_classifier

SPLIT_SEED = 0  # of the images that are held out or left out: the same for every seed of a run
DATA, MODEL, CURE, PATCHES, TRAINING, LOOKS = (  # panels of the help
    "Data",
    "Model",
    "Cure",
    "Patch losses",
    "Training",
    "Augmentation",
)
CURES = ("none", "contra_norm", "attn_scale", "feat_scale")
IDENTITY: Mapping[str, bool | str] = {"no": False, "yes": True, "scale": "scale"}  # as `uc.contra_norm` calls them
OF_CONTRA_NORM = ("at", "scale", "temperature", "identity", "dual", "average", "pre_norm", "learnable", "positive")
OF_LOSSES = {  # settings without effect where a loss has no weight
    "cosine_loss": ("absolute",),
    "contrast_loss": ("contrast_form",),
    "mixing_loss": ("patch_dropout", "mix_twice"),
}


@dataclass(frozen=True)
class Config:
    """Configuration of a run. Settings without effect are reset to their defaults: they do not make another run."""

    data: str = config_field(
        ".", "Folder below --data-root with train/ and val/, or train.npz and val.npz; or a set by name.", group=DATA
    )
    class_list: str = config_field("", "File with the classes to use, one per line; empty: all.", group=DATA)
    examples: int = config_field(0, "Training images, drawn once for all seeds; 0: all.", minimum=0, group=DATA)
    holdout: float = config_field(
        0.0,
        "Share of the training images held out to choose settings on.",
        minimum=0,
        maximum=0.9,
        group=DATA,
    )
    model: str = config_field("deit_tiny_patch16_224", "A vit_… or deit_… of timm.", group=MODEL)
    start: str = config_field(
        SCRATCH,
        "Weights to begin with: scratch, pretrained (timm's), a folder of --save or a file of weights.",
        group=MODEL,
    )
    depth: int = config_field(0, "Number of blocks; 0: the model's own.", minimum=0, group=MODEL)
    width: int = config_field(0, "Width of the residual stream; 0: the model's own.", minimum=0, group=MODEL)
    heads: int = config_field(0, "Attention heads; 0: the model's own.", minimum=0, group=MODEL)
    image: int = config_field(0, "Side of the images in pixels; 0: the model's own.", minimum=0, group=MODEL)
    patch: int = config_field(0, "Side of a patch in pixels; 0: the model's own.", minimum=0, group=MODEL)
    head: int = config_field(
        0, "Outputs of the head; 0: one per class. ContraNorm's code has 1000 for any folder.", minimum=0, group=MODEL
    )
    talking_heads: bool = config_field(False, "Talking-heads attention, as in DiversePatch's code.", group=MODEL)
    teacher: str = config_field(
        "",
        "Distilled models: whose answers are learned, a model of timm with published weights or a folder of --save.",
        group=MODEL,
    )
    init: str = config_field(
        "timm", "Random weights: timm's, or Xavier's for narrow models.", choices=("timm", "xavier"), group=MODEL
    )
    cure: str = config_field("contra_norm", "The cure.", choices=CURES, group=CURE)
    at: str = config_field("norms", "contra_norm: its place; norms is before every norm, as published.", group=CURE)
    scale: float = config_field(0.2, "contra_norm: its scale.", group=CURE)
    temperature: float = config_field(1.0, "contra_norm: its temperature.", minimum=1e-3, group=CURE)
    identity: str = config_field(
        "no",
        "contra_norm: x − s·m, (1 + s)x − s·m, or s·x − s·m with scale.",
        choices=("no", "yes", "scale"),
        group=CURE,
    )
    dual: bool = config_field(False, "contra_norm: both terms of the gradient.", group=CURE)
    average: str = config_field(
        "raw", "contra_norm: unit averages rows of length one.", choices=("raw", "unit"), group=CURE
    )
    pre_norm: bool = config_field(
        False, "contra_norm: rows of length one before the step, as in the published option.", group=CURE
    )
    learnable: bool = config_field(False, "contra_norm: learn one scale per feature.", group=CURE)
    positive: bool = config_field(False, "contra_norm: the learned scale stays positive.", group=CURE)
    cosine_loss: float = config_field(
        0.0, "Weight of DiversePatch's cosine loss; 0: without it.", minimum=0, group=PATCHES
    )
    absolute: bool = config_field(False, "cosine_loss: use absolute values of cosines.", group=PATCHES)
    contrast_loss: float = config_field(
        0.0, "Weight of DiversePatch's contrastive loss; 0: without it.", minimum=0, group=PATCHES
    )
    contrast_form: str = config_field(
        "paper",
        "contrast_loss: against the mean of all patches, of the others, or three-way.",
        choices=FORMS,
        group=PATCHES,
    )
    mixing_loss: float = config_field(
        0.0, "Weight of DiversePatch's mixing loss; 0: without it.", minimum=0, group=PATCHES
    )
    patch_dropout: float = config_field(
        0.2, "mixing_loss: dropout before the patch head.", minimum=0, maximum=0.9, group=PATCHES
    )
    mix_twice: bool = config_field(
        False,
        "mixing_loss: CutMix first, then a box of whole patches of another image, as in DiversePatch's code.",
        group=PATCHES,
    )
    epochs: int = config_field(300, "Number of epochs.", minimum=1, group=TRAINING)
    batch: int = config_field(1024, "Images per forward pass.", minimum=1, group=TRAINING)
    accumulate: int = config_field(1, "Forward passes per step.", minimum=1, group=TRAINING)
    lr: float = config_field(1e-3, "Peak learning rate of AdamW, with cosine decay.", minimum=0, group=TRAINING)
    lr_floor: float = config_field(1e-5, "Final learning rate.", minimum=0, group=TRAINING)
    warmup: float | None = config_field(
        None,
        "Epochs of linear warm-up; none: 5, or a tenth of all if that is less.",
        minimum=0,
        group=TRAINING,
    )
    layer_decay: float = config_field(
        1.0, "Factor of the learning rate from one block to the one below.", minimum=0.1, maximum=1, group=TRAINING
    )
    weight_decay: float = config_field(
        0.05, "Weight decay of AdamW, without norms and biases.", minimum=0, group=TRAINING
    )
    decay_positions: bool = config_field(False, "Weight decay also for class tokens and positions.", group=TRAINING)
    clip: float = config_field(0.0, "Largest norm of the gradient; 0: no clipping.", minimum=0, group=TRAINING)
    head_dropout: float = config_field(0.0, "Dropout before the head.", minimum=0, maximum=0.9, group=MODEL)
    drop_path: float = config_field(
        0.1, "Stochastic depth: probability that the last block is dropped.", minimum=0, maximum=0.95, group=MODEL
    )
    crop: str = config_field(
        "resized",
        "Random crops: resized, or padded and shifted.",
        choices=("resized", "padded"),
        group=LOOKS,
    )
    least_area: float = config_field(
        0.08, "crop resized: smallest share of the image.", minimum=0.01, maximum=1, group=LOOKS
    )
    flip: float = config_field(0.5, "Probability of a horizontal flip.", minimum=0, maximum=1, group=LOOKS)
    auto_augment: str = config_field(
        "rand-m9-mstd0.5-inc1", "timm's policy, for example RandAugment's; empty: none.", group=LOOKS
    )
    color_jitter: float = config_field(
        0.3, "Strength of color jitter; without effect with auto_augment.", minimum=0, group=LOOKS
    )
    erasing: float = config_field(0.25, "Probability of random erasing.", minimum=0, maximum=1, group=LOOKS)
    repeats: int = config_field(3, "Repeated augmentation: copies of each image.", minimum=1, group=LOOKS)
    mixup: float = config_field(0.8, "Alpha of Mixup; 0: none.", minimum=0, group=LOOKS)
    cutmix: float = config_field(1.0, "Alpha of CutMix; 0: none.", minimum=0, group=LOOKS)
    mix_chance: float = config_field(1.0, "Probability that a batch is mixed.", minimum=0, maximum=1, group=LOOKS)
    mix_switch: float = config_field(0.5, "Probability of CutMix where both are on.", minimum=0, maximum=1, group=LOOKS)
    smoothing: float = config_field(0.1, "Label smoothing.", minimum=0, maximum=0.9, group=LOOKS)
    ema: float = config_field(
        0.0,
        "Decay of averaged weights, which are then evaluated; 0: none.",
        minimum=0,
        maximum=0.999999,
        group=TRAINING,
    )
    precision: str = config_field("no", "Mixed precision in training.", choices=("no", "bf16", "fp16"), group=TRAINING)
    test_each_epoch: bool = config_field(
        False,
        "Read the test images after every epoch too: test_max is the best of them. The result is still the last one.",
        group=TRAINING,
    )
    seed: int = config_field(
        0, "Seed of weights, order of the images and augmentation.", minimum=0, maximum=2**31, group=TRAINING
    )

    def __post_init__(self) -> None:
        idle = [] if self.cure == "contra_norm" else list(OF_CONTRA_NORM)
        idle += [name for loss, names in OF_LOSSES.items() if not getattr(self, loss) for name in names]
        idle += ["least_area"] if self.crop == "padded" else []
        idle += ["mix_switch"] if not (self.mixup and self.cutmix) else []
        idle += ["mix_chance"] if not (self.mixup or self.cutmix) else []
        idle += ["color_jitter"] if self.auto_augment else []  # timm leaves it out
        reset_idle(self, idle)
        for problem in _contradictions(self):
            raise UsageError(problem)


def _contradictions(config: Config) -> Iterator[str]:
    """Yield a message for each contradiction in the settings."""
    if config.mixing_loss and (config.mixup or not config.cutmix):
        yield (
            f"mixing_loss needs CutMix without Mixup: each patch is of one image. Got mixup {config.mixup:g} and "
            f"cutmix {config.cutmix:g}; take --mixup 0 --cutmix 1."
        )
    if config.positive and not config.learnable:
        yield "positive needs a learned scale; take --learnable as well."
    if config.cure == "attn_scale" and config.talking_heads:
        yield "attn_scale rescales the maps of single heads, which talking_heads mixes; take one of the two."
    if 0 < config.lr < config.lr_floor:
        yield f"lr must be at least lr_floor, got lr {config.lr:g} and lr_floor {config.lr_floor:g}."
    if config.warmup is not None and config.warmup >= config.epochs:
        yield (
            f"warmup must be shorter than the training, epochs={config.epochs}, got {config.warmup:g}; take fewer, "
            f"such as --warmup {config.epochs / 10:g}."
        )


@dataclass(frozen=True)
class Data:
    """The images of a run: train, validation if some are held out, test."""

    set: ImageSet
    parts: Mapping[str, Images]

    @property
    def facts(self) -> dict[str, Any]:
        """Name, fingerprint and sizes for the record of a run."""
        sizes = {name: len(part) for name, part in self.parts.items()}
        return {"name": self.set.name, **self.set.facts, "fingerprint": self.fingerprint(), **sizes}

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change when any split does."""
        return "-".join(part.fingerprint()[:8] for part in self.parts.values())


def load(config: Config, runtime: Runtime) -> Data:
    """Load the images of a run."""
    found = image_sets.load_image_set(config.data, runtime.data_root, config.class_list)
    parts = split_images(found.train, config.examples, config.holdout, SPLIT_SEED)
    return Data(found, parts | {"test": found.test})


def build(config: Config, classes: int, names: tuple[str, ...] = ()) -> WithPatchHead:
    """Return the model before training, with its cure. The random weights of a seed do not depend on the cure.

    names: names of the classes; the head of a saved model with other classes is initialized anew.
    """
    if config.head and config.head < classes:
        raise UsageError(f"The data have {classes} classes, got head {config.head}; take --head {classes} or more.")
    with use_seed(config.seed):
        vit = vision_classifier.build_vit(config.model, config.head or classes, **model_sizes(config))
        model = WithPatchHead(vit, patch_head=config.mixing_loss > 0, dropout=config.patch_dropout)
    cure = {name: getattr(config, name) for name in ("cure", *OF_CONTRA_NORM)}
    if not start_weights.load_start(vit, config.start, config.model, cure, names):
        vision_classifier.put_cure(vit, config.cure, **cure_options(config))
    return model


def model_sizes(config: Config) -> dict[str, Any]:
    """Return the arguments of `vision_classifier.build_vit`."""
    return {
        "depth": config.depth,
        "embed_dim": config.width,
        "num_heads": config.heads,
        "img_size": config.image,
        "patch_size": config.patch,
        "drop_rate": config.head_dropout,
        "drop_path_rate": config.drop_path,
        "talking_heads": config.talking_heads,
        "init": config.init,
    }


def cure_options(config: Config) -> dict[str, Any]:
    """Return the options of `uc.attach`."""
    if config.cure != "contra_norm":
        return {}
    options = {name: getattr(config, name) for name in OF_CONTRA_NORM}
    return options | {"identity": IDENTITY[config.identity]}
