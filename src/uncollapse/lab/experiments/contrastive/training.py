"""How small encoders are trained on two views of each picture, and judged: the task, features, figures."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.diagnosis.build import Labels
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import diagnose_activations
from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.data.image.augmentation import evaluation_transform
from uncollapse.lab.data.image.image_batches import ImageBatch, ImageBatches
from uncollapse.lab.data.image.two_views import MemoryBatches, TwoViews
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import steps as falling
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import History, Task, TrainingOptions
from uncollapse.lab.experiments.contrastive import frozen_probe
from uncollapse.lab.experiments.contrastive.config import Data, EncoderConfig
from uncollapse.lab.experiments.contrastive.objectives import information_bound
from uncollapse.losses.info_nce import info_nce
from uncollapse.metrics.hypersphere import alignment, uniformity, uniformity_optimum

PENULTIMATE, OUTPUT = "fc7", "output"
EVALUATION_BATCH = 500  # pictures of a batch that is only judged
ALPHA, SHARPNESS = 2.0, 2.0  # of the two measures, whatever the objective has
TEMPERATURES = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)  # among which InfoNCE's tightest bound is looked for
BASE = 256  # the batch that a learning rate is named for

# of two views' outputs (b, dim) and labels (b,), of all rows where several processes have some: `Task` says "gathered"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class EncoderTraining:
    """The task of a run.

    skipped: pictures that could not be read, by the part that they belong to; those that are "learned" from count each
    time that one came, unless they are held in memory.
    """

    def __init__(self, encoder: nn.Module, config: EncoderConfig, data: Data, runtime: Runtime, loss: Loss) -> None:
        self.encoder = encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.config, self.data, self.runtime, self._loss = config, data, runtime, loss
        self.skipped: dict[str, int] = {}
        self._known: dict[str, TwoViews] = {}

    def task(self) -> Task:
        """What is trained, and how."""
        config = self.config
        total = config.epochs * len(self.batches(1))
        rate = config.lr * config.batch / BASE
        optimiser = torch.optim.SGD(
            self.encoder.parameters(), lr=rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
        schedule = falling([round(share * total) for share in config.falls], 0.1)
        return Task(self.encoder, optimiser, self.batches, self.loss, self.evaluate, schedule, "images", "gathered")

    @property
    def views(self) -> TwoViews:
        """Those that it learns from."""
        return self._of("learned")

    def batches(self, epoch: int) -> MemoryBatches | ImageBatches:
        """Those of an epoch."""
        if len(self.views) < 2:
            raise UsageError(f"Pairs need two pictures to be told apart; there are {len(self.views)} to learn from.")
        if self.config.batch > len(self.views):  # the learning rate is one for a batch of that size
            raise UsageError(
                f"A batch of {self.config.batch} is more than the {len(self.views)} pictures to learn from; "
                f"take a smaller one, such as --batch {max(2, len(self.views) // 8)}."
            )
        return self.views.batches(1_000_003 * self.config.seed + epoch, self.config.batch)

    def loss(self, encoder: nn.Module, batch: ImageBatch) -> Tensor:
        """Of a batch, with two new views of each picture."""
        device = next(self.encoder.parameters()).device
        first, second = self.views.pair(batch, device)
        both = torch.cat([first, second]).to(memory_format=torch.channels_last)
        x, y = encoder(both).float().chunk(2)
        return self._loss(x, y, batch.labels.to(device))

    def evaluate(self, encoder: nn.Module) -> dict[str, float]:
        """Alignment and uniformity of the pictures that were held back."""
        x, y = self.pairs(encoder, "validation")
        return hypersphere_metrics(x, y)

    @torch.no_grad()
    def pairs(self, encoder: nn.Module, part: str, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Outputs (n, dim) of length one for two random views of each picture of a part, the same for every encoder."""
        encoder.eval()
        device = next(encoder.parameters()).device
        views, found = self._of(part), []
        if views.held is None:  # they are counted anew
            self.skipped.pop(part, None)
        with use_seed(seed):
            for batch in views.batches(seed, EVALUATION_BATCH, whole=True):
                if len(batch):
                    pair = views.pair(batch, device)
                    found.append(torch.stack([encoder(view).float().cpu() for view in pair]))
        both = F.normalize(torch.cat(found, 1), dim=-1)
        if not bool(both.isfinite().all()):
            raise NotFiniteError("The encoder's outputs are not finite.")
        return both[0], both[1]

    @torch.no_grad()
    def features(self, encoder: Any, part: str, layers: Sequence[str] = (PENULTIMATE, OUTPUT)) -> dict[str, Tensor]:
        """Rows (n, d) of some layers for the pictures of a part as they are judged, and their "labels".

        Maps of convolutions are averaged over the picture; outputs have length one.
        """
        encoder.eval()
        device = next(encoder.parameters()).device
        found: dict[str, list[Tensor]] = {name: [] for name in (*layers, "labels")}
        for batch in self._readable(part):
            for name, values in encoder.layers(batch.images.to(device), layers).items():
                rows = values.float().mean((-2, -1)) if values.dim() == 4 else values.float()
                found[name].append(F.normalize(rows, dim=-1).cpu() if name == OUTPUT else rows.cpu())
            found["labels"].append(batch.labels)
        return {name: torch.cat(rows) for name, rows in found.items()}

    def probes(self, encoder: nn.Module) -> dict[str, float]:
        """Accuracies on what was held back and on the test pictures: linear and by five neighbours, on both layers.

        None, where there are no classes to tell apart.
        """
        parts = {}
        if len(self.data.set.train.classes) < 2:
            return {}
        for part in ("train", "validation", "test"):
            self.runtime.report_stage(f"looking at the {part} pictures")
            parts[part] = self.features(encoder, part)
        found: dict[str, float] = {}
        for layer in (OUTPUT, PENULTIMATE):
            self.runtime.report_stage(f"judging the features of {layer}")
            labelled = {part: (rows[layer], rows["labels"]) for part, rows in parts.items()}
            train = labelled.pop("train")
            for name, probe in (("linear", frozen_probe.linear_probe), ("knn", frozen_probe.knn_probe)):
                found |= {f"{part}_{layer}_{name}": value for part, value in probe(train, labelled).items()}
        return found

    def diagnosis(self, encoder: Any) -> Diagnosis:
        """Layer by layer, on what was held back: how alike pictures are, and in how many dimensions they differ."""
        self.runtime.report_stage("measuring the encoder layer by layer")
        rows = self.features(encoder, "validation", encoder.names)
        del rows["labels"]
        return diagnose_activations(
            rows, labels=Labels(model=type(encoder).__name__, data=f"{self.config.data}, validation")
        )

    def _readable(self, part: str) -> Iterator[ImageBatch]:
        """The pictures of a part as they are judged; those that cannot be read are left out, and counted."""
        pictures = self.data.parts[part]
        transform = evaluation_transform(
            self.config.look, crop="resized" if self.config.judged == "centre" else "padded"
        )
        skipped, unread = 0, ""
        for batch in ImageBatches(
            pictures, range(len(pictures)), EVALUATION_BATCH, transform, workers=self.runtime.workers
        ):
            skipped, unread = skipped + batch.skipped, batch.unread or unread
            if len(batch):
                yield batch
        if skipped == len(pictures):
            raise UsageError(f"None of the {skipped} {part} pictures can be read. The last was {unread}.")
        if skipped:
            self.skipped[part] = skipped

    def _of(self, part: str) -> TwoViews:
        if part not in self._known:
            self._known[part] = self._views(part)
        return self._known[part]

    def _views(self, part: str) -> TwoViews:
        pictures = self.data.learned if part == "learned" else self.data.parts[part]

        def count(skipped: int) -> None:
            self.skipped[part] = self.skipped.get(part, 0) + skipped

        return TwoViews(pictures, self.config.look, self.config.changes, self.runtime.workers, count)


