"""Configuration of the recipe sentences, its documents and tasks, and the untrained encoders."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.config.fields import config_field, reset_idle
from uncollapse.lab.data.text import labelled_sentences, running_text
from uncollapse.lab.data.text.encoded_texts import EncodedTexts
from uncollapse.lab.data.text.running_text import Vocabulary
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.contrastive.objectives import ObjectiveConfig
from uncollapse.lab.models.sentence_encoder import KINDS, POOLINGS, Encoders, SentenceEncoder
from uncollapse.lab.runs.results import fingerprint

SPLIT_SEED = 0  # every seed of a run has the same held-out documents
LONGEST = 1000  # sentences per document; longer ones are cut, so that a part of a single file can be held out
READ = 128  # words per sentence of a task
DATA, MODEL, TRAINING = "Data", "Model", "Training"  # panels of the help
IDLE = {"gru": ("heads",), "transformer": ("bidirectional",)}  # fields without an effect on an encoder
OF_TRAINING = (
    "dropout",
    "batch",
    "lr",
    "warmup",
    "clip",
    "precision",
)  # fields without an effect if nothing is trained


@dataclass(frozen=True)
class Config(ObjectiveConfig):
    """Configuration of a run. Fields without an effect get their defaults, so that they make no other run."""

    data: str = config_field(
        "brown",
        f"Running text: {', '.join(running_text.NAMES)} (Python's own help, nothing to fetch), or a text file or a "
        "folder of .txt files below --data-root.",
        group=DATA,
    )
    split: str = config_field(
        "lines",
        "Text files: one sentence per line, an empty line between documents; or running text, one document per file.",
        choices=running_text.SPLITS,
        group=DATA,
    )
    vocabulary: int = config_field(20_000, "Size of the vocabulary: the most frequent words.", minimum=10, group=DATA)
    max_words: int = config_field(30, "Words per sentence in training; the rest is cut off.", minimum=2, group=DATA)
    holdout: float = config_field(
        0.05, "Share of the documents that is held out to choose settings on.", minimum=0.001, maximum=0.5, group=DATA
    )
    tasks: tuple[str, ...] = config_field(
        ("mr", "cr"), "Tasks that evaluate the encoder at the end.", choices=labelled_sentences.NAMES, group=DATA
    )
    encoder: str = config_field("gru", "Encoder.", choices=KINDS, group=MODEL)
    embedding: int = config_field(256, "Features per word.", minimum=1, group=MODEL)
    width: int = config_field(256, "Features per sentence, from which the tasks are learnt.", minimum=1, group=MODEL)
    depth: int = config_field(1, "Number of GRUs or blocks.", minimum=1, group=MODEL)
    dim: int = config_field(
        128, "Output features, on the sphere; 0: those of the sentence itself.", minimum=0, group=MODEL
    )
    pooling: str = config_field(
        "mean", "How the states of the words become the sentence's.", choices=POOLINGS, group=MODEL
    )
    bidirectional: bool = config_field(False, "gru: half of the width reads backward.", group=MODEL)
    heads: int = config_field(4, "transformer: attention heads.", minimum=1, group=MODEL)
    dropout: float = config_field(0.0, "Dropout of words, and in a transformer.", minimum=0, maximum=0.9, group=MODEL)
    two_encoders: bool = config_field(
        False,
        "A second encoder for the second sentence; the evaluation concatenates both (quick-thoughts).",
        group=MODEL,
    )
    epochs: int = config_field(
        5, "Passes over the documents; 0: the encoder stays as it is initialized.", minimum=0, group=TRAINING
    )
    batch: int = config_field(256, "Pairs per step.", minimum=2, group=TRAINING)
    lr: float = config_field(1e-3, "Largest learning rate of Adam, with a cosine schedule.", minimum=0, group=TRAINING)
    warmup: float = config_field(
        0.05, "Fraction of the steps in which the learning rate rises.", minimum=0, maximum=0.9, group=TRAINING
    )
    clip: float = config_field(1.0, "Largest norm of the gradient; 0: no clipping.", minimum=0, group=TRAINING)
    precision: str = config_field("no", "Half precision in training.", choices=("no", "bf16", "fp16"), group=TRAINING)
    seed: int = config_field(
        0, "Seed of the weights, the pairs and their order.", minimum=0, maximum=2**31, group=TRAINING
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = set(IDLE[self.encoder])
        if not self.epochs:
            idle |= {*OF_TRAINING, *(field.name for field in fields(ObjectiveConfig))}
        reset_idle(self, idle)


@dataclass(frozen=True)
class Documents:
    """Sentences of documents in their order. sizes: number of sentences of each document."""

    rows: EncodedTexts
    sizes: Tensor

    @property
    def least(self) -> int:
        """Return the number of pairs that there are wherever they start."""
        return int((((self.sizes - 1) // 2).clamp(min=0) + (self.sizes == 2)).sum())


@dataclass(frozen=True)
class Data:
    """The splits "train" and "validation", the tasks by name, and the vocabulary.

    A task is its sentences, of which the given number of last ones are for the test; 0: ten folds.
    """

    splits: Mapping[str, Documents]
    tasks: Mapping[str, tuple[EncodedTexts, int]]
    vocabulary: Vocabulary

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change when any word or label does."""
        tensors = [t for split in self.splits.values() for t in (split.rows.ids, split.rows.starts, split.sizes)]
        for rows, _ in self.tasks.values():
            tensors += [t for t in (rows.ids, rows.starts, rows.labels) if t is not None]
        return fingerprint(tensors)


def load_data(config: Config, runtime: Runtime) -> Data:
    """Return the documents and the tasks of a run, as word ids."""
    hidden = labelled_sentences.sentences_to_exclude(config.tasks)
    texts = running_text.load_documents(config.data, config.split, runtime.data_root)
    documents = [piece for text in texts for piece in _split_document(text, hidden)]
    held = max(1, round(config.holdout * len(documents)))
    if len(documents) <= held:
        raise UsageError(
            f"{config.data} has {len(documents)} documents of two or more sentences; at least two are needed."
        )
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    texts_of = {"train": [documents[n] for n in order[held:]], "validation": [documents[n] for n in order[:held]]}
    known = Vocabulary.of((sentence for document in texts_of["train"] for sentence in document), config.vocabulary)
    splits = {}
    for name, own in texts_of.items():
        rows = known.encode([sentence for document in own for sentence in document], config.max_words)
        splits[name] = Documents(rows, torch.tensor([len(document) for document in own]))
    tasks = {}
    for name in config.tasks:
        task = labelled_sentences.load_task(name, runtime.data_root)
        tasks[name] = known.encode(task.sentences, READ, task.labels), task.tests
    return Data(splits, tasks, known)


def _split_document(document: Sequence[str], hidden: frozenset[str]) -> Iterator[Sequence[str]]:
    """Yield the pieces of a document between hidden sentences; a piece of one sentence has no pair and is dropped."""
    start = 0
    for at, sentence in enumerate((*document, "")):
        if at == len(document) or sentence in hidden or at - start == LONGEST:
            if at - start > 1:
                yield document[start:at]
            start = at + (at < len(document) and sentence in hidden)


def build_encoders(config: Config, vocabulary: int) -> Encoders:
    """Return the untrained encoders."""
    sizes = {name: getattr(config, name) for name in ("embedding", "width", "depth", "dim", "pooling")}
    more = {name: getattr(config, name) for name in ("bidirectional", "heads", "dropout")}
    with use_seed(config.seed):
        made = [
            SentenceEncoder(vocabulary, kind=config.encoder, **sizes, **more) for _ in range(1 + config.two_encoders)
        ]
    return Encoders(*made)
