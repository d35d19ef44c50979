"""Depth from a frozen encoder: what a run is told, its scenes and encoder, how the head is trained and judged."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.io.files import expand_user
from uncollapse.lab.config.fields import config_field
from uncollapse.lab.data.image import depth_maps
from uncollapse.lab.data.image.depth_maps import Scenes, render_scenes
from uncollapse.lab.data.image.image_batches import epoch_order
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task
from uncollapse.lab.experiments.contrastive.config import DATA, MEAN, MODEL, STD, TRAINING
from uncollapse.lab.experiments.depth_probe import saved_encoders
from uncollapse.lab.models.image_encoder import LEAST_SIDE, DepthHead, SmallAlexNet
from uncollapse.lab.runs.results import fingerprint

RANDOM, RENDERED = "random", "rendered"
SIDE, SCENES = 64, 300  # of a random encoder's pictures, and how many are rendered, where it is not said
TINY = 1e-12  # square metres


@dataclass(frozen=True)
class DepthConfig:
    """A run. Settings that it does not need, or that say what their defaults do, get these: they make no other run."""

    start: str = config_field(
        RANDOM,
        f"Folder of an encoder that contrast, circle or moco kept, or {RANDOM}: one that learned nothing.",
        group=MODEL,
    )
    layer: str = config_field("conv5", "The encoder's layer that depths are read from, one with maps.", group=MODEL)
    width: float = config_field(1.0, f"{RANDOM}: factor of the small AlexNet's channels.", minimum=0.001, group=MODEL)
    head_width: int = config_field(64, "Channels of the head.", minimum=1, group=MODEL)
    data: str = config_field(
        "nyu_depth_v2_labeled.mat", f"A labelled .mat file below --data-root, or {RENDERED}: simple rooms.", group=DATA
    )
    examples: int = config_field(
        0, f"Scenes to take, the first ones; 0: all, or {SCENES} rendered ones.", minimum=0, group=DATA
    )
    holdout: float = config_field(
        0.2, "Held back to judge by, as a share: the last ones.", minimum=0.001, maximum=0.9, group=DATA
    )
    side: int = config_field(0, "Side of the pictures in pixels; 0: as the encoder learned.", minimum=0, group=DATA)
    map_side: int = config_field(32, "Side of the depths in pixels.", minimum=1, group=DATA)
    epochs: int = config_field(50, "Passes over the scenes to learn from.", minimum=1, group=TRAINING)
    batch: int = config_field(32, "Scenes in a step.", minimum=2, group=TRAINING)
    lr: float = config_field(1e-3, "Largest learning rate of Adam; it falls along a cosine.", minimum=0, group=TRAINING)
    seed: int = config_field(
        0, "Of the weights and of the order of the scenes.", minimum=0, maximum=2**31, group=TRAINING
    )

    def __post_init__(self) -> None:
        if 0 < self.side < LEAST_SIDE:
            raise UsageError(f"side is 0 or at least {LEAST_SIDE} pixels, got {self.side}.")
        is_default = {
            "width": self.start != RANDOM,
            "side": self.start == RANDOM and self.side == SIDE,
            "examples": self.data == RENDERED and self.examples == SCENES,
        }
        for field in fields(self):
            if is_default.get(field.name):
                object.__setattr__(self, field.name, field.default)


class Start(NamedTuple):
    """A frozen encoder in evaluation mode, the side of its pictures, and digits that change when its weights do."""

    encoder: Any
    side: int
    fingerprint: str


def load_start(config: DepthConfig) -> Start:
    """The encoder that a run looks through."""
    if config.start == RANDOM:
        with use_seed(config.seed):
            encoder: Any = SmallAlexNet(side=config.side or SIDE, width=config.width)
        own = SIDE
    else:
        kept = saved_encoders.load_encoder(config.start)
        encoder, own = kept.encoder, kept.config.side
    encoder.eval().requires_grad_(False)
    return Start(encoder, config.side or own, fingerprint(encoder.state_dict().values()))


def scene_file(config: DepthConfig, runtime: Runtime) -> Path:
    """Where the .mat file is."""
    return expand_user(runtime.data_root or Path()) / expand_user(config.data)


def data_fingerprint(config: DepthConfig, runtime: Runtime) -> str:
    """Digits that change when the scenes or the encoder do."""
    own = (
        fingerprint(render_scenes(2, SIDE, SIDE))
        if config.data == RENDERED
        else depth_maps.file_digest(scene_file(config, runtime))
    )
    return f"{own[:8]}-{load_start(config).fingerprint[:8]}"


def load_scenes(config: DepthConfig, runtime: Runtime, side: int) -> dict[str, Scenes]:
    """The scenes to learn from, "train", and those that judge, "test": the last ones, mostly of other rooms."""
    if config.data == RENDERED:
        scenes = render_scenes(config.examples or SCENES, side, config.map_side)
    else:
        scenes = depth_maps.read_scenes(scene_file(config, runtime), side, config.map_side, config.examples)
    held = round(config.holdout * len(scenes.images))
    train = len(scenes.images) - held
    if held < 1 or train < 2:
        raise UsageError(f"holdout {config.holdout} of {len(scenes.images)} scenes leaves {train} to learn and {held}.")
    return {
        "train": Scenes(*(part[:train] for part in scenes)),
        "test": Scenes(*(part[train:] for part in scenes)),
    }


class DepthTraining:
    """The task of a run: a head that reads depths from a layer of an encoder that stays as it is.

    Depths are learned as deviations from the mean depth of the scenes to learn from, in units of their spread.
    """

    def __init__(self, encoder: Any, config: DepthConfig, parts: Mapping[str, Scenes]) -> None:
        self.encoder, self.config, self.parts = encoder, config, parts
        depths = parts["train"].depths
        self.mean, self.std = float(depths.mean()), float(depths.std())
        if not self.std > 0:
            raise UsageError("All depths to learn from are the same: there is nothing to learn.")
        maps = self.maps(parts["train"].images[:1], torch.device("cpu"))
        if maps.dim() != 4:
            raise UsageError(f"Depths are read from maps, and {config.layer} has none; take a layer before it.")
        if len(depths) % config.batch == 1 and 1 in (maps.shape[-2:].numel(), config.map_side):
            raise UsageError(
                f"An epoch of {len(depths)} scenes ends with a step of one, whose maps have one pixel: too little to "
                f"learn from. Take larger pictures and maps, or another batch than {config.batch}."
            )
        with use_seed(config.seed):
            self.head = DepthHead(maps.shape[1], config.map_side, config.head_width)

    def task(self) -> Task:
        """What is trained, and how."""
        total = self.config.epochs * len(self.batches(1))
        optimiser = torch.optim.Adam(self.head.parameters(), lr=self.config.lr)
        return Task(self.head, optimiser, self.batches, self.loss, self.evaluate, cosine(total), unit="images")

    def batches(self, epoch: int) -> list[Tensor]:
        """Places of the scenes of each step."""
        count = len(self.parts["train"].images)
        order = torch.tensor(epoch_order(count, 1_000_003 * self.config.seed + epoch))
        return list(torch.split(order, self.config.batch))

    def loss(self, head: nn.Module, places: Tensor) -> Tensor:
        """The mean squared error, in units of the spread."""
        train, device = self.parts["train"], places.device
        found = head(self.maps(train.images[places.cpu()], device))
        return F.mse_loss(found.float(), (train.depths[places.cpu()].to(device) - self.mean) / self.std)

    @torch.no_grad()
    def maps(self, images: Tensor, device: torch.device) -> Tensor:
        """What the layer has (b, c, h, w) for pictures (b, 3, side, side) of bytes."""
        name = self.config.layer
        mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (MEAN, STD))
        found: Tensor = self.encoder.to(device).layers((images.to(device) / 255 - mean) / std, (name,))[name]
        return found

    @torch.no_grad()
    def evaluate(self, head: nn.Module) -> dict[str, float]:
        """Errors on the scenes that were held back.

        "mse" is in units of the training depths' spread, and "mse_metres" in square metres. "mean_map_mse" is that of
        the mean of all training depths, pixel by pixel, which sees nothing of a picture; "explained" is the share of
        it that is gone: 1 for the truth.
        """
        head.eval()
        device, test = next(head.parameters()).device, self.parts["test"]
        groups = torch.split(test.images, self.config.batch)
        found = torch.cat([head(self.maps(images, device)).float().cpu() for images in groups]) * self.std + self.mean
        if not bool(found.isfinite().all()):
            raise NotFiniteError("The depths that the head gives are not finite.")
        error = float(F.mse_loss(found, test.depths))
        blind = float((test.depths - self.parts["train"].depths.mean(0)).square().mean())
        unit = self.std**2
        explained = 1 - error / max(blind, TINY)
        return {"mse": error / unit, "mse_metres": error, "mean_map_mse": blind / unit, "explained": explained}
