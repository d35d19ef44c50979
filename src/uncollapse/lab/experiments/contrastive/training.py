"""Train small image encoders on two views of each image, and evaluate their frozen features."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.diagnosis.activations import diagnose_activations
from uncollapse.diagnosis.build import Labels
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.errors import NotFiniteError, UsageError, import_optional
from uncollapse.lab.data.image.augmentation import evaluation_transform, training_transform
from uncollapse.lab.data.image.image_batches import ImageBatch, ImageBatches
from uncollapse.lab.data.image.two_views import MemoryBatches, TwoViews
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import steps as step_schedule
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import History, Task, TrainingOptions
from uncollapse.lab.experiments.contrastive.config import Data, EncoderConfig
from uncollapse.lab.experiments.contrastive.objectives import information_bound
from uncollapse.losses.info_nce import info_nce
from uncollapse.metrics.hypersphere import alignment, uniformity, uniformity_optimum

Labelled = tuple[Tensor, Tensor]  # features (n, d) and labels (n,)
EPOCHS, BATCH, RATE, BETAS = 100, 128, 1e-3, (0.5, 0.999)  # of the paper's linear classifier
MILESTONES, DROP = (60, 80), 0.2  # epochs after which its learning rate is multiplied by this factor
LEAST_AREA = 0.08  # of the random crops that it may be trained on


def linear_probe(
    train: Labelled | Callable[[int], Labelled],
    evaluated: Mapping[str, Labelled],
    seed: int = 0,
    epochs: int = EPOCHS,
) -> dict[str, float]:
    """Return accuracies of a linear classifier trained as in the paper: Adam, 100 epochs, ×0.2 after 60 and 80.

    Args:
        train: Training features and labels, or a function that returns those of an epoch, counted from 0. Wang & Isola
            (arXiv 2005.10242) have new random crops of the images in each epoch.
        evaluated: Features and labels to evaluate on, by name.
        seed: Seed of the weights and of the order.
        epochs: Number of epochs; the milestones scale with it.
    """
    rows_of = train if callable(train) else lambda epoch: train
    features, labels = _check_features(rows_of(0))
    classes = int(labels.max()) + 1
    with use_seed(seed), torch.enable_grad():
        head = nn.Linear(features.shape[1], classes).to(features.device)
        optimizer = torch.optim.Adam(head.parameters(), lr=RATE, betas=BETAS)
        milestones = [at * epochs // EPOCHS for at in MILESTONES]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, DROP)
        for epoch in range(epochs):
            if epoch and callable(train):
                features, labels = _check_features(train(epoch))
            for chosen in torch.split(torch.randperm(len(labels)), BATCH):
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(head(features[chosen]), labels[chosen]))
                optimizer.step()
            schedule.step()
    with torch.no_grad():
        return {name: _accuracy(head(x.float()).argmax(1) == y) for name, (x, y) in evaluated.items()}


def knn_probe(train: Labelled, evaluated: Mapping[str, Labelled], count: int = 5) -> dict[str, float]:
    """Return accuracies of the majority vote of the nearest training rows, by Euclidean distance."""
    features, labels = _check_features(train)
    sklearn: Any = import_optional("sklearn.neighbors", "train")
    if len(labels) < count:
        raise UsageError(f"{count} neighbors need at least {count} training rows, got {len(labels)}.")
    voters = sklearn.KNeighborsClassifier(count, algorithm="brute").fit(features.cpu().numpy(), labels.cpu().numpy())
    return {name: float(voters.score(x.float().cpu().numpy(), y.cpu().numpy())) for name, (x, y) in evaluated.items()}


def _check_features(train: Labelled) -> Labelled:
    features, labels = train[0].detach().float(), train[1]
    if not bool(features.isfinite().all()):
        raise NotFiniteError("The features of the encoder are not finite.")
    return features, labels


def _accuracy(correct: Tensor) -> float:
    return float(correct.float().mean())


PENULTIMATE, OUTPUT = "fc7", "output"
EVALUATION_BATCH = 500  # images per batch
CROPS = {"centre": "resized", "whole": "padded", "published": "published"}  # of `evaluation_transform`, by `judged`
ALPHA, SHARPNESS = 2.0, 2.0  # of the two metrics, whatever the objective has
TEMPERATURES = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)  # candidates for InfoNCE's tightest bound
BASE = 256  # batch size that a learning rate refers to

# Takes the outputs (b, dim) of two views and labels (b,). With several processes it covers all rows ("gathered").
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class EncoderTraining:
    """Training and evaluation of a run.

    Attributes:
        skipped: Number of unreadable images per split. An unreadable training image ("learned") counts each time it
            is drawn, unless the images are held in memory.
    """

    def __init__(self, encoder: nn.Module, config: EncoderConfig, data: Data, runtime: Runtime, loss: Loss) -> None:
        self.encoder = encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.config, self.data, self.runtime, self._loss = config, data, runtime, loss
        self.skipped: dict[str, int] = {}
        self._views: dict[str, TwoViews] = {}

    def task(self) -> Task:
        """Return the task for `fit`: SGD whose learning rate drops tenfold at each of `falls`."""
        config = self.config
        total = config.epochs * len(self.batches(1))
        optimizer = torch.optim.SGD(
            self.encoder.parameters(),
            lr=config.lr * config.batch / BASE,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        schedule = step_schedule([round(fraction * total) for fraction in config.falls], 0.1)
        evaluate = self.evaluate if "validation" in self.data.splits else None  # test images are read at the end
        return Task(self.encoder, optimizer, self.batches, self.loss, evaluate, schedule, "images", "gathered")

    @property
    def views(self) -> TwoViews:
        """Return the views that the encoder is trained on."""
        return self._views_of("learned")

    def batches(self, epoch: int) -> MemoryBatches | ImageBatches:
        """Return the batches of an epoch."""
        if len(self.views) < 2:
            raise UsageError(f"A contrastive loss needs at least two training images, got {len(self.views)}.")
        if self.config.batch > len(self.views):  # the learning rate is scaled to a batch of that size
            raise UsageError(
                f"A batch of {self.config.batch} is larger than the {len(self.views)} training images; "
                f"use a smaller one, for example --batch {max(2, len(self.views) // 8)}."
            )
        whole = self.config.partial_batch and len(self.views) % self.config.batch != 1  # one image has no negatives
        return self.views.batches(1_000_003 * self.config.seed + epoch, self.config.batch, whole)

    def loss(self, encoder: nn.Module, batch: ImageBatch) -> Tensor:
        """Return the loss of a batch, with two new views of each image."""
        device = next(self.encoder.parameters()).device
        first, second = self.views.pair(batch, device)
        both = torch.cat([first, second]).to(memory_format=torch.channels_last)
        x, y = encoder(both).float().chunk(2)
        return self._loss(x, y, batch.labels.to(device))

    def evaluate(self, encoder: nn.Module) -> dict[str, float]:
        """Return alignment and uniformity of the held-out images or, without any, of the test images."""
        x, y = self.pairs(encoder, self.data.measured)
        return hypersphere_metrics(x, y)

    @torch.no_grad()
    def pairs(self, encoder: nn.Module, split: str, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return unit outputs (n, dim) for two random views of each image of a split, the same for every encoder."""
        encoder.eval()
        device = next(encoder.parameters()).device
        views, found = self._views_of(split), []
        if views.in_memory is None:  # unreadable images are counted again
            self.skipped.pop(split, None)
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
    def features(
        self, encoder: Any, split: str, layers: Sequence[str] = (PENULTIMATE, OUTPUT), crops: int | None = None
    ) -> dict[str, Tensor]:
        """Return features (n, d) of some layers for the images of a split, and their "labels".

        Feature maps of convolutions are averaged over the image; outputs have length one. crops: the seed of random
        crops and flips; None shows the images without augmentation.
        """
        encoder.eval()
        device = next(encoder.parameters()).device
        found: dict[str, list[Tensor]] = {name: [] for name in (*layers, "labels")}
        for batch in self._evaluation_batches(split, crops):
            for name, values in encoder.layers(batch.images.to(device), layers).items():
                rows = values.float().mean((-2, -1)) if values.dim() == 4 else values.float()
                found[name].append(F.normalize(rows, dim=-1).cpu() if name == OUTPUT else rows.cpu())
            found["labels"].append(batch.labels)
        return {name: torch.cat(rows) for name, rows in found.items()}

    def probes(self, encoder: nn.Module) -> dict[str, float]:
        """Return validation and test accuracies of a linear probe and of five nearest neighbors, on both layers.

        Without at least two classes there are none.
        """
        if len(self.data.set.train.classes) < 2:
            return {}
        splits = {}
        for split in self.data.splits:
            self.runtime.report_stage(f"encoding the {split} images")
            splits[split] = self.features(encoder, split)
        accuracies: dict[str, float] = {}
        for layer in (OUTPUT, PENULTIMATE):
            self.runtime.report_stage(f"evaluating the features of {layer}")
            labelled = {split: (rows[layer], rows["labels"]) for split, rows in splits.items()}
            train = labelled.pop("train")
            linear = linear_probe(self.probe_rows(encoder, layer, train), labelled)
            for name, found in (("linear", linear), ("knn", knn_probe(train, labelled))):
                accuracies |= {f"{split}_{layer}_{name}": value for split, value in found.items()}
        return accuracies

    def probe_rows(self, encoder: Any, layer: str, train: Labelled) -> Labelled | Callable[[int], Labelled]:
        """Return what a linear probe of a layer is trained on: fixed features, or those of new crops in each epoch."""
        if self.config.judged != "published":
            return train

        def cropped(epoch: int) -> Labelled:
            rows = self.features(encoder, "train", (layer,), crops=epoch)
            return rows[layer], rows["labels"]

        return cropped

    def diagnosis(self, encoder: Any) -> Diagnosis:
        """Diagnose the encoder layer by layer on the images that it is measured on."""
        self.runtime.report_stage("measuring the encoder layer by layer")
        split = self.data.measured
        rows = self.features(encoder, split, encoder.names)
        del rows["labels"]
        return diagnose_activations(
            rows, labels=Labels(model=type(encoder).__name__, data=f"{self.config.data}, {split}")
        )

    def _evaluation_batches(self, split: str, crops: int | None = None) -> Iterator[ImageBatch]:
        """Yield the images of a split; unreadable ones are left out and counted."""
        images, spec = self.data.splits[split], self.config.input_spec
        if crops is None:
            transform = evaluation_transform(spec, crop=CROPS[self.config.judged])
        else:
            transform = training_transform(spec, least_area=LEAST_AREA, flip=self.config.flip)
        skipped, unread = 0, ""
        for batch in ImageBatches(
            images, range(len(images)), EVALUATION_BATCH, transform, crops or 0, self.runtime.workers
        ):
            skipped, unread = skipped + batch.skipped, batch.unread or unread
            if len(batch):
                yield batch
        if skipped == len(images):
            raise UsageError(f"None of the {skipped} {split} images can be read. The last error: {unread}.")
        if skipped:
            self.skipped[split] = skipped

    def _views_of(self, split: str) -> TwoViews:
        if split not in self._views:
            images = self.data.learned if split == "learned" else self.data.splits[split]

            def count(skipped: int) -> None:
                self.skipped[split] = self.skipped.get(split, 0) + skipped

            spec, augmentation = self.config.input_spec, self.config.augmentation
            self._views[split] = TwoViews(images, spec, augmentation, self.runtime.workers, count)
        return self._views[split]


