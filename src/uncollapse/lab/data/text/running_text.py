"""Running text and its vocabulary: documents of sentences from Brown, WikiText, text files or Python's own help.

Nothing is unpacked to disk, and sizes are checked before anything is read.
"""

import importlib
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch

from uncollapse.errors import UsageError, file_errors
from uncollapse.io.tensor_files import check_unpacked
from uncollapse.lab.data.text.encoded_texts import EncodedTexts

Document = tuple[str, ...]  # its sentences, in their order

NAMES = ("brown", "wikitext2", "pydoc")
SPLITS = ("lines", "text")
LARGEST = 2**30  # bytes of a corpus: its sentences are held in memory, where they take several times as much
SPARE = 2**26  # bytes that a small archive may unpack to
BROWN_FILE = re.compile(r"(?:.*/)?c[a-r]\d\d")  # as NLTK has them: ca01 … cr09
TITLE = re.compile(r" ?= [^=].*[^=] = ?")  # of an article of WikiText; its sections have more equals signs
AFTER_STOP = re.compile(r"(?<= [.!?])(?: ['\"])? ")  # WikiText parts its stops from words; abbreviations keep theirs
END = re.compile(r"([.!?][\"'”’)\]]*)\s+(?=[\"'“‘(\[]?[A-Z0-9*])")
SHORT = re.compile(r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|cf|Fig|Sec)|\b[a-z]\.[a-z])\.$")
RULE = re.compile(r"[*=\-~^\"'+ ]+")  # a line under a heading, or of a table
LEAST = 3  # words of a sentence of Python's help: less is a heading or a piece of code


def load_documents(name: str, split: str, root: Path | None) -> list[Document]:
    """Return the documents of a corpus by name, or of text files below `root`, each with at least one sentence.

    Args:
        name: "brown", "wikitext2", "pydoc" (which needs no files), or a text file or a folder of .txt files.
        split: For text files: "lines" has one sentence per line and an empty line between documents; "text" is split
            into sentences, and a file is a document.
        root: Folder that has the datasets.
    """
    if name == "pydoc":
        return [*help_topics().values()]
    if root is None:
        raise UsageError(f"{name} is read from files: set --data-root to the folder that has it, or use --data pydoc.")
    known = {"brown": _brown, "wikitext2": _wikitext}
    documents = known[name](root) if name in known else _own_files(root / name, split)
    found = [document for document in documents if document]
    if not found:
        raise UsageError(f"{name} in {root} has no sentences.")
    return found


def split_sentences(text: str) -> list[str]:
    """Split running text into sentences, at stops that are followed by a capital or a number.

    >>> split_sentences('Mr. Lee came at 5 p.m. and sat. "Why?" It was late.')
    ['Mr. Lee came at 5 p.m. and sat.', '"Why?"', 'It was late.']
    """
    found, start = [], 0
    for stop in END.finditer(text):
        if not SHORT.search(text[start : stop.end(1)]):
            found.append(text[start : stop.end(1)].strip())
            start = stop.end()
    return [part for part in (*found, text[start:].strip()) if part]


def help_topics() -> Mapping[str, Document]:
    """Return the texts of Python's `help()` by topic: real English that comes with every CPython, without code.

    The texts differ a little between versions of Python.
    """
    try:
        texts: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise UsageError(
            "This Python comes without the texts of its help (pydoc_data). Name a corpus with --data and --data-root."
        ) from error
    return {name: tuple(_prose(text)) for name, text in sorted(texts.items())}


