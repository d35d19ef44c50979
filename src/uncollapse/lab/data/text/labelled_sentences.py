"""Labelled sentences for the evaluation of sentence encoders: MR, CR, SUBJ, MPQA and TREC from local files.

A line is a class index, a space and the sentence, which is empty in one line of CR. Four of the tasks are one file and
are evaluated by ten folds; TREC has a file for training and one for the test.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.lab.data.text.running_text import decode_text, help_topics

FILES: dict[str, tuple[str, ...]] = {
    "mr": ("rt-polarity.all",),
    "cr": ("custrev.all",),
    "subj": ("subj.all",),
    "mpqa": ("mpqa.all",),
    "trec": ("TREC.train.all", "TREC.test.all"),
}
TOPICS = ("compound", "debugger", "formatstrings", "specialnames", "types")  # large ones that share few sentences
NAMES = (*FILES, "topics")
LARGEST = 2**27  # bytes of a file; the published ones have about one million
TAIL = 1 / 3  # of each topic: no encoder is trained on its sentences


@dataclass(frozen=True)
class LabelledSentences:
    """Sentences and their class indices. tests: number of last sentences that are for the test; 0: ten folds."""

    sentences: Sequence[str]
    labels: Sequence[int]
    tests: int = 0

    def __len__(self) -> int:
        return len(self.labels)


def load_task(name: str, root: Path | None) -> LabelledSentences:
    """Return a task by name, from `root/sentences` or `root`, or "topics", which needs no files."""
    if name == "topics":
        return _topics()
    if name not in FILES:
        raise UsageError(f"There is no task {name!r}.{did_you_mean(name, NAMES)} There are: {', '.join(NAMES)}.")
    if root is None:
        raise UsageError(f"{name} is read from a file: set --data-root to the folder that has {FILES[name][0]}.")
    parts = [_read(_path(file, root)) for file in FILES[name]]
    tests = len(parts[1]) if len(parts) > 1 else 0
    lines = [line for part in parts for line in part]
    found = LabelledSentences([text for _, text in lines], [label for label, _ in lines], tests)
    if len(set(found.labels)) < 2:
        raise UsageError(f"{FILES[name][0]} of {name} has only one class; at least two are needed.")
    return found


def sentences_to_exclude(tasks: Sequence[str]) -> frozenset[str]:
    """Return the sentences that an encoder must not be trained on, because a task is made of the same text."""
    return frozenset(_topics().sentences) if "topics" in tasks else frozenset()


def _path(file: str, root: Path) -> Path:
    places = (root / "sentences" / file, root / file)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UsageError(f"There is no {file} in {' or '.join(str(place.parent) for place in places)}.")
    if found.stat().st_size > LARGEST:
        raise UsageError(f"{found} has {found.stat().st_size:,} bytes; a task of sentences has {LARGEST:,} at most.")
    return found


def _read(path: Path) -> list[tuple[int, str]]:
    # only at line feeds: in the old encodings of these files other bytes would count as line ends too
    lines = decode_text(path.read_bytes()).split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        label, _, sentence = line.strip().partition(" ")
        if not label:
            continue
        if not (label.isascii() and label.isdigit()):
            raise UsageError(
                f"{path}, line {number}, must be a class index, a space and a sentence, got {line[:60]!r}."
            )
        found.append((int(label), sentence.strip()))
    if not found:
        raise UsageError(f"{path} has no sentences.")
    return found


def _topics() -> LabelledSentences:
    """Return the task of naming the topic of Python's help a sentence is from: the last third of a few large topics."""
    texts = help_topics()
    missing = [topic for topic in TOPICS if topic not in texts]
    if missing:
        raise UsageError(f"The help of this Python has no topic {missing[0]!r}, of which the task is made.")
    owners: dict[str, set[int]] = {}
    for number, topic in enumerate(TOPICS):
        for sentence in texts[topic]:
            owners.setdefault(sentence, set()).add(number)
    found = []
    for number, topic in enumerate(TOPICS):
        tail = texts[topic][-round(TAIL * len(texts[topic])) :]
        found += [(sentence, number) for sentence in dict.fromkeys(tail) if owners[sentence] == {number}]
    return LabelledSentences([sentence for sentence, _ in found], [number for _, number in found])