def fit_encoder(training: EncoderTraining, experiment: str) -> History:
    """Train the encoder, if it is to be trained at all. experiment: what its checkpoints are told apart by."""
    config = training.config
    if not config.epochs:
        return History([], 0, "untrained", 0.0)
    precision: Any = config.precision
    settings = TrainingOptions(config.epochs, config.seed, precision=precision)
    return fit(training.task(), settings, training.runtime, experiment, asdict(config))


def hypersphere_metrics(x: Tensor, y: Tensor) -> dict[str, float]:
    """Alignment and uniformity of two views (n, d) of length one, uniformity being the mean of both views'."""
    spread = (uniformity(x, SHARPNESS) + uniformity(y, SHARPNESS)) / 2
    return {"alignment": float(alignment(x, y, ALPHA)), "uniformity": float(spread)}


def infonce_metrics(x: Tensor, y: Tensor) -> dict[str, float]:
    """More about two views (n, d): the optimum of uniformity, and InfoNCE's tightest bound on their information."""
    losses = {tau: float(info_nce(x, y, temperature=tau, symmetric=True)) for tau in TEMPERATURES}
    tightest = min(losses, key=lambda tau: losses[tau])
    return {
        "optimum": uniformity_optimum(x.shape[1], SHARPNESS),
        "information": information_bound(losses[tightest], len(x) - 1),
        "information_temperature": tightest,
    }


def data_facts(data: Data, training: EncoderTraining) -> dict[str, Any]:
    """What a result says of its pictures."""
    return data.facts | {"skipped": training.skipped}
