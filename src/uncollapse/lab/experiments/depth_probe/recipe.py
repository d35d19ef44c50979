"""Recipe depth-probe: how much of a scene's depth the layers of a frozen encoder hold.

A small convolutional head predicts the depth map from a layer. Wang & Isola (arXiv 2005.10242) use NYU-Depth-V2; this
is the labeled part, 1,449 images. The usual split is not in the file, so the last share of it is held out. The unit of
the paper's errors is not known: its numbers are rows of their own, and no verdict compares them with ours.
`--data rendered` needs no file: rooms with a floor, a wall and boxes, which only show that the recipe works.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.image.depth_maps import Scenes
from uncollapse.lab.data.image.image_batches import epoch_order
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.contrastive.config import PIXELS
from uncollapse.lab.experiments.depth_probe.config import (
    RENDERED,
    SCENES,
    SIDE,
    Config,
    data_fingerprint,
    load_frozen_encoder,
    load_scenes,
)
from uncollapse.lab.experiments.training_run import training_record, with_threads
from uncollapse.lab.models.image_encoder import DepthHead
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import round_metrics
from uncollapse.metrics.hypersphere import PAPER

TINY = 1e-12  # square metres
NAME = "depth-probe"


class DepthTraining:
    """Training and evaluation of a head on a layer of an encoder that does not change.

    The head predicts the deviation from the mean depth of the training scenes, in units of their standard deviation.

    Args:
        encoder: Frozen encoder.
        config: Configuration of the run.
        splits: Training and test scenes.
        pixel_stats: Normalisation of the encoder's images, one of `PIXELS`.
    """

    def __init__(
        self, encoder: Any, config: Config, splits: Mapping[str, Scenes], pixel_stats: str = "imagenet"
    ) -> None:
        self.encoder, self.config, self.splits, self.pixel_stats = encoder, config, splits, pixel_stats
        depths = splits["train"].depths
        self.mean, self.std = float(depths.mean()), float(depths.std())
        if not self.std > 0:
            raise UsageError("All training depths are the same: there is nothing to learn.")
        maps = self.maps(splits["train"].images[:1], torch.device("cpu"))
        if maps.dim() != 4:
            raise UsageError(
                f"The layer {config.layer} has no feature maps to predict depths from; use an earlier one."
            )
        if len(depths) % config.batch == 1 and 1 in (maps.shape[-2:].numel(), config.map_side):
            raise UsageError(
                f"The last batch of {len(depths)} scenes has one scene, whose maps have one pixel: too few for batch "
                f"normalization. Use larger images and maps, or another batch than {config.batch}."
            )
        with use_seed(config.seed):
            self.head = DepthHead(maps.shape[1], config.map_side, config.head_width)

    def task(self) -> Task:
        """Return the task for `fit`: Adam with a cosine schedule."""
        total = self.config.epochs * len(self.batches(1))
        optimizer = torch.optim.Adam(self.head.parameters(), lr=self.config.lr)
        return Task(self.head, optimizer, self.batches, self.loss, self.evaluate, cosine(total), unit="images")

    def batches(self, epoch: int) -> list[Tensor]:
        """Return the indices of the scenes of each step of an epoch."""
        count = len(self.splits["train"].images)
        order = torch.tensor(epoch_order(count, 1_000_003 * self.config.seed + epoch))
        return list(torch.split(order, self.config.batch))

    def loss(self, head: nn.Module, indices: Tensor) -> Tensor:
        """Return the mean squared error, in units of the depths' variance."""
        train, device = self.splits["train"], indices.device
        predicted = head(self.maps(train.images[indices.cpu()], device))
        return F.mse_loss(predicted.float(), (train.depths[indices.cpu()].to(device) - self.mean) / self.std)

    @torch.no_grad()
    def maps(self, images: Tensor, device: torch.device) -> Tensor:
        """Return the layer's feature maps (b, c, h, w) of images (b, 3, side, side) of bytes."""
        name = self.config.layer
        mean, std = (torch.tensor(values, device=device)[:, None, None] for values in PIXELS[self.pixel_stats])
        maps: Tensor = self.encoder.to(device).layers((images.to(device) / 255 - mean) / std, (name,))[name]
        return maps

    @torch.no_grad()
    def evaluate(self, head: nn.Module) -> dict[str, float]:
        """Return errors on the test scenes.

        "mse" is in units of the training depths' variance, and "mse_metres" in square metres. "mean_map_mse" is the
        error of the mean training depth of each pixel, which ignores the image; "explained" is the share of it that
        the head removes: 1 for perfect predictions.
        """
        head.eval()
        device, test = next(head.parameters()).device, self.splits["test"]
        groups = torch.split(test.images, self.config.batch)
        scaled = torch.cat([head(self.maps(images, device)).float().cpu() for images in groups])
        predicted = scaled * self.std + self.mean
        if not bool(predicted.isfinite().all()):
            raise NotFiniteError("The depths that the head predicts are not finite.")
        error = float(F.mse_loss(predicted, test.depths))
        baseline = float((test.depths - self.splits["train"].depths.mean(0)).square().mean())
        unit = self.std**2
        explained = 1 - error / max(baseline, TINY)
        return {"mse": error / unit, "mse_metres": error, "mean_map_mse": baseline / unit, "explained": explained}


@with_threads
def run(config: Config, runtime: Runtime) -> dict[str, Any]:
    """Train a head on a frozen encoder. Return the record of the run."""
    runtime.report_stage("reading the scenes")
    frozen = load_frozen_encoder(config)
    splits = load_scenes(config, runtime, frozen.side)
    digest = data_fingerprint(config, runtime)
    training = DepthTraining(frozen.encoder, config, splits, frozen.pixel_stats)
    options = TrainingOptions(config.epochs, config.seed)
    history = fit(training.task(), options, runtime, f"{identity(NAME, config)}-{digest}", asdict(config))
    saved_models.save_weights(runtime, training.head, config)
    sizes = {name: len(scenes.images) for name, scenes in splits.items()}
    depths = round_metrics({"mean_metres": training.mean, "std_metres": training.std})
    return training_record(
        NAME,
        config,
        history,
        ("accelerate",) if config.data == RENDERED else ("accelerate", "h5py"),
        data={"name": config.data, "fingerprint": digest, "side": frozen.side, **sizes, **depths},
        figures=round_metrics(training.evaluate(training.head)),
        pace=round_metrics(history.pace),
    )


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    data, start = (re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("._") for text in (config.data, config.start))
    return f"{data[-40:]}-{start[-50:]}-{config.layer}-seed{config.seed}"


def cost(config: Config) -> float:
    """Return an estimate of a run's seconds on one core."""
    scenes = config.examples or (SCENES if config.data == RENDERED else 1449)
    encoder = 0.03 * ((config.side or SIDE) / 64) ** 2 * config.width**2
    return 10 + config.epochs * scenes * (encoder + 0.01 * (config.map_side / 32) ** 2)


DATA = recipe_data.read(__package__, Config)
RECIPE = Recipe(
    name=NAME,
    title="Depth of scenes, predicted from the layers of a frozen encoder",
    paper=PAPER,
    config=Config,
    run=run,
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    quick=DATA.quick,
    fingerprint=data_fingerprint,
)
