"""Modules of torch alone: its transformers and recurrent layers, and models as users write them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from .entries import LENGTH, Built, Entry

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), Attention(causal), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class OwnTransformer(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block(causal) for _ in range(3))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x)).relu()


def _layer(norm_first: bool = False) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, norm_first=norm_first)


def _tokens(seed: int) -> Tensor:
    return torch.randn(3 - seed, LENGTH - 2 * seed, WIDTH, generator=torch.Generator().manual_seed(seed))


def _ids(seed: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(5, 100, (3 - seed, LENGTH - 2 * seed), generator=torch.Generator().manual_seed(seed))
    }


def _pair(seed: int) -> dict[str, Tensor]:
    return {"src": _tokens(seed), "tgt": _tokens(seed)[:, 1:]}


def _decode(seed: int) -> dict[str, Any]:
    tgt = _tokens(seed)
    mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
    return {"tgt": tgt, "memory": _tokens(seed), "tgt_mask": mask, "tgt_is_causal": True}


def _image(seed: int) -> Tensor:
    return torch.randn(3 - seed, 16, 8 + 2 * seed, 8 + 2 * seed, generator=torch.Generator().manual_seed(seed))


def _vectors(seed: int) -> Tensor:
    return torch.randn(24 - seed, WIDTH, generator=torch.Generator().manual_seed(seed))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "TransformerEncoder": (lambda: nn.TransformerEncoder(_layer(), 3), _tokens),
    "TransformerEncoder, pre-norm": (lambda: nn.TransformerEncoder(_layer(True), 3, nn.LayerNorm(WIDTH)), _tokens),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 64, batch_first=True), 3),
        _decode,
    ),
    "Transformer": (lambda: nn.Transformer(WIDTH, HEADS, 2, 2, 64, batch_first=True), _pair),
    "own encoder": (lambda: OwnTransformer(False), _ids),
    "own GPT with is_causal": (lambda: OwnTransformer(True), _ids),
    "own residual CNN": (lambda: nn.Sequential(*(Residual() for _ in range(3))), _image),
    "MLP": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))),
        _vectors,
    ),
    "LSTM layers": (lambda: Recurrent(nn.LSTM), _tokens),
    "GRU layers": (lambda: Recurrent(nn.GRU), _tokens),
    "LSTM": (lambda: nn.LSTM(WIDTH, WIDTH, 3, batch_first=True), _tokens),
}


class Recurrent(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def entries(library: str) -> Iterator[Entry]:
    """Yield modules of torch and models as users write them."""
    yield from (Entry(f"torch/{name}", name) for name in MODELS)


def build(library: str, kind: str) -> Built:
    """Build one of them, with two batches."""
    create, batch = MODELS[kind]
    return Built(create().eval(), [batch(0), batch(1)], "input_ids")
