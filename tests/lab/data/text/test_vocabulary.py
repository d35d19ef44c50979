"""Words as numbers."""

import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.data.text.running_text import PADDING, UNKNOWN, Vocabulary, known_word_share, split_words


@pytest.mark.parametrize(
    "sentence", ["It's fine; don't!", "it 's fine ; do n't !", "It 's fine ; do n 't !", "it’s fine; don’t!"]
)
def test_words_come_out_alike_however_they_were_parted(sentence: str) -> None:
    assert split_words(sentence) == ["it", "'s", "fine", ";", "do", "n't", "!"]


def test_quotes_are_one_word() -> None:
    assert split_words("`` Oh '' “ah”") == ['"', "oh", '"', '"', "ah", '"']


def test_the_most_frequent_words_are_known() -> None:
    made = Vocabulary.of(["b b c", "a C d b"], 5)
    assert made.words == ("<padding>", "<unknown>", "b", "c", "a")  # a before d: the first of the alphabet
    assert len(made) == 5
    assert Vocabulary.of(["d a", "c b C b b"], 5) == made


def test_sentences_become_numbers_that_are_cut_and_filled_up() -> None:
    made = Vocabulary.of(["b b c"], 10)
    rows = made.encode(["c B zebra b", "", "b"], 3, [1, 0, 1])
    batch = rows.batch(torch.tensor([0, 1, 2]))
    assert batch["input_ids"].tolist() == [[3, 2, UNKNOWN], [UNKNOWN, PADDING, PADDING], [2, PADDING, PADDING]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert batch["labels"].tolist() == [1, 0, 1]
    assert known_word_share(rows) == pytest.approx(3 / 5)


def test_a_vocabulary_needs_room_for_words() -> None:
    with pytest.raises(UsageError, match="more than 2 words, got 2"):
        Vocabulary.of(["a"], 2)
