"""Sets of pictures by name, in folders and in packed files."""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.lab.data.image.made_up_images import COLORS, content, folder, pack, put

from uncollapse.errors import UsageError
from uncollapse.lab.data.image import image_files, image_sets
from uncollapse.lab.data.image.image_source import Images, UnreadableError, split_images


def colors(pictures: Images) -> list[str]:
    """The class that each picture's color stands for."""
    names = {color.index(200): name for name, color in COLORS.items()}
    return [names[int(numpy.asarray(pictures.image(at))[3, 3].argmax())] for at in range(len(pictures))]


def named(pictures: Images) -> list[str]:
    return [pictures.classes[label] for label in pictures.labels]


@pytest.mark.parametrize("part", ["val", "test", "valid", "validation"])
def test_a_folder(tmp_path: Path, part: str) -> None:
    folder(tmp_path / "pets", part)
    found = image_sets.load_image_set("pets", tmp_path)
    assert (found.name, found.facts) == ("pets", {"kind": "folder", "judged_by": part})
    assert found.train.classes == found.test.classes == ("cat", "dog", "emu")
    assert named(found.train) == colors(found.train) == ["cat"] * 3 + ["dog"] * 3 + ["emu"] * 3
    assert named(found.test) == colors(found.test) == ["cat", "dog", "emu"]
    assert image_sets.load_image_set(".", tmp_path / "pets").train.fingerprint() == found.train.fingerprint()
    assert image_sets.load_image_set(str(tmp_path / "pets"), None).name == "pets"


def test_what_else_lies_in_a_folder(tmp_path: Path) -> None:
    root = folder(tmp_path)
    before = image_sets.load_image_set(".", root)
    for name in (".DS_Store", "._0.png", "Thumbs.db", "notes.txt", ".hidden/0.png"):
        put(root / "train/cat" / name, content())
    put(root / "train/README.txt", b"")
    put(root / "train/.git/0.png", content())
    put(root / "test/0.JPEG", content())  # ImageNet's test pictures have no classes
    assert image_sets.load_image_set(".", root).train.fingerprint() == before.train.fingerprint()
    assert image_sets.load_image_set(".", root).facts["judged_by"] == "val"
    put(root / "train/cat/more/3.PNG", content())
    assert len(image_sets.load_image_set(".", root).train) == 10


def test_folders_that_are_links(tmp_path: Path) -> None:
    root = folder(tmp_path / "real")
    linked = tmp_path / "linked"
    (linked / "train").mkdir(parents=True)
    for name in COLORS:
        (linked / "train" / name).symlink_to(root / "train" / name, target_is_directory=True)
    (linked / "val").symlink_to(root / "val", target_is_directory=True)
    found = image_sets.load_image_set("linked", tmp_path)
    assert colors(found.train) == named(found.train)
    assert found.train.fingerprint() == image_sets.load_image_set("real", tmp_path).train.fingerprint()


def test_names_that_are_no_ascii(tmp_path: Path) -> None:
    folder(tmp_path, classes=("cat", "dog"))
    put(tmp_path / "train/cat/Füchse 🦊.png", content(COLORS["cat"]))
    found = image_sets.load_image_set(".", tmp_path).train
    assert (len(found), colors(found)) == (7, named(found))


