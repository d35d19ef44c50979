"""Vocabulary of the most frequent lower-case words of a text, and sentences as word ids."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch

from uncollapse.errors import UsageError
from uncollapse.lab.data.text.encoded_texts import EncodedTexts

PADDING, UNKNOWN = 0, 1
SPECIAL = ("<padding>", "<unknown>")
APART = re.compile(r"\bn 't\b")  # some collections write does n 't
QUOTES = re.compile(r"``|''|[“”]")
WORD = re.compile(r"\w+(?=n't\b)|n't\b|'(?:s|m|d|ll|re|ve)\b|\w+|[^\w\s]")


def split_words(sentence: str) -> list[str]:
    """Split a sentence into lower-case words and signs; endings with an apostrophe are words of their own.

    Tokenized and plain collections give the same words.

    >>> words_of("It's good, isn't it?"), words_of("it 's good , is n't it ?")
    (['it', "'s", 'good', ',', 'is', "n't", 'it', '?'], ['it', "'s", 'good', ',', 'is', "n't", 'it', '?'])
    """
    text = sentence.lower().replace("’", "'")
    return WORD.findall(QUOTES.sub('"', APART.sub("n't", text)))


@dataclass(frozen=True)
class Vocabulary:
    """Words by id, after those for padding and for unknown words."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, sentences: Iterable[str], size: int) -> "Vocabulary":
        """Return the most frequent words of sentences; `size` includes padding and unknown.

        Ties are broken in alphabetical order.
        """
        if size <= len(SPECIAL):
            raise UsageError(f"A vocabulary needs more than {len(SPECIAL)} words, got {size}.")
        counts = Counter(chain.from_iterable(map(split_words, sentences)))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls((*SPECIAL, *ranked[: size - len(SPECIAL)]))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Return the id of each word."""
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, sentences: Sequence[str], most: int, labels: Sequence[int] | None = None) -> EncodedTexts:
        """Encode sentences as ids of their first `most` words; a sentence without words is one unknown word."""
        rows = [
            [self.numbers.get(word, UNKNOWN) for word in split_words(text)[:most]] or [UNKNOWN] for text in sentences
        ]
        starts = torch.tensor([0, *map(len, rows)]).cumsum(0)
        ids = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int32)
        return EncodedTexts(ids, starts, None, None if labels is None else torch.tensor(labels), PADDING)


def known_word_share(rows: EncodedTexts) -> float:
    """Return the share of words that are in the vocabulary."""
    return float((rows.ids != UNKNOWN).float().mean()) if len(rows.ids) else 1.0
