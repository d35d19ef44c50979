"""Sentences with classes, from tiny files in their own format."""

from collections import Counter
from pathlib import Path

import pytest

from uncollapse.errors import UsageError
from uncollapse.lab.data.text import labelled_sentences, running_text


def put(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


@pytest.mark.parametrize("folder", ["sentences", "."])
def test_a_task_in_one_file(tmp_path: Path, folder: str) -> None:
    put(tmp_path / folder / "rt-polarity.all", b"0 dull . \n1 a caf\xe9 \x85 joy\n0 \n\n")
    found = labelled_sentences.load_task("mr", tmp_path)
    assert list(found.sentences) == ["dull .", "a café … joy", ""]  # \x85 is no end of a line here
    assert list(found.labels) == [0, 1, 0]
    assert (found.tests, len(found)) == (0, 3)


def test_trec_has_its_own_test_part(tmp_path: Path) -> None:
    put(tmp_path / "TREC.train.all", b"0 How ?\n5 When ?\n")
    put(tmp_path / "TREC.test.all", b"5 How far ?\n")
    found = labelled_sentences.load_task("trec", tmp_path)
    assert (list(found.sentences), list(found.labels), found.tests) == (["How ?", "When ?", "How far ?"], [0, 5, 5], 1)


def test_topics_are_held_out_of_the_help() -> None:
    found = labelled_sentences.load_task("topics", None)
    assert set(Counter(found.labels)) == set(range(5))
    assert min(Counter(found.labels).values()) >= 10
    assert len(set(found.sentences)) == len(found)  # none in two classes
    texts = running_text.help_topics()
    assert all(
        text in texts[labelled_sentences.TOPICS[n]] for text, n in zip(found.sentences, found.labels, strict=True)
    )
    assert labelled_sentences.sentences_to_exclude(("mr", "topics")) == set(found.sentences)
    assert labelled_sentences.sentences_to_exclude(("mr",)) == frozenset()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"0 fine\nwhat\n", "line 2"),
        (b"-1 fine\n", "line 1"),
        (b"\n \n", "has no sentences"),
        (b"1 a\n1 b\n", "custrev.all of cr has only one class"),
    ],
)
def test_what_is_no_task_is_told(tmp_path: Path, content: bytes, words: str) -> None:
    put(tmp_path / "custrev.all", content)
    with pytest.raises(UsageError, match=words):
        labelled_sentences.load_task("cr", tmp_path)


def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"subj\.all"):
        labelled_sentences.load_task("subj", tmp_path)
    with pytest.raises(UsageError, match=r"--data-root .*mpqa\.all"):
        labelled_sentences.load_task("mpqa", None)
    with pytest.raises(UsageError, match=r"'sst'.*mr, cr"):
        labelled_sentences.load_task("sst", tmp_path)
    put(tmp_path / "subj.all", b"0 a\n1 b\n")
    monkeypatch.setattr(labelled_sentences, "LARGEST", 4)
    with pytest.raises(UsageError, match="8 bytes"):
        labelled_sentences.load_task("subj", tmp_path)