def test_the_fingerprint_of_a_folder(tmp_path: Path) -> None:
    def fingerprint() -> str:
        return image_sets.load_image_set(".", tmp_path).train.fingerprint()

    folder(tmp_path)
    found = [fingerprint()]
    put(tmp_path / "train/dog/1.png", content(side=90))  # another size
    found.append(fingerprint())
    (tmp_path / "train/dog/1.png").rename(tmp_path / "train/dog/x.png")
    found.append(fingerprint())
    (tmp_path / "train/dog/x.png").unlink()
    found.append(fingerprint())
    assert len(set(found)) == 4
    assert fingerprint() == found[-1]


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "train/fox").mkdir()
    (root / "val/fox").mkdir()
    with pytest.raises(UsageError, match=r"classes 'fox'"):
        image_sets.load_image_set(".", root)
    (root / "train/fox").rmdir()
    with pytest.raises(UsageError, match=r"val.*'fox'"):
        image_sets.load_image_set(".", root)
    (root / "val/fox").rmdir()
    (root / "val/emu/0.JPEG").unlink()
    with pytest.raises(UsageError, match=r"val.*'emu'"):
        image_sets.load_image_set(".", root)
    (root / "val/emu").rmdir()
    with pytest.raises(UsageError, match=r"val.*'emu'"):
        image_sets.load_image_set(".", root)
    (root / "val").rename(root / "judged")
    with pytest.raises(UsageError, match="val/CLASS"):
        image_sets.load_image_set(".", root)
    put(tmp_path / "one/train/cat/0.png", content())
    with pytest.raises(UsageError, match="more classes"):
        image_sets.load_image_set("one", tmp_path)


def test_packed_files(tmp_path: Path) -> None:
    pack(tmp_path / "pets/train.npz")
    pack(tmp_path / "pets/test.npz", [content(color, form="JPEG") for color in COLORS.values()])
    found = image_sets.load_image_set("pets", tmp_path)
    assert (found.name, found.facts) == ("pets", {"kind": "packed", "judged_by": "test"})
    assert named(found.train) == colors(found.train) == ["cat", "dog", "emu"] * 2
    assert named(found.test) == colors(found.test) == ["cat", "dog", "emu"]
    assert found.train.fingerprint() != found.train.select(torch.tensor([1, 0])).fingerprint()
    assert found.train.labels.dtype == torch.int64


def test_a_packed_picture_that_is_torn(tmp_path: Path) -> None:
    for part in ("train", "val"):
        pack(tmp_path / f"{part}.npz", [content(), b"", content()[:40]])
    found = image_sets.load_image_set(".", tmp_path).train
    for at in (1, 2):
        with pytest.raises(UnreadableError, match=f"image {at} "):
            found.image(at)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": None}, r"must have data and offsets and labels"),
        ({"labels": None}, "must have data and offsets and labels"),
        ({"classes": None}, r"in classes their names, texts \(classes,\), got none"),
        ({"classes": numpy.arange(3)}, "in classes their names, .* got int64"),
        ({"classes": numpy.array([["cat", "dog", "emu"]])}, "in classes their names"),
        ({"classes": numpy.array(["cat", "cat", "emu"])}, "each name once"),
        ({"classes": numpy.array([{}, 1, 2], dtype=object)}, "not a valid"),
        ({"data": numpy.zeros(4000)}, "uint8.* got float64"),
        ({"data": numpy.zeros((2, 4000), "uint8")}, "uint8"),
        ({"data": numpy.zeros(3, "uint8")}, "never fall, from 0 to at most 3"),
        ({"offsets": numpy.array([0.0, 1.0])}, "in offsets whole numbers"),
        ({"offsets": numpy.array([0])}, "in offsets whole numbers"),
        ({"offsets": numpy.array([0, 9, 3, 12, 13, 14, 15])}, "never fall"),
        ({"offsets": numpy.array([0, 9, 3, 12, 13, 14, 15], "uint64")}, "never fall"),
        ({"offsets": numpy.arange(-1, 6)}, "never fall"),
        ({"labels": numpy.zeros(5, "uint8")}, "in labels 6 whole numbers"),
        ({"labels": numpy.zeros(6)}, "in labels 6 whole numbers, got float64"),
        ({"labels": numpy.array([0, 1, 2, 3, 0, 0])}, "3 classes, and labels 0 … 3"),
        ({"labels": numpy.array([0, 1, 2, -1, 0, 0])}, "3 classes, and labels -1 … 2"),
    ],
)
def test_packed_files_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    pack(tmp_path / "train.npz", **changes)
    pack(tmp_path / "val.npz")
    with pytest.raises(UsageError, match=rf"train\.npz .*{words}"):
        image_sets.load_image_set(".", tmp_path)