def _prose(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        is_code = ">>>" in paragraph or any(line.strip() and RULE.fullmatch(line) for line in lines)
        for sentence in [] if is_code else split_sentences(" ".join(line.strip(" *") for line in lines)):
            if len(sentence.split()) >= LEAST and sentence[-1] in ".!?:":
                yield sentence


def _brown(root: Path) -> Iterator[Document]:
    """Yield documents with one sentence per line, each word with its tag: The/at jury/nn said/vbd."""
    for text in _brown_files(root):
        lines = (line.split() for line in text.splitlines())
        yield tuple(" ".join(word.rpartition("/")[0] or word for word in line) for line in lines if line)


def _brown_files(root: Path) -> Iterator[str]:
    packed = [root / "brown" / "brown.zip", root / "brown.zip", root / "corpora" / "brown.zip"]
    for place in packed:
        if place.is_file():
            return _read_zip(place)
    for folder in (root / "brown", root / "corpora" / "brown"):
        files = sorted(path for path in folder.glob("c*") if BROWN_FILE.fullmatch(path.name))
        if files:
            return _texts(files)
    raise UsageError(f"There is no Brown corpus in {root}: neither brown/brown.zip of NLTK nor its files brown/ca01 ….")


def _read_zip(path: Path) -> Iterator[str]:
    with file_errors(path, ".zip file"), zipfile.ZipFile(path) as file:
        entries = sorted((e for e in file.infolist() if BROWN_FILE.fullmatch(e.filename)), key=lambda e: e.filename)
        size = sum(entry.file_size for entry in entries)
        _check_size(path, size)
        check_unpacked(path, size, SPARE)
        for entry in entries:
            with file.open(entry) as text:  # not more than the declared size, which may be wrong
                yield _decode_lines(text.read(entry.file_size))


def _wikitext(root: Path) -> Iterator[Document]:
    """Yield articles, which start with a title between equals signs; headings are left out."""
    found = _text_files(root / "wikitext2") if (root / "wikitext2").exists() else []
    if not found:
        raise UsageError(f"There is no WikiText in {root}: wikitext2/ with files such as train.txt and valid.txt.")
    for text in _texts(found):
        article: list[str] = []
        for line in text.split("\n"):
            if TITLE.fullmatch(line.rstrip("\r")):
                yield tuple(article)
                article = []
            elif line.strip() and not line.strip().startswith("="):
                article += [part.strip() for part in AFTER_STOP.split(line) if part.strip()]
        yield tuple(article)


def _own_files(path: Path, split: str) -> Iterator[Document]:
    if not path.exists():
        raise UsageError(
            f"There is no {path}. data must be one of {', '.join(NAMES)}, a text file or a folder of them."
        )
    files = _text_files(path)
    if not files:
        raise UsageError(f"{path} has no .txt files; put running text there, or name a file.")
    for text in _texts(files):
        if split == "text":
            paragraphs = re.split(r"\n\s*\n", text)
            yield tuple(found for part in paragraphs for found in split_sentences(" ".join(part.split())))
        else:
            blocks = re.split(r"\n[^\S\n]*\n", text)
            yield from (tuple(line.strip() for line in block.split("\n") if line.strip()) for block in blocks)


def _text_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(found for found in path.rglob("*.txt") if found.is_file())


def _texts(files: Iterable[Path]) -> Iterator[str]:
    files = list(files)
    _check_size(files[0].parent, sum(path.stat().st_size for path in files))
    for path in files:
        try:
            yield _decode_lines(path.read_bytes())
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error


def _check_size(path: Path, size: int) -> None:
    if size > LARGEST:
        raise UsageError(
            f"The text in {path} has {size:,} bytes, more than the limit of {LARGEST:,}; use a part of it."
        )


def _decode_lines(raw: bytes) -> str:
    return decode_text(raw).replace("\r\n", "\n")


def decode_text(raw: bytes) -> str:
    """Decode UTF-8 or, where it is not valid, Windows-1252, as in old collections."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return raw.decode("cp1252", errors="replace")  # a few bytes stand for nothing


PADDING, UNKNOWN = 0, 1
SPECIAL = ("<padding>", "<unknown>")
APART = re.compile(r"\bn 't\b")  # some collections write does n 't
QUOTES = re.compile(r"``|''|[“”]")
WORD = re.compile(r"\w+(?=n't\b)|n't\b|'(?:s|m|d|ll|re|ve)\b|\w+|[^\w\s]")


def split_words(sentence: str) -> list[str]:
    """Split a sentence into lower-case words and signs; endings with an apostrophe are words of their own.

    Tokenized and plain collections give the same words.

    >>> split_words("It's good, isn't it?"), split_words("it 's good , is n't it ?")
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
