"""Lines of text."""

from pathlib import Path

import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.io.batches import built_in_sentences, known_tokens, read_lines


def test_built_in_sentences_are_many_and_different() -> None:
    sentences = built_in_sentences()
    assert len(set(sentences)) == len(sentences) == 120
    assert all(6 <= len(sentence.split()) <= 40 for sentence in sentences)


def test_blank_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one\n\n  \r\n two \r\nthree", encoding="utf-8")
    assert read_lines(str(path)) == ["one", "two", "three"]
    assert read_lines(str(path), limit=2) == ["one", "two"]


def test_files_without_text(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in {"empty": "has no text", "binary": "text file in UTF-8", "none": "cannot be read"}.items():
        with pytest.raises(UsageError, match=words):
            read_lines(str(tmp_path / name))


def test_a_tokenizer_of_another_model_is_named_before_the_first_pass() -> None:
    class Model:
        def get_input_embeddings(self) -> torch.nn.Embedding:
            return torch.nn.Embedding(10, 4)

    good, bad = {"input_ids": torch.tensor([[3, 9]])}, {"input_ids": torch.tensor([[3, 10]])}
    assert list(known_tokens([good], Model())) == [good]
    assert list(known_tokens([bad], torch.nn.Linear(2, 2))) == [bad]  # it has no vocabulary
    with pytest.raises(UsageError, match="tokenizer"):
        list(known_tokens([good, bad], Model()))
