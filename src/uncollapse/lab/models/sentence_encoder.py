"""Small encoders of sentences: words in, one row a sentence out."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from uncollapse.errors import UsageError
from uncollapse.lab.data.text.vocabulary import PADDING

KINDS = ("gru", "transformer")
POOLINGS = ("mean", "max", "last")
SPREAD = 0.1  # deviation of the embeddings at the start; with torch's, 1, words would stay what they were drawn as
WORDS, OUTPUT = "words", "output"  # the first and the last layer; between them are "block 1", "block 2" and so on


class SentenceEncoder(nn.Module):
    """Embeddings of words, GRUs or blocks of a transformer, a pool over the words, and a linear output.

    Args:
        vocabulary: how many words there are.
        kind: "gru" or "transformer"; the latter has its norms in front and waves for positions, so any length goes.
        embedding: features of a word.
        width: features of a block; of a GRU in both directions half of them each.
        depth: blocks.
        dim: features of the output; 0 has no linear output, the pooled features are it.
        pooling: mean, largest or last state of the words; of a GRU in both directions the last of each.
        bidirectional: GRUs read backwards too.
        heads: of a transformer's attention.
        dropout: of embeddings, and within a transformer.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        kind: str = "gru",
        embedding: int = 256,
        width: int = 256,
        depth: int = 1,
        dim: int = 128,
        pooling: str = "mean",
        bidirectional: bool = False,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        parts = {"gru": 2 if bidirectional else 1, "transformer": 2 * heads}[kind]
        if width % parts:
            raise UsageError(f"The width of this {kind} must be a multiple of {parts}, got {width}.")
        self.kind, self.pooling, self.bidirectional, self.width = kind, pooling, bidirectional, width
        self.embed = nn.Embedding(vocabulary, embedding, padding_idx=PADDING)
        self.dropout = nn.Dropout(dropout)
        if kind == "gru":
            self.enter: nn.Module = nn.Identity()
            sizes = [embedding, *[width] * (depth - 1)]
            gru: dict[str, Any] = {"batch_first": True, "bidirectional": bidirectional}
            self.blocks = nn.ModuleList(nn.GRU(size, width // parts, **gru) for size in sizes)
        else:
            self.enter = nn.Linear(embedding, width)
            block: dict[str, Any] = {"dropout": dropout, "activation": "gelu", "batch_first": True, "norm_first": True}
            # not nn.TransformerEncoder, whose blocks all start from the same weights
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(width, heads, 4 * width, **block) for _ in range(depth)
            )
        self.norm = nn.LayerNorm(width) if kind == "transformer" else nn.Identity()
        self.output = nn.Linear(width, dim) if dim else nn.Identity()
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Small embeddings, and no biases around GRUs and blocks: beside them words would be nothing at the start."""
        self.embed.weight.mul_(SPREAD)
        for module in (self.enter, *self.blocks, self.output):
            if isinstance(module, nn.GRU | nn.Linear):
                for name, parameter in module.named_parameters():
                    if "bias" in name:
                        nn.init.zeros_(parameter)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Numbers of words (b, n) with a mask (b, n), True = a real word -> (b, dim), not of length one yet."""
        return self.layers(ids, mask)[OUTPUT]

    @property
    def features(self) -> str:
        """The layer in front of the output: its pooled rows are what tasks are learnt from."""
        return f"block {len(self.blocks)}"

    def layers(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The pooled rows of all layers by name, (b, d) each: words, block 1, …, output."""
        x = self.dropout(self.embed(ids))
        found = {WORDS: pool(x, mask, "mean")}
        x = self.enter(x)
        if self.kind == "transformer":
            # places are small beside words: the mean of a sentence would else be that of its places, like any other's
            x = x * math.sqrt(self.width) + SPREAD * sinusoids(x)
        for number, block in enumerate(self.blocks, 1):
            x = self._gru(block, x, mask) if self.kind == "gru" else block(x, src_key_padding_mask=~mask)
            last = number == len(self.blocks)
            found[f"block {number}"] = self._pooled(self.norm(x) if last else x, mask)
        return found | {OUTPUT: self.output(found[self.features])}

    def _gru(self, block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(block(packed)[0], batch_first=True, total_length=x.shape[1])
        return states

    def _pooled(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.pooling == "last" and self.bidirectional:
            half = self.width // 2
            return torch.cat([pool(x[..., :half], mask, "last"), x[:, 0, half:]], dim=-1)
        return pool(x, mask, self.pooling)


class Encoders(nn.Module):
    """One encoder for both sentences of a pair or, as in quick-thoughts (arXiv 1803.02893), one for each."""

    def __init__(self, first: SentenceEncoder, second: SentenceEncoder | None = None) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """First and then second sentences of pairs, (2b, n) -> both sides of the pairs, (b, dim) each."""
        if self.second is None:
            x, y = self.first(ids, mask).chunk(2)
        else:
            (ids_x, ids_y), (mask_x, mask_y) = ids.chunk(2), mask.chunk(2)
            x, y = self.first(ids_x, mask_x), self.second(ids_y, mask_y)
        return x, y

    @property
    def features(self) -> str:
        """As of an encoder."""
        return self.first.features

    def layers(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """As of an encoder; of two, their rows one behind the other."""
        found = self.first.layers(ids, mask)
        if self.second is not None:
            more = self.second.layers(ids, mask)
            found = {name: torch.cat([rows, more[name]], dim=-1) for name, rows in found.items()}
        return found


def pool(x: Tensor, mask: Tensor, how: str) -> Tensor:
    """One row of each sequence (b, n, d), from its real words alone."""
    if how == "last":
        return x[torch.arange(len(x), device=x.device), mask.sum(1) - 1]
    if how == "max":
        return x.masked_fill(~mask[..., None], -math.inf).amax(1)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def sinusoids(x: Tensor) -> Tensor:
    """Sines and cosines of the positions (n, d) for rows (b, n, d), d even (https://arxiv.org/abs/1706.03762)."""
    places, half = torch.arange(x.shape[1], device=x.device), x.shape[2] // 2
    rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10_000) / half))
    angles = places[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)
