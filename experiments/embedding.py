"""Sentences of STS-B and what an encoder makes of them: the mean over real tokens of one of its layers."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.io import hf_models
from uncollapse.io.hf_models import Origin
from uncollapse.lab.data.text import glue
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, batches_by_length, encode
from uncollapse.lab.data.text.glue import Examples
from uncollapse.lab.data.text.glue_files import compute_metrics
from uncollapse.lab.runs.results import round_metrics

ALIKE = 4.0  # pairs with at least this score mean the same
BATCH = 64


def encoder(place: str, *, random_weights: bool = False) -> nn.Module:
    """A model without a head, in float32 and evaluation mode."""
    model, _, _ = hf_models.load_hf_model(Origin(place), random_weights=random_weights, dtype=torch.float32)
    return model.eval()


@dataclass(frozen=True)
class Pairs:
    """Pairs of sentences: all first ones, then all second ones, and the scores of the pairs from 0 to 5."""

    sentences: EncodedTexts
    scores: Tensor

    def __len__(self) -> int:
        return len(self.scores)


def pairs(words: Any, part: str, root: Path, max_length: int) -> Pairs:
    """A part of STS-B from its files, in tokens."""
    found = glue.load_split(glue.TASKS["stsb"], part, root)
    assert found.second is not None
    assert found.labels is not None
    together = Examples([*found.first, *found.second], None, None)
    return Pairs(encode(together, words, max_length, classes=False, cache=None), torch.tensor(found.labels))


def some(data: EncodedTexts, numbers: Tensor) -> EncodedTexts:
    """Some of the sentences, in this order."""
    rows = [torch.arange(*data.starts[number : number + 2].tolist()) for number in numbers.tolist()]
    where, starts = torch.cat(rows), torch.tensor([0, *map(len, rows)]).cumsum(0)
    return EncodedTexts(data.ids[where], starts, None if data.types is None else data.types[where], None, data.padding)


def pooled(tokens: Tensor, mask: Tensor) -> Tensor:
    """The mean (b, d) over the real tokens of (b, n, d), where `mask` (b, n) is not 0."""
    weights = mask.to(tokens.dtype)[..., None]
    return (tokens * weights).sum(1) / weights.sum(1)


@torch.no_grad()
def embed(model: nn.Module, data: EncodedTexts, layers: tuple[int, ...], groups: list[Tensor] | None = None,
          length: int | None = None) -> list[Tensor]:  # fmt: skip
    """Embeddings of all sentences after each of some numbers of blocks, one tensor (sentences, d) each.

    Args:
        model: of transformers; it must be in evaluation mode.
        data: the sentences.
        layers: after how many blocks; −1 is the last.
        groups: sentences that share a batch, all of them; those of about the same length if they are not given.
        length: to which all are filled up; that of the longest in their batch if it is not given.
    """
    groups = batches_by_length(data.lengths, BATCH) if groups is None else groups
    found: list[list[Tensor]] = [[] for _ in layers]
    for numbers in groups:
        batch = data.batch(numbers, length)
        states = model(**batch, output_hidden_states=True).hidden_states
        for kept, layer in zip(found, layers, strict=True):
            kept.append(pooled(states[layer].float(), batch["attention_mask"]))
    back = torch.cat(groups).argsort()
    return [torch.cat(kept)[back] for kept in found]


def quality(embeddings: Tensor, scores: Tensor) -> dict[str, float]:
    """How well pairs that mean the same lie together, how evenly all sentences lie, and both against people's scores.

    Alignment and uniformity are the losses of Wang & Isola on unit rows: lower is better for both.
    """
    first, second = embeddings.chunk(2)
    alike = scores >= ALIKE
    cosines = F.cosine_similarity(first, second).tolist()
    found = {
        "alignment": float(uc.align_loss(first[alike], second[alike])),
        "uniformity": float(uc.uniform_loss(embeddings)),
        "mean_cosine": float(uc.mean_cosine(embeddings)),
    }
    return round_metrics(found | compute_metrics(("spearman", "pearson"), scores.tolist(), cosines))


def data_root(given: Path | None) -> Path:
    """The folder of the data sets: as given, or that of UNCOLLAPSE_DATA."""
    place = given or os.environ.get("UNCOLLAPSE_DATA")
    if not place:
        raise UsageError("Give --data the folder that has GLUE's folders, such as STS-B, or set UNCOLLAPSE_DATA.")
    return Path(place)