def fit_encoder(training: EncoderTraining, experiment: str) -> History:
    """Train the encoder, unless the config has no epochs. experiment: the identity of its checkpoints."""
    config = training.config
    if not config.epochs:
        return History([], 0, "untrained", 0.0)
    precision: Any = config.precision
    options = TrainingOptions(config.epochs, config.seed, precision=precision)
    return fit(training.task(), options, training.runtime, experiment, asdict(config))


def hypersphere_metrics(x: Tensor, y: Tensor) -> dict[str, float]:
    """Return alignment of two views (n, d) of length one, and the mean of their uniformities."""
    spread = (uniformity(x, SHARPNESS) + uniformity(y, SHARPNESS)) / 2
    return {"alignment": float(alignment(x, y, ALPHA)), "uniformity": float(spread)}


def infonce_metrics(x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the optimum of uniformity, and InfoNCE's tightest bound on the mutual information of two views (n, d)."""
    losses = {tau: float(info_nce(x, y, temperature=tau, symmetric=True)) for tau in TEMPERATURES}
    tightest = min(losses, key=lambda tau: losses[tau])
    return {
        "optimum": uniformity_optimum(x.shape[1], SHARPNESS),
        "information": information_bound(losses[tightest], len(x) - 1),
        "information_temperature": tightest,
    }


def data_facts(data: Data, training: EncoderTraining) -> dict[str, Any]:
    """Return what a record says of its images."""
    return data.facts | {"skipped": training.skipped}
