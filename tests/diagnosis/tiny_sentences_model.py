"""A tiny SentenceTransformer with random weights and a vocabulary of words, saved as a folder."""

from pathlib import Path
from typing import Any

from uncollapse.backbones import torchvision_ops

WORDS = [*"abcdefghijklmnopqrstuvwxyz", "the", "cat", "dog", "sat", "ran", "on", "mat", "road", "red", "blue", "is"]
TEXTS = [
    f"the {a} {b} {c} on the {d}"
    for a in ("red", "blue")
    for b in ("cat", "dog", "mat", "road")
    for c in ("sat", "ran", "is")
    for d in ("mat", "road", "cat", "dog")
]


def make(folder: Path, **options: Any) -> Any:
    """Return the model, whose encoder and tokenizer were written to a folder."""
    torchvision_ops.declare()
    import sentence_transformers as library
    import torch
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    encoder = Transformer(str(folder))
    return library.SentenceTransformer(modules=[encoder, Pooling(16), Normalize()], device="cpu", **options)
