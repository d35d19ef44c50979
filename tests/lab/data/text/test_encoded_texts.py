"""Token ids: as the tokenizer gives them, kept on the disk, in batches of like length."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tests.lab.tiny_text import SENTENCES, tokenizer

from uncollapse.io.files import user_cache
from uncollapse.lab.data.text import encoded_texts
from uncollapse.lab.data.text.encoded_texts import EncodedTexts, batches_by_length, encode, length_buckets
from uncollapse.lab.data.text.glue import Examples

TEXTS = [text for text, _ in SENTENCES]
SINGLES = Examples(TEXTS, None, [label for _, label in SENTENCES])
PAIRS = Examples(TEXTS[:20], TEXTS[20:40], [n / 4 for n in range(20)])


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("the tokenizer was called")


def same(one: EncodedTexts, other: EncodedTexts) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def kept(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def words() -> Any:
    return tokenizer()


@pytest.mark.parametrize("chunk", [7, 10_000])
@pytest.mark.parametrize("examples", [SINGLES, PAIRS])
def test_a_batch_is_what_the_tokenizer_gives(
    words: Any, monkeypatch: pytest.MonkeyPatch, examples: Examples, chunk: int
) -> None:
    monkeypatch.setattr(encoded_texts, "CHUNK", chunk)
    found = encode(examples, words, 12, classes=examples is SINGLES, cache=None)
    numbers = torch.tensor([5, 0, 19, 7])
    texts = [[side[n] for n in numbers.tolist()] for side in (examples.first, examples.second) if side is not None]
    wanted = words(*texts, truncation=True, max_length=12, padding="longest", return_tensors="pt")
    batch = found.batch(numbers)
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(batch[name], wanted[name])
    assert batch["labels"].tolist() == [examples.labels[n] for n in numbers.tolist()]
    assert batch["labels"].dtype == (torch.long if examples is SINGLES else torch.float32)
    wide = words(*texts, truncation=True, max_length=12, padding="max_length", return_tensors="pt")
    assert torch.equal(found.batch(numbers, 12)["input_ids"], wide["input_ids"])
    with pytest.raises(ValueError, match="length"):
        found.batch(numbers, 3)


def test_what_a_model_does_not_take_is_left_out(words: Any) -> None:
    plain = tokenizer()
    plain.model_input_names = ["input_ids", "attention_mask"]
    found = encode(Examples(TEXTS, None, None), plain, 12, classes=True, cache=None)
    assert set(found.batch(torch.tensor([0, 1]))) == {"input_ids", "attention_mask"}


def test_of_a_pair_the_longer_sentence_is_cut(words: Any) -> None:
    long, short = "good " * 30, "bad film"
    for first, second in ((long, short), (short, long)):
        batch = encode(Examples([first], [second], None), words, 16, classes=True, cache=None).batch(torch.tensor([0]))
        text = words.decode(batch["input_ids"][0])
        assert text.count("good") == 16 - 3 - 2
        assert "bad film" in text


@pytest.mark.parametrize("examples", [SINGLES, PAIRS])
def test_a_hit_does_not_call_the_tokenizer(
    words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: Examples
) -> None:
    made = encode(examples, words, 12, classes=True, cache=tmp_path)
    monkeypatch.setattr(type(words), "__call__", refuse)
    assert same(made, encode(examples, words, 12, classes=True, cache=tmp_path))
    with pytest.raises(AssertionError, match="was called"):
        encode(examples, words, 13, classes=True, cache=tmp_path)


def test_labels_are_not_kept(words: Any, tmp_path: Path) -> None:
    encode(SINGLES, words, 12, classes=True, cache=tmp_path)
    turned = Examples(TEXTS, None, [1 - label for label in SINGLES.labels])
    assert encode(turned, words, 12, classes=True, cache=tmp_path).labels.tolist() == turned.labels


def test_what_makes_another_key(words: Any, tmp_path: Path) -> None:
    cased, left, plain = tokenizer(), tokenizer(), tokenizer()
    cased.backend_tokenizer.normalizer.lowercase = False
    left.truncation_side = "left"
    plain.model_input_names = ["input_ids", "attention_mask"]
    others = [
        (SINGLES, words, 12),
        (SINGLES, words, 13),
        (SINGLES, cased, 12),
        (SINGLES, left, 12),
        (SINGLES, plain, 12),
    ]
    texts = [["ab", "c"], ["a", "bc"], ["abc"], ["a\0b", "c"], ["a", "b\0c"], ["a", "b", "c"], ["c", "ab"]]
    others += [(Examples(text, None, None), words, 12) for text in texts]
    others += [(Examples(["a"], ["b"], None), words, 12), (Examples(["a", "b"], None, None), words, 12)]
    for examples, its, length in others:
        encode(examples, its, length, classes=True, cache=tmp_path)
    assert len(kept(tmp_path)) == len(others)


def test_calls_do_not_change_the_key(words: Any, tmp_path: Path) -> None:
    encode(SINGLES, words, 12, classes=True, cache=tmp_path)
    words(TEXTS[:3], padding="max_length", truncation=True, max_length=5)  # which sets up the tokenizer inside
    encode(SINGLES, words, 12, classes=True, cache=tmp_path)
    assert len(kept(tmp_path)) == 1


@pytest.mark.parametrize(
    "harm", ["torn", "empty", "text", "foreign", "other type", "other count", "backwards", "short"]
)
def test_a_file_that_is_not_ours_is_made_again(words: Any, tmp_path: Path, harm: str) -> None:
    made = encode(SINGLES, words, 12, classes=True, cache=tmp_path)
    (path,) = kept(tmp_path)
    intact = path.read_bytes()
    tensors = load(intact)
    backwards = tensors["starts"].clone()
    backwards[3] = 0
    harmed = {
        "torn": intact[:-40],
        "empty": b"",
        "text": b"not a tensor in sight",
        "foreign": save({"weight": torch.ones(3)}),
        "other type": save(tensors | {"ids": tensors["ids"].float()}),
        "other count": save(tensors | {"starts": tensors["starts"][[0, -1]]}),
        "backwards": save(tensors | {"starts": backwards}),
        "short": save(tensors | {"ids": tensors["ids"][:-1].clone()}),
    }
    path.write_bytes(harmed[harm])
    assert same(made, encode(SINGLES, words, 12, classes=True, cache=tmp_path))
    assert path.read_bytes() == intact


def test_a_cache_that_cannot_be_written(words: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder", encoding="utf-8")
    with pytest.warns(UserWarning, match="taken"):
        made = encode(SINGLES, words, 12, classes=True, cache=tmp_path / "taken")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(made, encode(SINGLES, words, 12, classes=True, cache=tmp_path / "taken"))


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path))
    assert user_cache() == tmp_path
    monkeypatch.delenv("UNCOLLAPSE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache/uncollapse"


def skewed() -> torch.Tensor:
    """Lengths of which most are short and a few are long."""
    return 5 + torch.empty(3001).exponential_(0.05, generator=torch.Generator().manual_seed(1)).long()


def waste(lengths: torch.Tensor, batches: list[torch.Tensor]) -> int:
    return sum(int(lengths[batch].max()) * len(batch) for batch in batches) - int(lengths.sum())


def test_buckets_have_each_example_once_in_an_order_of_chance() -> None:
    lengths = skewed()
    one, again, other = (length_buckets(lengths, 32, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.cat(one).sort().values.tolist() == list(range(3001))
    assert [len(batch) for batch in one].count(32) == 93  # all but one
    assert all(map(torch.equal, one, again))
    assert torch.cat(one).tolist() != torch.cat(other).tolist()
    means = torch.stack([lengths[batch].float().mean() for batch in one])
    assert not torch.equal(means, means.sort().values)


def test_buckets_fill_up_less() -> None:
    lengths = skewed()
    chance = list(torch.split(torch.randperm(3001, generator=torch.Generator().manual_seed(0)), 32))
    assert waste(lengths, length_buckets(lengths, 32, torch.Generator().manual_seed(0))) < 0.2 * waste(lengths, chance)


def test_an_evaluation_goes_by_length() -> None:
    lengths = torch.tensor([4, 1, 3, 1, 2])
    assert [batch.tolist() for batch in batches_by_length(lengths, 2)] == [[1, 3], [4, 2], [0]]