def test_packed_files_of_other_classes(tmp_path: Path) -> None:
    pack(tmp_path / "train.npz")
    with pytest.raises(UsageError, match=r"val\.npz"):
        image_sets.load_image_set(".", tmp_path)
    pack(tmp_path / "val.npz", classes=numpy.array(["cat", "dog", "fox"]))
    with pytest.raises(UsageError, match="'emu', 'fox'"):
        image_sets.load_image_set(".", tmp_path)
    pack(tmp_path / "val.npz", classes=numpy.array(["dog", "cat", "emu"]))
    with pytest.raises(UsageError, match="another order"):
        image_sets.load_image_set(".", tmp_path)
    for part in ("train", "val"):
        pack(tmp_path / f"{part}.npz", [content()], classes=numpy.array(["cat"]))
    with pytest.raises(UsageError, match=r"classes.*'cat'"):
        image_sets.load_image_set(".", tmp_path)


def test_a_file_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "SPARE", 1000)
    pack(tmp_path / "val.npz")
    numpy.savez_compressed(tmp_path / "train.npz", data=numpy.zeros(10**6, "uint8"))
    with pytest.raises(UsageError, match="unpack to"):
        image_sets.load_image_set(".", tmp_path)


def test_damaged_packed_files_are_read_or_refused(tmp_path: Path) -> None:
    path, numbers, refused = pack(tmp_path / "train.npz"), random.Random(0), 0
    pack(tmp_path / "val.npz")
    intact = path.read_bytes()
    for _ in range(120):
        damaged = bytearray(intact[: numbers.randrange(len(intact))] if numbers.random() < 0.2 else intact)
        for _ in range(min(len(damaged), 3)):
            damaged[numbers.randrange(len(damaged))] = numbers.randrange(256)
        path.write_bytes(damaged)
        try:
            assert len(image_sets.load_image_set(".", tmp_path).train) == 6
        except UsageError:
            refused += 1
    assert refused > 60


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'cifar10'"):
        image_sets.load_image_set("cifar-10", tmp_path)
    with pytest.raises(UsageError, match="'my pets'"):
        image_sets.load_image_set("my pets", tmp_path)
    with pytest.raises(UsageError, match="train/CLASS"):
        image_sets.load_image_set(".", tmp_path)
    with pytest.raises(UsageError, match=r"nowhere.*--data-root"):
        image_sets.load_image_set("pets", tmp_path / "nowhere")


def numbered(count: int) -> Images:
    found = image_sets.load_image_set("digits", None).train
    return found.select(torch.arange(count))


@pytest.mark.parametrize(
    ("examples", "holdout", "sizes"),
    [(0, 0.0, [20]), (0, 0.25, [15, 5]), (8, 0.0, [8]), (8, 0.5, [8, 4]), (16, 0.25, [16, 4]), (20, 0.0, [20])],
)
def test_split(examples: int, holdout: float, sizes: list[int]) -> None:
    given = numbered(20)
    parts = split_images(given, examples, holdout, seed=1)
    assert list(parts) == ["train", "validation"][: len(sizes)]
    assert [len(part) for part in parts.values()] == sizes
    numbers = torch.cat([part.numbers for part in parts.values()]).tolist()
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) <= set(given.numbers.tolist())
    again, other = (split_images(given, examples, holdout, seed) for seed in (1, 2))
    assert parts["train"].fingerprint() == again["train"].fingerprint() != other["train"].fingerprint()


@pytest.mark.parametrize(
    ("examples", "holdout", "words"),
    [
        (21, 0.0, "examples 21 and 0"),
        (16, 0.5, "examples 16 and 8"),
        (0, 1.0, r"holdout 1\.0"),
        (0, 0.01, r"holdout 0\.01"),
        (10, 0.04, r"holdout 0\.04"),
    ],
)
def test_splits_that_cannot_be(examples: int, holdout: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        split_images(numbered(20), examples, holdout, seed=0)
