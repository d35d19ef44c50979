"""Train sentence encoders on neighboring sentences and evaluate them.

The two sentences of a positive pair are neighbors in a document. Each epoch cuts every document into pairs that share
no sentence, starting with its first or its second one. So no sentence occurs twice in a batch, where it would be its
own negative. Negatives may come from the same document, as usual.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError, import_optional
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, batches_by_length
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.sharding import shard_slice
from uncollapse.lab.engine.task import Task
from uncollapse.lab.experiments.contrastive.objectives import objective
from uncollapse.lab.experiments.sentences.config import SPLIT_SEED, Config, Data
from uncollapse.lab.models.sentence_encoder import OUTPUT, Encoders
from uncollapse.metrics.hypersphere import alignment, uniformity

AMONG = 256  # sentences among which a neighbour has to be found
EVALUATION_BATCH = 512  # sentences per batch


def neighbour_pairs(sizes: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return pairs of neighbors (p, 2) that share no sentence, document by document, as sentence indices.

    They start with the first sentence of a document or, where the generator draws so, with the second.

    >>> neighbour_pairs(torch.tensor([3, 4])).tolist()
    [[0, 1], [3, 4], [5, 6]]
    """
    starts = sizes.cumsum(0) - sizes
    if generator is not None:
        starts = starts + torch.randint(2, (len(sizes),), generator=generator) * (sizes > 2)
    ends = sizes.cumsum(0)
    bounds = zip(starts.tolist(), ends.tolist(), strict=True)
    first = torch.cat([torch.arange(start, end - 1, 2) for start, end in bounds])
    return torch.stack([first, first + 1], dim=1)


@dataclass(frozen=True)
class PairBatch:
    """Word ids (2b, n) and their mask: the first sentences of all pairs, then the second ones."""

    ids: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return len(self.ids) // 2


class PairBatches:
    """Batches of pairs, made on iteration."""

    def __init__(self, rows: EncodedTexts, groups: Sequence[Tensor]) -> None:
        self.rows, self.groups = rows, groups

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[PairBatch]:
        for group in self.groups:
            inputs = self.rows.batch(group.T.flatten())
            yield PairBatch(inputs["input_ids"], inputs["attention_mask"].bool())

    def after(self, count: int) -> "PairBatches":
        """Return the batches after the first few."""
        return PairBatches(self.rows, self.groups[count:])

    def share(self, number: int, count: int) -> "PairBatches":
        """Return the shards of one of several processes."""
        return PairBatches(self.rows, [group[shard_slice(len(group), number, count)] for group in self.groups])


