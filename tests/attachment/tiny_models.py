"""Tiny random models of every family that cures are put into, each with a batch, for tests and the fuzz of `attach`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, BLOCKS = 16, 4, 3


@dataclass(frozen=True)
class Tiny:
    """A model, its batch, and arguments of `attach`: where its blocks are, and all tokens, so that outputs change."""

    model: nn.Module
    batch: dict[str, Any]
    where: dict[str, Any] = field(default_factory=dict)

    def output(self) -> Tensor:
        """What the model makes of its batch."""
        return first(self.model(**self.batch))


def first(output: Any) -> Tensor:
    """The tensor that a model returns, alone or in front of others."""
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def build(name: str, seed: int = 0, blocks: int = BLOCKS) -> Tiny:
    """A model of `MODELS` in evaluation mode, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = MODELS[name](blocks)
    made.model.eval()
    return made


def _text(sizes: tuple[int, ...] = (7, 5)) -> dict[str, Tensor]:
    """Token numbers with padding on the right."""
    longest = max(sizes)
    mask = torch.arange(longest) < torch.tensor(sizes)[:, None]
    return {"input_ids": torch.randint(5, 50, (len(sizes), longest)) * mask, "attention_mask": mask.long()}


def _huggingface(config: str, model: str, **options: Any) -> Tiny:
    from uncollapse.backbones import torchvision_ops

    torchvision_ops.declare()
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    if "image_size" in options:
        return Tiny(made, {"pixel_values": torch.randn(2, 3, 8, 8)}, {"tokens": "all"})
    return Tiny(made, _text())


_BERT = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}


def _bert(blocks: int) -> Tiny:
    return _huggingface("BertConfig", "BertModel", **_BERT, num_hidden_layers=blocks)


def _albert(blocks: int) -> Tiny:
    return _huggingface("AlbertConfig", "AlbertModel", **_BERT, num_hidden_layers=blocks, embedding_size=8)


def _distilbert(blocks: int) -> Tiny:
    options = {"dim": WIDTH, "n_layers": blocks, "n_heads": HEADS, "hidden_dim": 32, "vocab_size": 50}
    return _huggingface("DistilBertConfig", "DistilBertModel", **options, max_position_embeddings=16)


def _gpt2(blocks: int) -> Tiny:
    options = {"n_embd": WIDTH, "n_layer": blocks, "n_head": HEADS, "n_positions": 16, "vocab_size": 50}
    return _huggingface("GPT2Config", "GPT2Model", **options, use_cache=False, bos_token_id=1, eos_token_id=1)


def _llama(blocks: int) -> Tiny:
    return _huggingface(
        "LlamaConfig", "LlamaModel", **_BERT, num_hidden_layers=blocks, num_key_value_heads=2, use_cache=False
    )


def _hf_vit(blocks: int) -> Tiny:
    options = {name: value for name, value in _BERT.items() if name not in ("vocab_size", "max_position_embeddings")}
    return _huggingface("ViTConfig", "ViTModel", **options, num_hidden_layers=blocks, image_size=8, patch_size=4)


def _timm_vit(blocks: int) -> Tiny:
    from uncollapse.backbones import torchvision_ops

    torchvision_ops.declare()
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=8, patch_size=4, embed_dim=WIDTH, depth=blocks, num_heads=HEADS, mlp_ratio=2, num_classes=3
    )
    return Tiny(model, {"x": torch.randn(2, 3, 8, 8)}, {"tokens": "all"})


def _encoder(blocks: int, norm_first: bool) -> Tiny:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    padding = torch.arange(7) >= torch.tensor([7, 5])[:, None]
    return Tiny(model, {"src": torch.randn(2, 7, WIDTH), "src_key_padding_mask": padding})


def _decoder(blocks: int, norm_first: bool) -> Tiny:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, norm_first=norm_first)
    model = nn.TransformerDecoder(layer, blocks)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    return Tiny(model, {"tgt": torch.randn(7, 2, WIDTH), "memory": torch.randn(4, 2, WIDTH), "tgt_mask": mask})


def _graph(kind: str, blocks: int, **options: Any) -> Tiny:
    import torch_geometric as pyg

    model = getattr(pyg.nn, kind)(8, WIDTH, blocks, 3, **options)
    ring = torch.arange(12)
    edges = torch.stack([ring, (ring + 1) % 6 + 6 * (ring // 6)])  # two rings of six nodes
    edges = torch.cat([edges, edges.flip(0)], 1)
    return Tiny(model, {"x": torch.randn(12, 8), "edge_index": edges, "batch": ring // 6})


class _Perceptron(nn.Module):
    """Rows through linear layers with a residual."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """(b, d) or (b, n, d)."""
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def _perceptron(blocks: int) -> Tiny:
    return Tiny(_Perceptron(blocks), {"x": torch.randn(2, 6, WIDTH)}, {"modules": ["layers.*"], "causal": False})


def _cnn(blocks: int) -> Tiny:
    parts = [nn.Conv2d(3 if n == 0 else WIDTH, WIDTH, 3, padding=1) for n in range(blocks)]
    model = nn.Sequential(*(nn.Sequential(part, nn.ReLU()) for part in parts))
    return Tiny(model, {"input": torch.randn(2, 3, 6, 6)}, {"modules": ["*"]})


MODELS: dict[str, Callable[[int], Tiny]] = {
    "bert": _bert,
    "albert": _albert,
    "distilbert": _distilbert,
    "gpt2": _gpt2,
    "llama": _llama,
    "hf_vit": _hf_vit,
    "timm_vit": _timm_vit,
    "encoder": lambda blocks: _encoder(blocks, norm_first=False),
    "encoder_pre_norm": lambda blocks: _encoder(blocks, norm_first=True),
    "decoder": lambda blocks: _decoder(blocks, norm_first=False),
    "decoder_pre_norm": lambda blocks: _decoder(blocks, norm_first=True),
    "gcn": lambda blocks: _graph("GCN", blocks),
    "gat": lambda blocks: _graph("GAT", blocks, heads=2),
    "mlp": _perceptron,
    "cnn": _cnn,
}
