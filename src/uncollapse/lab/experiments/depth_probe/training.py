"""Train and evaluate a small head that predicts depth from a layer of a frozen encoder."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.data.image.depth_maps import Scenes
from uncollapse.lab.data.image.image_batches import epoch_order
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task
from uncollapse.lab.experiments.contrastive.config import PIXELS
from uncollapse.lab.experiments.depth_probe.config import Config
from uncollapse.lab.models.image_encoder import DepthHead

TINY = 1e-12  # square metres


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
                f"normalisation. Use larger images and maps, or another batch than {config.batch}."
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
