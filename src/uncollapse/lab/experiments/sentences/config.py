"""What a run on neighbouring sentences is told, its data, and its encoders at the start."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field
from uncollapse.lab.data.text import labelled_sentences, running_text
from uncollapse.lab.data.text.encoded_texts import EncodedTexts
from uncollapse.lab.data.text.vocabulary import Vocabulary
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.contrastive.objectives import ObjectiveConfig
from uncollapse.lab.models.sentence_encoder import KINDS, POOLINGS, Encoders, SentenceEncoder
from uncollapse.lab.runs.results import fingerprint

SPLIT_SEED = 0  # the documents that are held back are the same for every seed of a run
LONGEST = 1000  # sentences of a document; longer ones are cut, so that a part of a single file can be held back
READ = 128  # words of a sentence of a task
DATA, MODEL, TRAINING = "Data", "Model", "Training"  # panels of the help
IDLE = {"gru": ("heads",), "transformer": ("bidirectional",)}  # settings that do nothing with an encoder
UNTRAINED = ("dropout", "batch", "lr", "warmup", "clip", "precision")  # and those that do nothing without training


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """A run. Settings of the other encoder get their defaults: they make no other run."""

    data: str = config_field(
        "brown",
        f"Running text: {', '.join(running_text.NAMES)} (Python's own help, nothing to fetch), or a text file or a "
        "folder of .txt files below --data-root.",
        group=DATA,
    )
    split: str = config_field(
        "lines",
        "Text files: a sentence a line, an empty line between documents; or running text, a file a document.",
        choices=running_text.SPLITS,
        group=DATA,
    )
    vocabulary: int = config_field(20_000, "Most frequent words that are known.", minimum=10, group=DATA)
    max_words: int = config_field(30, "Words of a sentence in training; the rest is cut off.", minimum=2, group=DATA)
    holdout: float = config_field(
        0.05, "Share of the documents that is held back to choose settings on.", minimum=0.001, maximum=0.5, group=DATA
    )
    tasks: tuple[str, ...] = config_field(
        ("mr", "cr"), "What the encoder is judged on at the end.", choices=labelled_sentences.NAMES, group=DATA
    )
    encoder: str = config_field("gru", "What reads the words.", choices=KINDS, group=MODEL)
    embedding: int = config_field(256, "Features of a word.", minimum=1, group=MODEL)
    width: int = config_field(256, "Features of a sentence, which the tasks are learnt from.", minimum=1, group=MODEL)
    depth: int = config_field(1, "GRUs or blocks.", minimum=1, group=MODEL)
    dim: int = config_field(128, "Features on the sphere; 0: those of the sentence itself.", minimum=0, group=MODEL)
    pooling: str = config_field("mean", "Which state of the words is the sentence's.", choices=POOLINGS, group=MODEL)
    bidirectional: bool = config_field(False, "gru: half of the width reads backwards.", group=MODEL)
    heads: int = config_field(4, "transformer: heads of its attention.", minimum=1, group=MODEL)
    dropout: float = config_field(0.0, "Dropout of words, and in a transformer.", minimum=0, maximum=0.9, group=MODEL)
    two_encoders: bool = config_field(
        False, "Another encoder for the second sentence; both are joined to be judged (quick-thoughts).", group=MODEL
    )
    epochs: int = config_field(
        5, "Passes over the documents; 0: the encoder as it is drawn.", minimum=0, group=TRAINING
    )
    batch: int = config_field(256, "Pairs in a step.", minimum=2, group=TRAINING)
    lr: float = config_field(1e-3, "Largest learning rate of Adam; it falls along a cosine.", minimum=0, group=TRAINING)
    warmup: float = config_field(
        0.05, "Share of the steps in which the learning rate rises.", minimum=0, maximum=0.9, group=TRAINING
    )
    clip: float = config_field(1.0, "Largest length of the gradient; 0: any.", minimum=0, group=TRAINING)
    precision: str = config_field("no", "Half precision in training.", choices=("no", "bf16", "fp16"), group=TRAINING)
    seed: int = config_field(0, "Of the weights, the pairs and their order.", minimum=0, maximum=2**31, group=TRAINING)

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = set(IDLE[self.encoder])
        if not self.epochs:
            idle |= {*UNTRAINED, *(field.name for field in fields(ObjectiveConfig))}
        for field in fields(self):
            if field.name in idle:
                object.__setattr__(self, field.name, field.default)


@dataclass(frozen=True)
class Documents:
    """Sentences of documents in their order. sizes: how many each document has."""

    rows: EncodedTexts
    sizes: Tensor

    @property
    def least(self) -> int:
        """Pairs that there are, wherever they begin."""
        return int((((self.sizes - 1) // 2).clamp(min=0) + (self.sizes == 2)).sum())


@dataclass(frozen=True)
class Data:
    """The parts "train" and "validation", the tasks by name, and the words that they are written in."""

    parts: Mapping[str, Documents]
    tasks: Mapping[str, tuple[EncodedTexts, int]]  # with the number of its last sentences that are for the test
    vocabulary: Vocabulary

    def fingerprint(self) -> str:
        """16 hex digits that change when any word or label does."""
        tensors = [t for part in self.parts.values() for t in (part.rows.ids, part.rows.starts, part.sizes)]
        for rows, _ in self.tasks.values():
            tensors += [t for t in (rows.ids, rows.starts, rows.labels) if t is not None]
        return fingerprint(tensors)


def load_data(config: Config, runtime: Runtime) -> Data:
    """The documents and the tasks of a run, as numbers of words."""
    hidden = labelled_sentences.sentences_to_exclude(config.tasks)
    texts = running_text.load_documents(config.data, config.split, runtime.data_root)
    documents = [piece for text in texts for piece in _split_document(text, hidden)]
    held = max(1, round(config.holdout * len(documents)))
    if len(documents) <= held:
        raise UsageError(f"{config.data} has {len(documents)} documents of two sentences or more; two are needed.")
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    chosen = {"train": [documents[n] for n in order[held:]], "validation": [documents[n] for n in order[:held]]}
    known = Vocabulary.of((sentence for document in chosen["train"] for sentence in document), config.vocabulary)
    parts = {}
    for name, its in chosen.items():
        rows = known.encode([sentence for document in its for sentence in document], config.max_words)
        parts[name] = Documents(rows, torch.tensor([len(document) for document in its]))
    tasks = {}
    for name in config.tasks:
        task = labelled_sentences.load_task(name, runtime.data_root)
        tasks[name] = known.encode(task.sentences, READ, task.labels), task.tests
    return Data(parts, tasks, known)


def _split_document(document: Sequence[str], hidden: frozenset[str]) -> Iterator[Sequence[str]]:
    """A document without sentences that must not be seen, cut there; pieces of a single sentence have no pair."""
    start = 0
    for at, sentence in enumerate((*document, "")):
        if at == len(document) or sentence in hidden or at - start == LONGEST:
            if at - start > 1:
                yield document[start:at]
            start = at + (at < len(document) and sentence in hidden)


def build_encoders(config: Config, vocabulary: int) -> Encoders:
    """The encoders at their start."""
    sizes = {name: getattr(config, name) for name in ("embedding", "width", "depth", "dim", "pooling")}
    more = {name: getattr(config, name) for name in ("bidirectional", "heads", "dropout")}
    with use_seed(config.seed):
        made = [
            SentenceEncoder(vocabulary, kind=config.encoder, **sizes, **more) for _ in range(1 + config.two_encoders)
        ]
    return Encoders(*made)
