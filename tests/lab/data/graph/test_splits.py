"""Splits do not overlap and are what their name says."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uncollapse.errors import UsageError
from uncollapse.lab.data.graph.splits import SPLITS, OwnSplits, Split, choose_split, split_by_class, split_by_count

Y = torch.arange(100) % 3


def thirds(shift: int) -> Split:
    part = (torch.arange(100) + shift) % 3
    return Split(part == 0, part == 1, part == 2)


OWN = OwnSplits((thirds(0),), (thirds(1),))
TEN = OwnSplits(tuple(map(thirds, range(10))), tuple(map(thirds, range(10))), fixed=True)


def same(a: Split, b: Split) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 5), st.sampled_from([(0.6, 0.2), (0.48, 0.32)])
)
def test_random_splits_cover_each_node_once_and_train_on_every_class(
    sizes: list[int], seed: int, shares: tuple[float, float]
) -> None:
    y = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    split = split_by_class(y, shares, seed)
    assert torch.equal(torch.stack(split).sum(0), torch.ones_like(y))
    for label, size in enumerate(sizes):
        counts = [int((mask & (y == label)).sum()) for mask in split]
        assert counts[0] >= 1
        assert abs(counts[0] - shares[0] * size) <= 0.5 or counts[0] == 1
        assert abs(counts[1] - shares[1] * size) <= 1


def test_by_count_has_as_many_of_each_class() -> None:
    split = split_by_count(Y, 5, 20, 0)
    assert Y[split.train].bincount().tolist() == [5, 5, 5]
    assert (int(split.validation.sum()), int(split.test.sum())) == (20, 65)
    assert torch.equal(torch.stack(split).sum(0), torch.ones_like(Y))


@pytest.mark.parametrize("split", ["60/20/20", "48/32/20"])
def test_random_splits_are_said_by_their_index(tmp_path: Path, split: str) -> None:
    first, again, other = (choose_split(split, index, Y, OWN, name="a", root=tmp_path) for index in (0, 0, 1))
    assert same(first, again)
    assert not same(first, other)


def test_own_splits(tmp_path: Path) -> None:
    for index in (0, 7):
        assert same(choose_split("published", index, Y, OWN, name="a", root=tmp_path), thirds(0))
        assert same(choose_split("public", index, Y, OWN, name="a", root=tmp_path), thirds(1))
        for name in ("published", "public", "48/32/20"):
            assert same(choose_split(name, index, Y, TEN, name="a", root=tmp_path), thirds(index))
    assert int(choose_split("60/20/20", 0, Y, TEN, name="a", root=tmp_path).train.sum()) == 60
    with pytest.raises(UsageError, match="split_index 10"):
        choose_split("public", 10, Y, TEN, name="a", root=tmp_path)


def save_masks(folder: Path, index: int, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    parts = dict(zip(("train_mask", "val_mask", "test_mask"), thirds(index), strict=True))
    numpy.savez(
        folder / f"a_split_0.6_0.2_{index}.npz", **({k: v.numpy().astype("uint8") for k, v in parts.items()} | changes)
    )


def test_geom_gcn_files_come_before_chance(tmp_path: Path) -> None:
    for index in range(3):
        save_masks(tmp_path / "geom_gcn_splits", index)
    assert same(choose_split("48/32/20", 2, Y, OWN, name="a", root=tmp_path), thirds(2))
    assert int(choose_split("48/32/20", 2, Y, OWN, name="b", root=tmp_path).train.sum()) == 48
    with pytest.raises(UsageError, match="split_index 12"):
        choose_split("48/32/20", 12, Y, OWN, name="a", root=tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_mask": numpy.ones(99)}, "masks of 100"),
        ({"train_mask": numpy.full(100, 2)}, "booleans"),
        ({"train_mask": numpy.ones(100)}, "in two of training"),
        ({"test_mask": numpy.zeros(100)}, "no node for"),
        ({"val_mask": numpy.array(["a"] * 100)}, "must have numbers in val_mask"),
    ],
)
def test_masks_that_are_none(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    save_masks(tmp_path / "geom_gcn_splits", 0, **changes)
    with pytest.raises(UsageError, match=words):
        choose_split("48/32/20", 0, Y, OWN, name="a", root=tmp_path)


def test_the_split_of_contranorm_is_a_file_of_numbers_of_nodes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.npz.*PKU-ML/ContraNorm"):
        choose_split("contranorm", 0, Y, OWN, name="a", root=tmp_path)
    (tmp_path / "contranorm_splits").mkdir()
    path = tmp_path / "contranorm_splits" / "a.npz"
    numpy.savez(path, train=[5, 1], val=[2], test=[99])
    split = choose_split("contranorm", 4, Y, OWN, name="a", root=tmp_path)
    assert [mask.nonzero().flatten().tolist() for mask in split] == [[1, 5], [2], [99]]
    bad: list[Any] = [[100], [-1], [1, 1], [0.5], [[1]]]
    for train in bad:
        numpy.savez(path, train=train, val=[2], test=[99])
        with pytest.raises(UsageError, match="below 100"):
            choose_split("contranorm", 0, Y, OWN, name="a", root=tmp_path)


def test_names_and_indices_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=", ".join(SPLITS)):
        choose_split("random", 0, Y, OWN, name="a", root=tmp_path)
    with pytest.raises(UsageError, match="-1"):
        choose_split("public", -1, Y, OWN, name="a", root=tmp_path)
