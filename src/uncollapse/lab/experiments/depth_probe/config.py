"""Configuration of depth probes, their scenes, and the frozen encoders that they read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from uncollapse.errors import UsageError
from uncollapse.io.files import expand_user
from uncollapse.io.tensor_files import load_into, weights_of
from uncollapse.lab.config.fields import build, config_field, config_fields, reset_idle
from uncollapse.lab.data.image import depth_maps
from uncollapse.lab.data.image.depth_maps import Scenes, render_scenes
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.contrastive import config as contrastive
from uncollapse.lab.experiments.contrastive.config import DATA, MODEL, TRAINING, EncoderConfig
from uncollapse.lab.experiments.moco import config as moco
from uncollapse.lab.experiments.moco.config import MomentumConfig
from uncollapse.lab.models.image_encoder import LEAST_SIDE, SmallAlexNet
from uncollapse.lab.runs.results import fingerprint
from uncollapse.lab.runs.saved_models import CONFIG, WEIGHTS, read_json

HEAD = "head"  # the classifier that the recipe circle trains with labels


class SavedEncoder(NamedTuple):
    """An encoder in evaluation mode, and the configuration of its run."""

    encoder: Any
    config: EncoderConfig


def load_encoder(folder: str | Path) -> SavedEncoder:
    """Return the encoder that a run with --save wrote in a folder, see `saved_models.save_weights`."""
    folder = expand_user(folder)
    config = _read_config(folder)
    encoder = moco.build_encoder(config) if isinstance(config, MomentumConfig) else contrastive.build_encoder(config)
    path = folder / WEIGHTS
    if not path.is_file():
        raise UsageError(f"{folder} holds no whole model: {WEIGHTS} is missing. Keep the model again.")
    labelled = weights_of(path, encoder).get(f"{HEAD}.weight")
    if labelled is not None and labelled.dim() == 2:
        encoder.add_module(HEAD, nn.Linear(labelled.shape[1], labelled.shape[0]))
    load_into(encoder, path)
    return SavedEncoder(encoder.eval(), config)


def _read_config(folder: Path) -> EncoderConfig:
    """Return the configuration of the run; fields that do not concern the encoder may be of any recipe."""
    found = read_json(folder / CONFIG)
    if not {"dim", "side", "width"} <= found.keys():
        raise UsageError(
            f"{folder} has a saved model of another kind; expected an encoder of contrast, circle or moco."
        )
    kind = MomentumConfig if "ema" in found else EncoderConfig
    known = config_fields(kind)
    config: EncoderConfig = build(kind, {name: value for name, value in found.items() if name in known})
    return config


RANDOM, RENDERED = "random", "rendered"
SIDE, SCENES = 64, 300  # default side of a random encoder's images, and default number of rendered scenes


@dataclass(frozen=True)
class Config:
    """Configuration of a run. Fields without an effect get their defaults, so that they make no other run."""

    start: str = config_field(
        RANDOM,
        f"Folder of an encoder that contrast, circle or moco saved, or {RANDOM}: an untrained one.",
        group=MODEL,
    )
    layer: str = config_field("conv5", "Layer of the encoder that is probed; it must have feature maps.", group=MODEL)
    width: float = config_field(1.0, f"{RANDOM}: factor of the small AlexNet's channels.", minimum=0.001, group=MODEL)
    head_width: int = config_field(64, "Channels of the head.", minimum=1, group=MODEL)
    data: str = config_field(
        "nyu_depth_v2_labeled.mat", f"A labeled .mat file below --data-root, or {RENDERED}: simple rooms.", group=DATA
    )
    examples: int = config_field(
        0, f"Number of scenes, the first ones; 0: all, or {SCENES} rendered ones.", minimum=0, group=DATA
    )
    holdout: float = config_field(
        0.2, "Share of the scenes that is held out for the test, the last ones.", minimum=0.001, maximum=0.9, group=DATA
    )
    side: int = config_field(0, "Side of the images in pixels; 0: as in the encoder's training.", minimum=0, group=DATA)
    map_side: int = config_field(32, "Side of the depth maps in pixels.", minimum=1, group=DATA)
    epochs: int = config_field(50, "Passes over the training scenes.", minimum=1, group=TRAINING)
    batch: int = config_field(32, "Scenes per step.", minimum=2, group=TRAINING)
    lr: float = config_field(1e-3, "Largest learning rate of Adam, with a cosine schedule.", minimum=0, group=TRAINING)
    seed: int = config_field(
        0, "Seed of the weights and of the order of the scenes.", minimum=0, maximum=2**31, group=TRAINING
    )

    def __post_init__(self) -> None:
        if 0 < self.side < LEAST_SIDE:
            raise UsageError(f"side must be 0 or at least {LEAST_SIDE} pixels, got {self.side}.")
        idle = {
            "width": self.start != RANDOM,
            "side": self.start == RANDOM and self.side == SIDE,
            "examples": self.data == RENDERED and self.examples == SCENES,
        }
        reset_idle(self, [name for name, is_idle in idle.items() if is_idle])


class FrozenEncoder(NamedTuple):
    """A frozen encoder in evaluation mode, the side and normalisation of its images, the fingerprint of its weights."""

    encoder: Any
    side: int
    fingerprint: str
    pixel_stats: str = "imagenet"


def load_frozen_encoder(config: Config) -> FrozenEncoder:
    """Return the encoder that a run probes."""
    if config.start == RANDOM:
        with use_seed(config.seed):
            encoder: Any = SmallAlexNet(side=config.side or SIDE, width=config.width)
        side, pixel_stats = SIDE, "imagenet"
    else:
        saved = load_encoder(config.start)
        encoder, side, pixel_stats = saved.encoder, saved.config.side, saved.config.pixel_stats
    encoder.eval().requires_grad_(False)
    return FrozenEncoder(encoder, config.side or side, fingerprint(encoder.state_dict().values()), pixel_stats)


def scene_file(config: Config, runtime: Runtime) -> Path:
    """Return the path of the .mat file."""
    return expand_user(runtime.data_root or Path()) / expand_user(config.data)


def data_fingerprint(config: Config, runtime: Runtime) -> str:
    """Return digits that change when the scenes or the encoder do."""
    if config.data == RENDERED:
        scenes = fingerprint(render_scenes(2, SIDE, SIDE))
    else:
        scenes = depth_maps.file_digest(scene_file(config, runtime))
    return f"{scenes[:8]}-{load_frozen_encoder(config).fingerprint[:8]}"


def load_scenes(config: Config, runtime: Runtime, side: int) -> dict[str, Scenes]:
    """Return the splits "train" and "test". The test scenes are the last ones, mostly of other rooms."""
    if config.data == RENDERED:
        scenes = render_scenes(config.examples or SCENES, side, config.map_side)
    else:
        scenes = depth_maps.read_scenes(scene_file(config, runtime), side, config.map_side, config.examples)
    test = round(config.holdout * len(scenes.images))
    train = len(scenes.images) - test
    if test < 1 or train < 2:
        raise UsageError(
            f"holdout {config.holdout} of {len(scenes.images)} scenes leaves {train} for training and {test} for the "
            "test; at least 2 and 1 are needed."
        )
    return {
        "train": Scenes(*(part[:train] for part in scenes)),
        "test": Scenes(*(part[train:] for part in scenes)),
    }
