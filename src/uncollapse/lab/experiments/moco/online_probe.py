"""The linear evaluation of MoCo: a classifier on a frozen encoder that sees new crops of the pictures in each epoch."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.config.fields import config_field
from uncollapse.lab.data.image.augmentation import training_transform
from uncollapse.lab.data.image.image_batches import ImageBatch, ImageBatches, epoch_order
from uncollapse.lab.data.image.image_source import Images
from uncollapse.lab.engine.checkpoints import Checkpoints
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import steps as falling
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions

PROBE = "Linear evaluation"  # panel of the help
FOLDER = "linear"  # of its checkpoints, within those of the run
LEAST_AREA = 0.08  # of its crops
MOMENTUM, SPREAD = 0.9, 0.01  # of its SGD, and of its weights at the start
TOP = 5


@dataclass(frozen=True)
class ProbeConfig:
    """How the classifier is trained. The defaults are MoCo's for ImageNet (arXiv 1911.05722): SGD, nothing decays."""

    probe_epochs: int = config_field(100, "Passes of the linear classifier.", minimum=1, group=PROBE)
    probe_batch: int = config_field(256, "Pictures in a step of it.", minimum=1, group=PROBE)
    probe_lr: float = config_field(30.0, "Its learning rate, whatever the batch.", minimum=0, group=PROBE)
    probe_falls: tuple[float, ...] = config_field(
        (0.6, 0.8), "Shares of its training after which the learning rate falls.", group=PROBE
    )
    probe_drop: float = config_field(0.1, "Factor by which it falls.", minimum=0, maximum=1, group=PROBE)

    def __post_init__(self) -> None:
        if any(not 0 < share < 1 for share in self.probe_falls):
            raise UsageError(f"probe_falls are shares of the training, between 0 and 1, got {self.probe_falls}.")


class OnlineProbe:
    """A linear classifier of the last features before an encoder's output.

    The encoder is frozen and in evaluation mode. The classifier's checkpoints lie in a folder of their own within that
    of the run, so that it goes on where it was stopped.

    Args:
        encoder: whose features are classified.
        config: a run's, with those of `ProbeConfig`.
        pictures: to learn from.
        runtime: of the run.
        experiment: the identity of the run.
    """

    def __init__(self, encoder: Any, config: Any, pictures: Images, runtime: Runtime, experiment: str) -> None:
        self.encoder, self.config, self.pictures = encoder.eval(), config, pictures
        self.layer = encoder.names[-2]
        places = {"checkpoints": runtime.checkpoints, "tracked": runtime.tracker_folder}
        own: dict[str, Any] = {name: at / FOLDER for name, at in places.items() if at is not None}
        self.runtime, self.experiment = replace(runtime, **own), f"{experiment}-{FOLDER}"
        with use_seed(config.seed):
            self.head = nn.Linear(encoder.penultimate, len(pictures.classes))
            nn.init.normal_(self.head.weight, std=SPREAD)
            nn.init.zeros_(self.head.bias)

    def learn(self) -> None:
        """Train the classifier."""
        config = self.config
        total = config.probe_epochs * len(self.batches(1))
        schedule = falling([round(share * total) for share in config.probe_falls], config.probe_drop)
        optimiser = torch.optim.SGD(self.head.parameters(), lr=config.probe_lr, momentum=MOMENTUM)
        task = Task(self.head, optimiser, self.batches, self.loss, schedule=schedule, unit="images")
        settings = TrainingOptions(config.probe_epochs, config.seed, precision=config.precision)
        fit(task, settings, self.runtime, self.experiment)

    def batches(self, epoch: int) -> ImageBatches:
        """Those of an epoch: random crops, mirrored as often as the encoder's views are."""
        seed = 1_000_003 * self.config.seed + epoch
        transform = training_transform(
            self.config.look,
            crop="resized",
            least_area=LEAST_AREA,
            flip=self.config.flip,
            auto_augment="",
            color_jitter=0.0,
            erasing=0.0,
        )
        order = epoch_order(len(self.pictures), seed)
        return ImageBatches(self.pictures, order, self.config.probe_batch, transform, seed, self.runtime.workers)

    def loss(self, head: nn.Module, batch: ImageBatch) -> Tensor:
        """Of the labels of a batch."""
        device = self.head.weight.device
        images = batch.images.to(device).to(memory_format=torch.channels_last)
        with torch.no_grad():
            features = self.encoder.layers(images, (self.layer,))[self.layer].float()
        return F.cross_entropy(head(features), batch.labels.to(device))

    @torch.no_grad()
    def judge(self, features: Tensor, labels: Tensor) -> dict[str, float]:
        """The share of rows (n, d) that are named rightly; "top5" too, where there are more than five classes."""
        logits = self.head(features.to(self.head.weight.device)).float().cpu()
        if not bool(logits.isfinite().all()):
            raise NotFiniteError("The outputs of the linear classifier are not finite; take a smaller probe_lr.")
        right = logits.topk(min(TOP, logits.shape[1])).indices == labels[:, None]
        found = {"top1": float(right[:, 0].float().mean())}
        return found | ({"top5": float(right.any(1).float().mean())} if logits.shape[1] > TOP else {})

    def clear(self) -> None:
        """Remove its checkpoints, once the run is done."""
        if self.runtime.checkpoints is not None:
            Checkpoints(self.runtime.checkpoints, self.experiment).clear()
