"""Small encoders of sentences, which map word ids to one row per sentence."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from uncollapse.errors import UsageError
from uncollapse.lab.data.text.running_text import PADDING

KINDS = ("gru", "transformer")
POOLINGS = ("mean", "max", "last")
SPREAD = 0.1  # initial standard deviation of the embeddings; with torch's 1 they would hardly move
WORDS, OUTPUT = "words", "output"  # the first and the last layer; "block 1", "block 2" and so on are between them


class SentenceEncoder(nn.Module):
    """Word embeddings, GRUs or transformer blocks, a pooling over the words, and a linear output.

    Args:
        vocabulary: Number of words.
        kind: "gru" or "transformer". The latter is pre-norm with sinusoidal positions, so any length is allowed.
        embedding: Features of a word.
        width: Features of a block; each direction of a bidirectional GRU has half of them.
        depth: Number of blocks.
        dim: Features of the output; 0: no linear output, the pooled features are the output.
        pooling: "mean", "max" or "last" state of the words; for a bidirectional GRU the last of each direction.
        bidirectional: Whether GRUs read backwards too.
        heads: Attention heads of a transformer.
        dropout: Dropout of embeddings, and within a transformer.
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
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Scale embeddings down and set biases around the blocks to 0: they would drown the words at the start."""
        self.embed.weight.mul_(SPREAD)
        for module in (self.enter, *self.blocks, self.output):
            if isinstance(module, nn.GRU | nn.Linear):
                for name, parameter in module.named_parameters():
                    if "bias" in name:
                        nn.init.zeros_(parameter)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode word ids (b, n) with a mask (b, n), True = a real word, as rows (b, dim), which are not normalized."""
        return self.layers(ids, mask)[OUTPUT]

    @property
    def features(self) -> str:
        """The layer before the output, whose pooled rows are evaluated on tasks."""
        return f"block {len(self.blocks)}"

    def layers(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the pooled rows (b, d) of all layers by name: words, block 1, …, output."""
        x = self.dropout(self.embed(ids))
        found = {WORDS: pool(x, mask, "mean")}
        x = self.enter(x)
        if self.kind == "transformer":
            # positions are small compared with words: else all sentences would have about the same mean
            x = x * math.sqrt(self.width) + SPREAD * sinusoids(x)
        for number, block in enumerate(self.blocks, 1):
            x = self._gru(block, x, mask) if self.kind == "gru" else block(x, src_key_padding_mask=~mask)
            last = number == len(self.blocks)
            found[f"block {number}"] = self._pool_words(self.norm(x) if last else x, mask)
        return found | {OUTPUT: self.output(found[self.features])}

    def _gru(self, block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(block(packed)[0], batch_first=True, total_length=x.shape[1])
        return states

    def _pool_words(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.pooling == "last" and self.bidirectional:
            half = self.width // 2
            return torch.cat([pool(x[..., :half], mask, "last"), x[:, 0, half:]], dim=-1)
        return pool(x, mask, self.pooling)


class Encoders(nn.Module):
    """One encoder for both sentences of a pair, or one for each as in quick-thoughts (arXiv 1803.02893)."""

    def __init__(self, first: SentenceEncoder, second: SentenceEncoder | None = None) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Encode all first and then all second sentences (2b, n) as both sides of the pairs, (b, dim) each."""
        if self.second is None:
            x, y = self.first(ids, mask).chunk(2)
        else:
            (ids_x, ids_y), (mask_x, mask_y) = ids.chunk(2), mask.chunk(2)
            x, y = self.first(ids_x, mask_x), self.second(ids_y, mask_y)
        return x, y

    @property
    def features(self) -> str:
        """The layer before the output."""
        return self.first.features

    def layers(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the pooled rows of all layers by name; those of two encoders are concatenated."""
        found = self.first.layers(ids, mask)
        if self.second is not None:
            more = self.second.layers(ids, mask)
            found = {name: torch.cat([rows, more[name]], dim=-1) for name, rows in found.items()}
        return found


def pool(x: Tensor, mask: Tensor, how: str) -> Tensor:
    """Return one row (b, d) per sequence (b, n, d), from its real words alone."""
    if how == "last":
        return x[torch.arange(len(x), device=x.device), mask.sum(1) - 1]
    if how == "max":
        return x.masked_fill(~mask[..., None], -math.inf).amax(1)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def sinusoids(x: Tensor) -> Tensor:
    """Return sinusoidal positions (n, d) for rows (b, n, d), d even (arXiv 1706.03762)."""
    places, half = torch.arange(x.shape[1], device=x.device), x.shape[2] // 2
    rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10_000) / half))
    angles = places[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)
