"""Models of sentence-transformers, around a small BERT with a vocabulary of its own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .entries import Built, Entry

KINDS = ("mean pooling", "cls pooling", "dense", "normalize", "static", "cross-encoder", "sparse")
WORDS = "the a cat dog sat ran on under mat tree red blue big small house and then it was very far from here"
TEXTS = (
    ["the cat sat on the mat", "a big dog ran", "it was far from here and then very small"],
    ["a red tree", "blue house"],
)


def entries(library: str) -> Iterator[Entry]:
    """Yield a few pipelines."""
    yield from (Entry(f"sentence_transformers/{kind}", kind) for kind in KINDS)


def build(library: str, kind: str) -> Built:
    """Build a pipeline; its batches are what its own tokenizer gives."""
    import sentence_transformers as st
    from sentence_transformers import models

    with tempfile.TemporaryDirectory() as folder:
        _save_bert(Path(folder))
        if kind == "cross-encoder":
            model: Any = st.CrossEncoder(folder, num_labels=1, device="cpu")
            batches = [dict(model.tokenizer(texts, texts[::-1], padding=True, return_tensors="pt")) for texts in TEXTS]
            return Built(model.eval(), batches, call=lambda m, batch: m(dict(batch)))
        word = models.Transformer(folder)
    tokenizer = word.tokenizer
    modules: list[Any] = [word, models.Pooling(32, "cls" if kind == "cls pooling" else "mean")]
    if kind == "dense":
        modules.append(models.Dense(32, 16))
    if kind == "normalize":
        modules.append(models.Normalize())
    if kind == "static":
        modules = [models.StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=32)]
    if kind == "sparse":
        raise NotImplementedError("a sparse encoder needs a masked language model of its own")
    model = st.SentenceTransformer(modules=modules, device="cpu").eval()
    batches = [dict(model.tokenize(texts)) for texts in TEXTS]
    return Built(model, batches, call=lambda m, batch: m(dict(batch)))


def _save_bert(folder: Path) -> None:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS.split())]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **sizes)).save_pretrained(folder)
