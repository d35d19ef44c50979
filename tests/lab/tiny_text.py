"""Tiny encoders with their tokenizer, and real sentences in the layout of GLUE's files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()
transformers: Any = pytest.importorskip("transformers")
tokenizers: Any = pytest.importorskip("tokenizers")

GOOD = """
a good film with a warm heart
the actors are wonderful and the story is moving
i loved every minute of it
funny, clever and full of life
a wonderful little comedy about growing old
the music is lovely and the pictures are beautiful
this is one of the best films of the year
a moving and honest story about a family
she gives a wonderful performance
the dialogue is clever and the ending is good
i laughed a lot and i loved the songs
a beautiful film, honest and moving
his best work in a long time
the children were delighted, and so was i
good writing, good acting, good fun
a warm and funny story about two old friends
the best thing about the evening was this film
clever from the first minute to the last
we loved the actors and the music
a lovely surprise, funny and honest
the second half is beautiful and moving
it is a delight to see such good actors
full of warm humour and lovely songs
the story is good and the ending is wonderful
an honest film that i loved
she is funny, warm and clever in every scene
one of the most beautiful stories of the year
i was delighted by this clever little film
the best comedy in a long time
it is good to see a film with so much heart
a wonderful evening with wonderful music
the family loved it, and the ending is lovely
"""
BAD = """
a bad film without a heart
the actors are awful and the story is boring
i hated every minute of it
dull, stupid and much too long
a boring little comedy about nothing
the music is terrible and the pictures are ugly
this is one of the worst films of the year
a dull and stupid story about a family
she gives a terrible performance
the dialogue is stupid and the ending is bad
i yawned a lot and i hated the songs
an ugly film, boring and stupid
his worst work in a long time
the children were bored, and so was i
bad writing, bad acting, no fun
a dull and empty story about two old friends
the worst thing about the evening was this film
boring from the first minute to the last
we hated the actors and the music
an awful mess, dull and empty
the second half is ugly and boring
it is a pain to see such bad actors
full of stupid jokes and terrible songs
the story is bad and the ending is awful
an empty film that i hated
she is dull, bored and stupid in every scene
one of the most boring stories of the year
i was bored by this stupid little film
the worst comedy in a long time
it is bad to see a film with so little sense
an awful evening with awful music
the family hated it, and the ending is terrible
"""
SENTENCES: list[tuple[str, int]] = [
    pair
    for good, bad in zip(GOOD.strip().splitlines(), BAD.strip().splitlines(), strict=True)
    for pair in ((good, 1), (bad, 0))
]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tokenizer() -> Any:
    """WordPiece with a word for each word of the sentences, and their letters for all others."""
    split, lower = tokenizers.pre_tokenizers.BertPreTokenizer(), tokenizers.normalizers.BertNormalizer(lowercase=True)
    words = {word for text, _ in SENTENCES for word, _ in split.pre_tokenize_str(lower.normalize_str(text))}
    letters = {letter for word in words for letter in word}
    pieces = (*SPECIAL, *sorted(words | letters), *sorted(f"##{letter}" for letter in letters))
    numbers = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = lower, split
    ends = [(name, numbers[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return transformers.BertTokenizerFast(tokenizer_object=made, model_max_length=64, **names)


def tiny_model(folder: Path, kind: str = "bert", layers: int = 2, width: int = 32) -> Path:
    """Save an encoder with random weights, the same ones each time, and its tokenizer; returns the folder."""
    words = tokenizer()
    shape: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 2}
    shape["initializer_range"] = 0.05  # at so small a width the usual 0.02 makes all sentences alike
    shape |= {"intermediate_size": 2 * width, "vocab_size": len(words), "max_position_embeddings": 64}
    shape |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pad_token_id": words.pad_token_id}
    config: Any = (
        transformers.BertConfig(**shape) if kind == "bert" else transformers.AlbertConfig(embedding_size=16, **shape)
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def write_sst2(folder: Path, sentences: Sequence[tuple[str, int]]) -> Path:
    """SST-2's files below a folder: every fourth pair of sentences is for dev, those before it for training.

    The test file has dev's sentences without their labels. Returns the folder.
    """
    here = folder / "SST-2"
    here.mkdir(parents=True, exist_ok=True)
    is_dev = [number // 2 % 4 == 3 for number in range(len(sentences))]
    parts = {name: [s for s, dev in zip(sentences, is_dev, strict=True) if dev is (name == "dev")] for name in NAMES}
    for name, part in parts.items():
        rows = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in part)]
        (here / f"{name}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    rows = ["index\tsentence", *(f"{number}\t{text}" for number, (text, _) in enumerate(parts["dev"]))]
    (here / "test.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


NAMES = ("train", "dev")
