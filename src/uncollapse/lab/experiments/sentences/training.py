"""How encoders are trained on neighbouring sentences, and what is measured of them.

The two sentences of a positive pair are neighbours in a document. Each epoch cuts every document into pairs that share
no sentence, beginning with its first or its second one. So no sentence is twice in a batch, where it would be its own
negative; negatives of the same document are left in, as usual.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.errors import NotFiniteError, UsageError
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, batches_by_length
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.sharding import shard_slice
from uncollapse.lab.engine.task import Task
from uncollapse.lab.experiments.contrastive.objectives import objective
from uncollapse.lab.experiments.sentences.config import SPLIT_SEED, Config, Data
from uncollapse.lab.models.sentence_encoder import OUTPUT, Encoders
from uncollapse.metrics.hypersphere import alignment, uniformity

AMONG = 256  # sentences among which a neighbour has to be found
EVALUATION_BATCH = 512  # sentences of a batch that is only judged


def neighbour_pairs(sizes: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Pairs of neighbours (p, 2) that share no sentence, document by document: numbers of sentences.

    They begin with the first sentence of a document or, where the generator says so, with the second.

    >>> pairs(torch.tensor([3, 4])).tolist()
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
    """Numbers of words (2b, n) and their mask: the first sentences of all pairs, then the second ones."""

    ids: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return len(self.ids) // 2


class PairBatches:
    """Batches of pairs, made when they are asked for."""

    def __init__(self, rows: EncodedTexts, groups: Sequence[Tensor]) -> None:
        self.rows, self.groups = rows, groups

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[PairBatch]:
        for group in self.groups:
            made = self.rows.batch(group.T.flatten())
            yield PairBatch(made["input_ids"], made["attention_mask"].bool())

    def after(self, count: int) -> "PairBatches":
        """Those behind the first few."""
        return PairBatches(self.rows, self.groups[count:])

    def share(self, number: int, count: int) -> "PairBatches":
        """Those of one of several processes."""
        return PairBatches(self.rows, [group[shard_slice(len(group), number, count)] for group in self.groups])


class PairTraining:
    """How encoders are trained on pairs, and what is measured of them."""

    def __init__(self, encoders: Encoders, config: Config, data: Data) -> None:
        self.encoders, self.config, self.data = encoders, config, data
        self.steps = data.parts["train"].least // config.batch

    def task(self) -> Task:
        """What `fit` trains."""
        config = self.config
        total = config.epochs * self.steps
        if not total:
            least = self.data.parts["train"].least
            raise UsageError(f"{config.data} has {least} pairs of sentences, too few for batches of {config.batch}.")
        if total < 2:
            raise UsageError(
                "The training has one step, and a cosine down to 0 none to learn in; take smaller batches."
            )
        optimiser = torch.optim.Adam(self.encoders.parameters(), lr=config.lr, fused=True)
        schedule = cosine(total, config.warmup)
        return Task(self.encoders, optimiser, self.batches, self.loss, self.evaluate, schedule, "pairs", "gathered")

    def batches(self, epoch: int) -> PairBatches:
        """Those of an epoch: as many whole ones as there are pairs for, wherever these begin.

        Which sentence of a pair comes first is drawn too: with two encoders each of them learns from both sides.
        """
        generator = torch.Generator().manual_seed(1_000_003 * self.config.seed + epoch)
        part = self.data.parts["train"]
        drawn = neighbour_pairs(part.sizes, generator)
        drawn = drawn[torch.randperm(len(drawn), generator=generator)][: self.steps * self.config.batch]
        turned = torch.rand(len(drawn), generator=generator) < 0.5
        drawn = torch.where(turned[:, None], drawn.flip(1), drawn)
        return PairBatches(part.rows, torch.split(drawn, self.config.batch))

    def loss(self, encoders: nn.Module, batch: PairBatch) -> Tensor:
        """The objective of a batch."""
        device = next(self.encoders.parameters()).device
        x, y = encoders(batch.ids.to(device), batch.mask.to(device))
        return objective(self.config, x.float(), y.float(), gather=True)

    @torch.no_grad()
    def evaluate(self, encoders: nn.Module) -> dict[str, float]:
        """Figures of the held-back documents.

        validation: how often the neighbour is the nearest of 256 sentences, which can be compared across objectives;
        objective: the mean over batches as in training.
        """
        x, y = self.views(encoders)
        whole = list(zip(*(torch.split(side, self.config.batch) for side in (x, y)), strict=True))
        whole = [both for both in whole if len(both[0]) == self.config.batch] or whole
        values = [float(objective(self.config, *both)) for both in whole]
        return {
            "validation": neighbour_accuracy(x, y),
            "objective": sum(values) / len(values),
            "alignment": float(alignment(x, y)),
            "uniformity": float(uniformity(x) + uniformity(y)) / 2,
        }

    def views(self, encoders: nn.Module) -> tuple[Tensor, Tensor]:
        """Both sides of the pairs of the held-back documents, (p, dim) each, in an order drawn once for all runs."""
        part = self.data.parts["validation"]
        drawn = neighbour_pairs(part.sizes)
        drawn = drawn[torch.randperm(len(drawn), generator=torch.Generator().manual_seed(SPLIT_SEED))]
        device = next(self.encoders.parameters()).device
        batches = PairBatches(part.rows, torch.split(drawn, EVALUATION_BATCH // 2))
        found = [encoders(batch.ids.to(device), batch.mask.to(device)) for batch in batches]
        x, y = (torch.cat(side).float().cpu() for side in zip(*found, strict=True))
        return x, y

    @torch.no_grad()
    def layers(self, rows: EncodedTexts, which: Tensor | None = None, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """The pooled rows (n, d) of some layers, or of all, in the order of the sentences, without half precision.

        which: numbers of the sentences; all, if not given.
        """
        self.encoders.eval()
        device = next(self.encoders.parameters()).device
        chosen = torch.arange(len(rows)) if which is None else which
        groups = batches_by_length(rows.lengths[chosen], EVALUATION_BATCH)
        found: dict[str, list[Tensor]] = {}
        for group in groups:
            made = rows.batch(chosen[group])
            layers = self.encoders.layers(made["input_ids"].to(device), made["attention_mask"].bool().to(device))
            for name in names or layers:
                found.setdefault(name, []).append(layers[name].float().cpu())
        back = torch.cat(groups).argsort()
        return {name: _check_finite(torch.cat(each)[back]) for name, each in found.items()}

    def of_task(self, name: str) -> tuple[Tensor, Tensor]:
        """Features and outputs (n, d) of the sentences of a task."""
        features = self.encoders.features
        found = self.layers(self.data.tasks[name][0], names=(features, OUTPUT))
        return found[features], found[OUTPUT]


def neighbour_accuracy(x: Tensor, y: Tensor) -> float:
    """How often y_i is nearer to x_i than any other y among 256 of them, by the angle; a tie is none."""
    right = 0
    x, y = (F.normalize(rows, dim=-1) for rows in (x, y))
    for some, others in zip(torch.split(x, AMONG), torch.split(y, AMONG), strict=True):
        cosines = some @ others.T
        own = cosines.diagonal().clone()
        cosines.fill_diagonal_(-2.0)
        right += int((own > cosines.amax(1)).sum())
    return right / len(x)


def _check_finite(rows: Tensor) -> Tensor:
    if not bool(rows.isfinite().all()):
        raise NotFiniteError("The features of the encoder are not finite. Try a smaller learning rate, or clipping.")
    return rows
