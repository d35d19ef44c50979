"""Tiny random models of every family that cures are put into, each with a batch, for tests and the fuzz of `attach`."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .by_hand import DECODER, DISTIL, GPT2, IMAGE, TEXT, timm, transformers

WIDTH, HEADS, BLOCKS = 16, 2, 3


@dataclass(frozen=True)
class Tiny:
    """A model, its batch, and arguments of `attach`: where its blocks are, and all tokens, so that outputs change."""

    model: Any
    batch: dict[str, Any]
    where: dict[str, Any] = field(default_factory=dict)

    def output(self, **changes: Any) -> Tensor:
        """Run the model on its batch."""
        return first(self.model(**{**self.batch, **changes}))


def first(output: Any) -> Tensor:
    """Return the tensor that a model returns, alone or in front of others."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def build(name: str, seed: int = 0, blocks: int = BLOCKS) -> Tiny:
    """Return a model of `MODELS` in evaluation mode, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = MODELS[name](blocks)
    made.model.eval()
    return made


def double(name: str, blocks: int = BLOCKS) -> Tiny:
    """Return the model and its batch in float64."""
    tiny = build(name, blocks=blocks)
    return Tiny(tiny.model.double(), convert(tiny.batch, torch.float64), tiny.where)


def convert(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def text(*sizes: int) -> dict[str, Tensor]:
    """Return token numbers with padding on the right."""
    mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    return {"input_ids": torch.randint(5, 40, mask.shape) * mask, "attention_mask": mask.long()}


def _huggingface(stem: str, config: Mapping[str, Any], blocks: int) -> Tiny:
    key = next(key for key in ("num_hidden_layers", "n_layers", "n_layer") if key in config)
    sizes = {**config, key: blocks, "pad_token_id": 0}
    model = getattr(transformers, f"{stem}Model")(getattr(transformers, f"{stem}Config")(**sizes))
    if "image_size" in config:
        return Tiny(model, {"pixel_values": torch.randn(2, 3, 8, 8)}, {"tokens": "all"})
    return Tiny(model, text(7, 5))


def _timm(blocks: int) -> Tiny:
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": WIDTH, "num_heads": HEADS, "mlp_ratio": 2, "num_classes": 3}
    model = timm.models.vision_transformer.VisionTransformer(**sizes, depth=blocks)
    return Tiny(model, {"x": torch.randn(2, 3, 8, 8)}, {"tokens": "all"})


def _encoder(norm_first: bool, blocks: int) -> Tiny:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    padding = torch.arange(7) >= torch.tensor([7, 5])[:, None]
    return Tiny(model, {"src": torch.randn(2, 7, WIDTH), "src_key_padding_mask": padding})


def _decoder(norm_first: bool, blocks: int) -> Tiny:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 32, norm_first=norm_first), blocks)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    return Tiny(model, {"tgt": torch.randn(7, 2, WIDTH), "memory": torch.randn(4, 2, WIDTH), "tgt_mask": mask})


def _graph(kind: str, options: Mapping[str, Any], blocks: int) -> Tiny:
    import torch_geometric as pyg

    model = getattr(pyg.nn, kind)(8, WIDTH, blocks, 3, **options)
    ring = torch.arange(12)
    edges = torch.stack([ring, (ring + 1) % 6 + 6 * (ring // 6)])  # two rings of six nodes
    edges = torch.cat([edges, edges.flip(0)], 1)
    return Tiny(model, {"x": torch.randn(12, 8), "edge_index": edges, "batch": ring // 6})


class Perceptron(nn.Module):
    """Rows (b, d) or (b, n, d) through linear layers with a residual."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def _perceptron(blocks: int) -> Tiny:
    return Tiny(Perceptron(blocks), {"x": torch.randn(2, 6, WIDTH)}, {"modules": ["layers.*"], "causal": False})


def _cnn(blocks: int) -> Tiny:
    parts = [nn.Conv2d(3 if n == 0 else WIDTH, WIDTH, 3, padding=1) for n in range(blocks)]
    model = nn.Sequential(*(nn.Sequential(part, nn.ReLU()) for part in parts))
    return Tiny(model, {"input": torch.randn(2, 3, 6, 6)}, {"modules": ["*"]})


MODELS: dict[str, Callable[[int], Tiny]] = {
    "bert": functools.partial(_huggingface, "Bert", TEXT),
    "albert": functools.partial(_huggingface, "Albert", {**TEXT, "embedding_size": 8}),
    "distilbert": functools.partial(_huggingface, "DistilBert", DISTIL),
    "gpt2": functools.partial(_huggingface, "GPT2", {**GPT2, "use_cache": False}),
    "llama": functools.partial(_huggingface, "Llama", {**DECODER, "use_cache": False}),
    "hf_vit": functools.partial(_huggingface, "ViT", IMAGE),
    "timm_vit": _timm,
    "encoder": functools.partial(_encoder, False),
    "encoder_pre_norm": functools.partial(_encoder, True),
    "decoder": functools.partial(_decoder, False),
    "decoder_pre_norm": functools.partial(_decoder, True),
    "gcn": functools.partial(_graph, "GCN", {}),
    "gat": functools.partial(_graph, "GAT", {"heads": 2}),
    "mlp": _perceptron,
    "cnn": _cnn,
}
