"""Documents of sentences: Brown's layout, WikiText's, own files, Python's help, and what is no corpus."""

import zipfile
from pathlib import Path

import pytest
import torch

from uncollapse.errors import UsageError
from uncollapse.lab.data.text import running_text
from uncollapse.lab.data.text.running_text import PADDING, UNKNOWN, Vocabulary, known_word_share, split_words

CA01 = "\n\n\tThe/at jury/nn 1/2/cd said/vbd ./.\n\n\n\tNo/at\n"
CA02 = "\n\tHe/pps left/vbd ./.\n"
JURY = [("The jury 1/2 said .", "No"), ("He left .",)]


def packed(path: Path, files: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in files.items():
            file.writestr(name, text)
    return path


def put(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.mark.parametrize("place", ["brown/brown.zip", "brown.zip", "corpora/brown.zip"])
def test_brown_is_read_from_nltks_zip_without_its_tags(tmp_path: Path, place: str) -> None:
    packed(
        tmp_path / place, {"brown/ca02": CA02, "brown/ca01": CA01, "brown/cats.txt": "ca01 news", "brown/README": "x"}
    )
    assert running_text.load_documents("brown", "lines", tmp_path) == JURY
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["brown.zip"]  # nothing is unpacked


def test_brown_is_read_from_unpacked_files_too(tmp_path: Path) -> None:
    put(tmp_path / "brown" / "ca01", CA01)
    put(tmp_path / "brown" / "ca02", CA02)
    put(tmp_path / "brown" / "cats.txt", "ca01 news")
    assert running_text.load_documents("brown", "lines", tmp_path) == JURY


def test_a_corpus_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(tmp_path / "brown.zip", {"brown/ca01": CA01})
    put(tmp_path / "own.txt", "One.\nTwo.\n")
    monkeypatch.setattr(running_text, "LARGEST", 8)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(UsageError, match="47 bytes"):
        running_text.load_documents("brown", "lines", tmp_path)
    with pytest.raises(UsageError, match="10 bytes"):
        running_text.load_documents("own.txt", "lines", tmp_path)


def test_a_torn_zip_is_told(tmp_path: Path) -> None:
    path = packed(tmp_path / "brown.zip", {"brown/ca01": CA01})
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UsageError, match=r"valid \.zip"):
        running_text.load_documents("brown", "lines", tmp_path)


def test_wikitext_has_an_article_a_document_without_headings(tmp_path: Path) -> None:
    lobster = " \n = Lobster = \n \n It lives . It eats H. gammarus . \n = = Use = = \n Why ? Yes . \n"
    text = lobster + " = Du Fu = \n A poet . \n"
    put(tmp_path / "wikitext2" / "valid.txt", text)
    put(tmp_path / "wikitext2" / "README", "not text")
    found = running_text.load_documents("wikitext2", "lines", tmp_path)
    assert found == [("It lives .", "It eats H. gammarus .", "Why ?", "Yes ."), ("A poet .",)]


def test_own_files_with_a_sentence_a_line(tmp_path: Path) -> None:
    put(tmp_path / "books" / "b.txt", "Third.\r\n")
    put(tmp_path / "books" / "a.txt", "One. Still one.\r\nTwo.\r\n\r\n\r\nNew.\r\n")
    assert running_text.load_documents("books", "lines", tmp_path) == [
        ("One. Still one.", "Two."),
        ("New.",),
        ("Third.",),
    ]


def test_own_running_text_is_split(tmp_path: Path) -> None:
    put(tmp_path / "a.txt", "One is\nhere. Two!\n\nThree.")
    assert running_text.load_documents("a.txt", "text", tmp_path) == [("One is here.", "Two!", "Three.")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("He met Dr. No. He ran.", ["He met Dr. No.", "He ran."]),
        ("It cost 3.5 dollars. (Really!) Yes", ["It cost 3.5 dollars.", "(Really!)", "Yes"]),
        ("J. R. Smith said: why? “Go.” he", ["J. R. Smith said: why?", "“Go.” he"]),
        ("", []),
    ],
)
def test_sentences_end_at_stops(text: str, found: list[str]) -> None:
    assert running_text.split_sentences(text) == found


def test_the_help_of_python_is_prose() -> None:
    topics = running_text.help_topics()
    assert len(topics) > 50
    every = [sentence for document in topics.values() for sentence in document]
    assert len(every) > 2000
    assert not any(">>>" in sentence or "====" in sentence for sentence in every)
    assert running_text.load_documents("pydoc", "lines", None) == [*topics.values()]


def test_old_encodings_are_read(tmp_path: Path) -> None:
    put(tmp_path / "a.txt", "caf\xe9 \x96 \x81".encode("latin-1"))
    assert running_text.load_documents("a.txt", "lines", tmp_path) == [("café – \ufffd",)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("brown", "There is no Brown corpus"),
        ("wikitext2", "There is no WikiText"),
        ("absent", "brown, wikitext2, pydoc"),
        ("empty", r"has no \.txt files"),
        ("blank.txt", "has no sentences"),
    ],
)
def test_what_is_not_there_is_told(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    put(tmp_path / "blank.txt", " \n\n ")
    with pytest.raises(UsageError, match=words):
        running_text.load_documents(name, "lines", tmp_path)


def test_a_corpus_needs_a_folder() -> None:
    with pytest.raises(UsageError, match="--data pydoc"):
        running_text.load_documents("brown", "lines", None)


# --- words as numbers ---


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
    with pytest.raises(UsageError, match="2 words"):
        Vocabulary.of(["a"], 2)