class PairTraining:
    """Training and evaluation of a run."""

    def __init__(self, encoders: Encoders, config: Config, data: Data) -> None:
        self.encoders, self.config, self.data = encoders, config, data
        self.steps = data.splits["train"].least // config.batch

    def task(self) -> Task:
        """Return the task for `fit`: Adam with a warm-up and a cosine schedule."""
        config = self.config
        total = config.epochs * self.steps
        if not total:
            least = self.data.splits["train"].least
            raise UsageError(f"{config.data} has {least} pairs of sentences, too few for batches of {config.batch}.")
        if total < 2:
            raise UsageError("The training has one step, whose learning rate a cosine sets to 0; use smaller batches.")
        optimizer = torch.optim.Adam(self.encoders.parameters(), lr=config.lr, fused=True)
        schedule = cosine(total, config.warmup)
        return Task(self.encoders, optimizer, self.batches, self.loss, self.evaluate, schedule, "pairs", "gathered")

    def batches(self, epoch: int) -> PairBatches:
        """Return the batches of an epoch: as many full ones as there are pairs for, wherever these start.

        Which sentence of a pair comes first is random, so that each of two encoders learns from both sides.
        """
        generator = torch.Generator().manual_seed(1_000_003 * self.config.seed + epoch)
        train = self.data.splits["train"]
        drawn = neighbour_pairs(train.sizes, generator)
        drawn = drawn[torch.randperm(len(drawn), generator=generator)][: self.steps * self.config.batch]
        swapped = torch.rand(len(drawn), generator=generator) < 0.5
        drawn = torch.where(swapped[:, None], drawn.flip(1), drawn)
        return PairBatches(train.rows, torch.split(drawn, self.config.batch))

    def loss(self, encoders: nn.Module, batch: PairBatch) -> Tensor:
        """Return the objective of a batch."""
        device = next(self.encoders.parameters()).device
        x, y = encoders(batch.ids.to(device), batch.mask.to(device))
        return objective(self.config, x.float(), y.float(), gather=True)

    @torch.no_grad()
    def evaluate(self, encoders: nn.Module) -> dict[str, float]:
        """Return metrics of the held-out documents.

        "validation" is how often the neighbor is the nearest of 256 sentences, which can be compared across
        objectives. "objective" is the mean over batches as in training.
        """
        x, y = self.views(encoders)
        batches = list(zip(*(torch.split(side, self.config.batch) for side in (x, y)), strict=True))
        batches = [both for both in batches if len(both[0]) == self.config.batch] or batches
        values = [float(objective(self.config, *both)) for both in batches]
        return {
            "validation": neighbour_accuracy(x, y),
            "objective": sum(values) / len(values),
            "alignment": float(alignment(x, y)),
            "uniformity": float(uniformity(x) + uniformity(y)) / 2,
        }

    def views(self, encoders: nn.Module) -> tuple[Tensor, Tensor]:
        """Return both sides (p, dim) of the pairs of the held-out documents, in a random order that all runs share."""
        held_out = self.data.splits["validation"]
        drawn = neighbour_pairs(held_out.sizes)
        drawn = drawn[torch.randperm(len(drawn), generator=torch.Generator().manual_seed(SPLIT_SEED))]
        device = next(self.encoders.parameters()).device
        batches = PairBatches(held_out.rows, torch.split(drawn, EVALUATION_BATCH // 2))
        outputs = [encoders(batch.ids.to(device), batch.mask.to(device)) for batch in batches]
        x, y = (torch.cat(side).float().cpu() for side in zip(*outputs, strict=True))
        return x, y

    @torch.no_grad()
    def layers(self, rows: EncodedTexts, which: Tensor | None = None, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return the pooled rows (n, d) of some layers, or of all, in the order of the sentences, in full precision.

        which: indices of the sentences; all, if not given.
        """
        self.encoders.eval()
        device = next(self.encoders.parameters()).device
        indices = torch.arange(len(rows)) if which is None else which
        groups = batches_by_length(rows.lengths[indices], EVALUATION_BATCH)
        pooled: dict[str, list[Tensor]] = {}
        for group in groups:
            inputs = rows.batch(indices[group])
            layers = self.encoders.layers(inputs["input_ids"].to(device), inputs["attention_mask"].bool().to(device))
            for name in names or layers:
                pooled.setdefault(name, []).append(layers[name].float().cpu())
        order = torch.cat(groups).argsort()
        return {name: _check_finite(torch.cat(each)[order]) for name, each in pooled.items()}

    def task_features(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the features and the outputs (n, d) of the sentences of a task."""
        features = self.encoders.features
        layers = self.layers(self.data.tasks[name][0], names=(features, OUTPUT))
        return layers[features], layers[OUTPUT]


def neighbour_accuracy(x: Tensor, y: Tensor) -> float:
    """Return how often y_i is closer to x_i than any other y among 256 of them, by the angle; a tie does not count."""
    correct = 0
    x, y = (F.normalize(rows, dim=-1) for rows in (x, y))
    for some, others in zip(torch.split(x, AMONG), torch.split(y, AMONG), strict=True):
        cosines = some @ others.T
        own = cosines.diagonal().clone()
        cosines.fill_diagonal_(-2.0)
        correct += int((own > cosines.amax(1)).sum())
    return correct / len(x)


def _check_finite(rows: Tensor) -> Tensor:
    if not bool(rows.isfinite().all()):
        raise NotFiniteError("The features of the encoder are not finite. Try a smaller learning rate, or clipping.")
    return rows


FOLDS, INNER = 10, 3
SEED = 0  # of the folds, which are the same for all runs
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # candidates for the regularization, chosen within the training folds
STEPS, TOLERANCE = 100, 1e-3  # of L-BFGS: weak regularization may need more, but the predictions stay the same


def probe_accuracy(rows: Tensor, labels: Tensor, tests: int = 0, *, threads: int = 1) -> float:
    """Return the accuracy of a logistic regression, on the test split or over ten folds.

    Args:
        rows: Features (n, d), one row per sentence.
        labels: Class indices (n,).
        tests: Number of last sentences that are for the test; 0: ten stratified folds.
        threads: CPU threads.
    """
    x, y = rows.float().numpy(), labels.numpy()
    limits: Any = import_optional("threadpoolctl", "train").threadpool_limits
    with limits(limits=threads), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=import_optional("sklearn.exceptions", "train").ConvergenceWarning)
        if tests:
            return _accuracy(_fit_and_predict(x[:-tests], y[:-tests], x[-tests:]), y[-tests:])
        _check_folds(y)
        folds: Any = import_optional("sklearn.model_selection", "train").StratifiedKFold(
            FOLDS, shuffle=True, random_state=SEED
        )
        found = numpy.empty_like(y)
        for train, test in folds.split(x, y):
            found[test] = _fit_and_predict(x[train], y[train], x[test])
        return _accuracy(found, y)


def standardise(rows: Tensor) -> Tensor:
    """Return rows whose features have mean 0 and standard deviation 1; a constant feature becomes 0.

    No label is used, so all sentences may contribute.
    """
    deviation, mean = torch.std_mean(rows.double(), dim=0)
    return (rows.double() - mean) / torch.where(deviation > 0, deviation, 1.0)


def scale_to_sphere(rows: Tensor) -> Tensor:
    """Return rows of length √d. Unlike with `standardise`, collapsed features stay small."""
    return torch.nn.functional.normalize(rows.double(), dim=-1) * math.sqrt(rows.shape[-1])


def majority_accuracy(labels: Tensor, tests: int = 0) -> float:
    """Return the accuracy of always predicting the most frequent class."""
    of = labels[-tests:] if tests else labels
    most = labels[:-tests].mode().values if tests else labels.mode().values
    return float((of == most).float().mean())


def _fit_and_predict(x: NDArray[Any], y: NDArray[Any], asked: NDArray[Any]) -> NDArray[Any]:
    models, choosing = (import_optional(f"sklearn.{name}", "train") for name in ("linear_model", "model_selection"))
    inner = choosing.StratifiedKFold(INNER, shuffle=True, random_state=SEED)
    model = models.LogisticRegression(max_iter=STEPS, tol=TOLERANCE)
    search = choosing.GridSearchCV(model, {"C": STRENGTHS}, cv=inner)
    answers: NDArray[Any] = search.fit(x, y).predict(asked)
    return answers


def _accuracy(found: NDArray[Any], y: NDArray[Any]) -> float:
    return float((found == y).mean())


def _check_folds(y: NDArray[Any]) -> None:
    counts = numpy.unique(y, return_counts=True)[1]
    if len(counts) < 2 or counts.min() < FOLDS:
        raise UsageError(f"Ten folds need two or more classes with at least {FOLDS} sentences, got {counts.tolist()}.")
