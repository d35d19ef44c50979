"""Runs on neighbouring sentences: settings, data, encoders at the start."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.lab.experiments.sentences.tiny_sentences import TINY, put_tiny

from uncollapse.errors import UsageError
from uncollapse.lab.data.text.running_text import UNKNOWN
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.sentences import config as sentence_pairs
from uncollapse.lab.experiments.sentences.config import Config, build_encoders, load_data


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(put_tiny(tmp_path))


def test_settings_without_an_effect_make_no_other_run() -> None:
    assert Config(heads=8) == Config()
    assert Config(encoder="transformer", heads=8, bidirectional=True) == Config(encoder="transformer", heads=8)
    assert Config(contrast=0.0, align=1.0, temperature=0.1) == Config(contrast=0.0, align=1.0)
    assert Config(epochs=0, lr=1.0, align=1.0, precision="bf16") == Config(epochs=0)
    assert Config(epochs=0, width=64) != Config(epochs=0)


def test_documents_are_held_back_as_a_whole(runtime: Runtime) -> None:
    data = load_data(TINY, runtime)
    assert {name: part.sizes.tolist() for name, part in data.splits.items()} == {
        "train": [8] * 16,
        "validation": [8] * 4,
    }
    assert len(data.splits["train"].rows) == 128
    assert data.splits["train"].least == 16 * 3  # beginning with the second of eight sentences
    again = load_data(replace(TINY, seed=1), runtime)
    assert again.fingerprint() == data.fingerprint()
    assert load_data(replace(TINY, holdout=0.4), runtime).fingerprint() != data.fingerprint()


def test_words_are_those_of_the_training_documents(tmp_path: Path) -> None:
    put_tiny(tmp_path)
    blocks = [f"one only{number}\ntwo only{number}" for number in range(20)]
    (tmp_path / "tiny" / "a.txt").write_text("\n\n".join(blocks), encoding="utf-8")
    data = load_data(TINY, Runtime(tmp_path))
    assert sum(word.startswith("only") for word in data.vocabulary.words) == 16
    held = data.splits["validation"].rows.ids
    assert int((held == UNKNOWN).sum()) == 8


def _sentences(part: sentence_pairs.Documents) -> list[list[int]]:
    return [part.rows.ids[a:b].tolist() for a, b in zip(part.rows.starts[:-1], part.rows.starts[1:], strict=True)]


def test_sentences_of_a_task_are_not_trained_on() -> None:
    config = replace(TINY, data="pydoc", tasks=("topics",), vocabulary=5000, max_words=400)
    data = load_data(config, Runtime())
    numbers = {tuple(row) for part in data.splits.values() for row in map(tuple, _sentences(part)) if len(row) > 8}
    rows = data.tasks["topics"][0]
    asked = {tuple(rows.ids[a:b].tolist()) for a, b in zip(rows.starts[:-1], rows.starts[1:], strict=True)}
    assert not asked & {row for row in numbers if 1 not in row}


def test_documents_are_cut_where_a_sentence_is_hidden_or_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    document = [*"abcdefg"]
    assert list(sentence_pairs._split_document(document, frozenset("c"))) == [["a", "b"], ["d", "e", "f", "g"]]
    assert list(sentence_pairs._split_document(document, frozenset("bg"))) == [["c", "d", "e", "f"]]
    monkeypatch.setattr(sentence_pairs, "LONGEST", 3)
    assert list(sentence_pairs._split_document(document, frozenset())) == [["a", "b", "c"], ["d", "e", "f"]]
    assert list(sentence_pairs._split_document(document, frozenset("d"))) == [["a", "b", "c"], ["e", "f", "g"]]


def test_the_seed_gives_the_weights_and_two_encoders_differ() -> None:
    one, two, other = (build_encoders(replace(TINY, seed=seed), 50) for seed in (0, 0, 1))
    assert torch.equal(one.first.embed.weight, two.first.embed.weight)
    assert not torch.equal(one.first.embed.weight, other.first.embed.weight)
    both = build_encoders(replace(TINY, two_encoders=True), 50)
    assert both.second is not None
    assert torch.equal(both.first.embed.weight, one.first.embed.weight)
    assert not torch.equal(both.second.embed.weight, one.first.embed.weight)


def test_a_single_document_cannot_be_held_back(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 documents"):
        load_data(TINY, Runtime(put_tiny(tmp_path, documents=1)))
