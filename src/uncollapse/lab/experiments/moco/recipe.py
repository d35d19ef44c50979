"""Recipe moco: a ResNet with a momentum encoder and a queue; InfoNCE, alignment and uniformity in any weights.

Section 5 of Wang & Isola (arXiv 2005.10242) on ImageNet-100 with MoCo (arXiv 1911.05722), and on ImageNet with MoCo v2
(arXiv 2003.04297). The evaluation is a linear classifier on the frozen features before the output, trained on new crops
of the images. Settings are compared on held-out images; the test images are read at the end.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError
from uncollapse.lab.config.fields import identity
from uncollapse.lab.data.image.augmentation import training_transform
from uncollapse.lab.data.image.image_batches import ImageBatch, ImageBatches, epoch_order
from uncollapse.lab.data.image.image_source import Images
from uncollapse.lab.engine.checkpoints import Checkpoints
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import epoch_cosine
from uncollapse.lab.engine.schedules import steps as step_schedule
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments import recipe_data
from uncollapse.lab.experiments.contrastive import recipe as contrast
from uncollapse.lab.experiments.contrastive.config import Data, data_fingerprint, data_slug, load_data
from uncollapse.lab.experiments.contrastive.objectives import formula, objective_slug, queue_objective
from uncollapse.lab.experiments.contrastive.training import OUTPUT, EncoderTraining, data_facts, fit_encoder, knn_probe
from uncollapse.lab.experiments.moco.config import MomentumConfig, build_momentum_encoder, cost
from uncollapse.lab.experiments.training_run import record_of, training_record, with_threads
from uncollapse.lab.models.image_encoder import MomentumEncoder
from uncollapse.lab.recipe import Recipe
from uncollapse.lab.runs import saved_models
from uncollapse.lab.runs.results import round_metrics, summarize_diagnosis
from uncollapse.metrics.hypersphere import PAPER

FOLDER = "linear"  # of the classifier's checkpoints, within those of the run
LEAST_AREA = 0.08  # of the classifier's crops
MOMENTUM, INIT_STD = 0.9, 0.01  # of the classifier's SGD and initial weights
TOP = 5
LEAK_BATCHES = 64  # that the leak is measured on
NAME = "moco"
LIBRARIES = (*contrast.LIBRARIES, "timm")
Config = MomentumConfig


class OnlineProbe:
    """Linear classifier on the last features before an encoder's output.

    The encoder is frozen and in evaluation mode. The classifier's checkpoints are in a folder of their own within that
    of the run, so that an interrupted run continues there.

    Args:
        encoder: Encoder whose features are classified.
        config: Configuration of the run.
        images: Training images.
        runtime: Runtime of the run.
        experiment: Identity of the run.
    """

    def __init__(self, encoder: Any, config: MomentumConfig, images: Images, runtime: Runtime, experiment: str) -> None:
        self.encoder, self.config, self.images = encoder.eval(), config, images
        self.layer = encoder.names[-2]
        places = {"checkpoints": runtime.checkpoints, "tracker_folder": runtime.tracker_folder}
        own: dict[str, Any] = {name: folder / FOLDER for name, folder in places.items() if folder is not None}
        self.runtime, self.experiment = replace(runtime, **own), f"{experiment}-{FOLDER}"
        with use_seed(config.seed):
            self.head = nn.Linear(encoder.penultimate, len(images.classes))
            nn.init.normal_(self.head.weight, std=INIT_STD)
            nn.init.zeros_(self.head.bias)

    def fit(self) -> None:
        """Train the classifier."""
        config = self.config
        total = config.probe_epochs * len(self.batches(1))
        schedule = step_schedule([round(fraction * total) for fraction in config.probe_falls], config.probe_drop)
        optimizer = torch.optim.SGD(self.head.parameters(), lr=config.probe_lr, momentum=MOMENTUM)
        task = Task(self.head, optimizer, self.batches, self.loss, schedule=schedule, unit="images")
        precision: Any = config.precision
        options = TrainingOptions(config.probe_epochs, config.seed, precision=precision)
        fit(task, options, self.runtime, self.experiment)

    def batches(self, epoch: int) -> ImageBatches:
        """Return the batches of an epoch: random crops, flipped as often as the encoder's views."""
        seed = 1_000_003 * self.config.seed + epoch
        transform = training_transform(self.config.input_spec, least_area=LEAST_AREA, flip=self.config.flip)
        order = epoch_order(len(self.images), seed)
        return ImageBatches(self.images, order, self.config.probe_batch, transform, seed, self.runtime.workers)

    def loss(self, head: nn.Module, batch: ImageBatch) -> Tensor:
        """Return the cross entropy of a batch."""
        device = self.head.weight.device
        images = batch.images.to(device).to(memory_format=torch.channels_last)
        with torch.no_grad():
            features = self.encoder.layers(images, (self.layer,))[self.layer].float()
        return F.cross_entropy(head(features), batch.labels.to(device))

    @torch.no_grad()
    def evaluate(self, features: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the accuracy "top1" on rows (n, d), and "top5" if there are more than five classes."""
        logits = self.head(features.to(self.head.weight.device)).float().cpu()
        if not bool(logits.isfinite().all()):
            raise NotFiniteError("The outputs of the linear classifier are not finite; use a smaller probe_lr.")
        correct = logits.topk(min(TOP, logits.shape[1])).indices == labels[:, None]
        accuracy = {"top1": float(correct[:, 0].float().mean())}
        return accuracy | ({"top5": float(correct.any(1).float().mean())} if logits.shape[1] > TOP else {})

    def clear(self) -> None:
        """Remove its checkpoints, once the run is done."""
        if self.runtime.checkpoints is not None:
            Checkpoints(self.runtime.checkpoints, self.experiment).clear()


class MomentumTraining(EncoderTraining):
    """Training and evaluation of a run of MoCo; `encoder` is the one with its follower and queue."""

    encoder: MomentumEncoder

    def __init__(self, model: MomentumEncoder, config: MomentumConfig, data: Data, runtime: Runtime) -> None:
        super().__init__(
            model, config, data, runtime, lambda x, y, queue: queue_objective(config, x, y, queue, config.within)
        )
        self.momentum = config

    def task(self) -> Task:
        """Return the task for `fit`. The follower has no gradients, so the optimizer does not change it."""
        task = super().task()
        if self.momentum.schedule == "steps":
            return task
        return replace(task, schedule=epoch_cosine(self.config.epochs, len(self.batches(1))))

    def loss(self, encoder: nn.Module, batch: ImageBatch) -> Tensor:
        """Return the loss of a batch: the encoder gets the first views, the follower the second ones."""
        pair = self.views.pair(batch, self.encoder.queue.device)
        return self._loss(*encoder(*(view.to(memory_format=torch.channels_last) for view in pair)))

    def evaluate(self, encoder: nn.Module) -> dict[str, float]:
        """Return alignment and uniformity of the held-out images, with both views from the encoder."""
        return super().evaluate(encoder.encoder if isinstance(encoder, MomentumEncoder) else encoder)

    @torch.no_grad()
    def leak(self) -> dict[str, float]:
        """Return "leak": how well batch norm statistics mark the partner of a view; 0.5 is not at all, 1 perfectly.

        It is the share of other batches whose keys were normalized with statistics farther from those of the view than
        its partner was, see `marked_share`. An epoch of a single batch has no leak.
        """
        model = copy.deepcopy(self.encoder).train()  # its running statistics change
        queries, keys, places = [], [], []
        with use_seed(self.config.seed):
            for batch in islice(self._later_batches(), LEAK_BATCHES):
                first, second = self.views.pair(batch, model.queue.device)
                order = model.draw_order(len(batch))
                queries.append(batch_statistics(model.encoder, partial(model.queries, first)))
                keys.append(batch_statistics(model.follower, partial(model.keys, second, order)))
                places.append(order.argsort())
        if len(queries) < 2 or len(self.batches(1)) < 2:
            return {}
        return {"leak": marked_share(torch.stack(queries), torch.stack(keys), torch.stack(places))}

    def _later_batches(self) -> Iterator[ImageBatch]:
        """Yield the full batches of some epochs after the training."""
        for epoch in range(self.config.epochs + 1, self.config.epochs + 1 + LEAK_BATCHES):
            yield from (batch for batch in self.batches(epoch) if len(batch) == self.config.batch)

    def accuracies(self, probe: OnlineProbe) -> dict[str, float]:
        """Train the classifier. Return validation and test accuracies, linear and by five nearest neighbors."""
        encoder, layer = self.encoder.encoder, probe.layer
        self.runtime.report_stage("training a linear classifier")
        probe.fit()
        splits = {}
        for split in self.data.splits:
            if split == "train" and not self.momentum.neighbours:
                continue
            self.runtime.report_stage(f"encoding the {split} images")
            splits[split] = self.features(encoder, split, (layer, OUTPUT))
        accuracies: dict[str, float] = {}
        for split in (name for name in splits if name != "train"):
            tops = probe.evaluate(splits[split][layer], splits[split]["labels"])
            accuracies |= {split if name == "top1" else f"{split}_{name}": value for name, value in tops.items()}
        if not self.momentum.neighbours:
            return accuracies
        for name in (layer, OUTPUT):
            labelled = {split: (rows[name], rows["labels"]) for split, rows in splits.items()}
            near = knn_probe(labelled.pop("train"), labelled)
            accuracies |= {f"{split}_{name}_knn": value for split, value in near.items()}
        return accuracies


def batch_statistics(encoder: nn.Module, encode: Callable[[], Tensor]) -> Tensor:
    """Return the means (groups, channels) of the inputs of all batch norms of an encoder while it encodes."""
    found: list[Tensor] = []

    def read(_: nn.Module, inputs: tuple[Tensor]) -> None:
        found.append(inputs[0].float().transpose(0, 1).flatten(1).mean(1))

    norms = [module for module in encoder.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(read) for norm in norms]
    try:
        encode()
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(found).view(len(found) // max(1, len(norms)), -1)


def marked_share(queries: Tensor, keys: Tensor, places: Tensor) -> float:
    """Return the share of other batches' keys whose statistics are farther from a query's than its partner's are.

    Args:
        queries: Statistics (n, groups, c) of n batches of first views.
        keys: Statistics (n, groups, c) of their second views.
        places: Place (n, b) of each second view among the groups.
    """
    batches, groups, _ = keys.shape
    batch = torch.arange(batches, device=keys.device).repeat_interleave(groups)
    distances = torch.cdist(_standardize(queries), _standardize(keys))
    sizes = [len(part) for part in places[0].tensor_split(groups)]
    group_of = torch.arange(groups, device=keys.device).repeat_interleave(torch.tensor(sizes, device=keys.device))
    shares = []
    for number, order in enumerate(places):
        rows, own = number * groups + group_of, number * groups + group_of[order]
        partner, rest = distances[rows, own][:, None], distances[rows][:, batch != number]
        shares.append(((rest > partner).double() + 0.5 * (rest == partner)).mean())
    return float(torch.stack(shares).mean())


def _standardize(statistics: Tensor) -> Tensor:
    """Return rows (n · groups, c) with mean 0 and deviation 1 per channel: encoder and follower differ in both."""
    rows = statistics.flatten(0, 1).double()
    return (rows - rows.mean(0)) / rows.std(0).clamp(min=torch.finfo(torch.float32).tiny)


@with_threads
def train(config: Config, runtime: Runtime) -> tuple[nn.Module, dict[str, Any]]:
    """Train an encoder. Return it in evaluation mode, without its follower, with the record of the run."""
    runtime.report_stage("reading the images")
    data = load_data(config, runtime)
    training = MomentumTraining(build_momentum_encoder(config), config, data, runtime)
    experiment = f"{identity(NAME, config)}-{data.fingerprint()}"
    history = fit_encoder(training, experiment)
    encoder = training.encoder.encoder
    saved_models.save_weights(runtime, encoder, config)
    diagnosis = summarize_diagnosis(training.diagnosis(encoder))
    probe = OnlineProbe(encoder, config, data.splits["train"], runtime, experiment)
    metrics = training.evaluate(encoder) | training.leak() | training.accuracies(probe)
    probe.clear()
    return encoder, training_record(
        NAME,
        config,
        history,
        LIBRARIES,
        data=data_facts(data, training),
        figures=round_metrics(metrics),
        pace=round_metrics(history.pace),
        diagnosis={"after": diagnosis},
    )


def name_of(config: Config) -> str:
    """Return the readable part of a run's file names."""
    return f"{data_slug(config)}-{config.encoder}-{objective_slug(asdict(config))}-seed{config.seed}"[:120]


DATA = recipe_data.read(__package__, Config, row_of=formula)
RECIPE = Recipe(
    name=NAME,
    title="MoCo: a momentum encoder and a queue, with InfoNCE, alignment and uniformity in any weights",
    paper=PAPER,
    config=Config,
    run=record_of(train),
    name_of=name_of,
    cost=cost,
    tables=DATA.tables,
    grids=DATA.grids,
    presets=DATA.presets,
    quick=DATA.quick,
    fingerprint=data_fingerprint,
    reads_images=True,
)
