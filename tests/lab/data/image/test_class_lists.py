"""Lists of the classes that are taken from a set."""

import hashlib
from pathlib import Path

import numpy
import pytest
from tests.lab.data.image.made_up_images import COLORS, folder, pack

from uncollapse.errors import UsageError
from uncollapse.lab.data.image import image_sets
from uncollapse.lab.data.image.image_source import ImageSet


def load(root: Path, text: str | bytes, data: str = ".") -> ImageSet:
    path = root / "list.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return image_sets.load_image_set(data, root, str(path))


def made(root: Path, kind: str) -> Path:
    if kind == "folder":
        return folder(root)
    for part in ("train", "val"):
        pack(root / f"{part}.npz")
    return root


@pytest.mark.parametrize("kind", ["folder", "packed"])
def test_classes_are_counted_in_the_order_of_the_list(tmp_path: Path, kind: str) -> None:
    root = made(tmp_path, kind)
    found = load(root, "\ufeff# two of them\n\n  emu\tlarge bird\r\ncat\n")
    for part in (found.train, found.test):
        assert part.classes == ("emu", "cat")
        assert set(part.labels.tolist()) == {0, 1}
        for at in range(len(part)):
            color = numpy.asarray(part.image(at))[3, 3]
            assert color.argmax() == COLORS[part.classes[part.labels[at]]].index(200)
    digest = hashlib.sha256(b"emu\ncat\n").hexdigest()[:16]
    assert found.facts["class_list"] == {"name": "list.txt", "sha256": digest, "classes": 2}
    other = load(root, "cat\nemu")
    assert other.facts["class_list"]["sha256"] != digest
    assert other.train.fingerprint() != found.train.fingerprint()
    assert load(root, "emu\ncat").train.fingerprint() == found.train.fingerprint()


def test_folders_of_other_classes_are_not_looked_into(tmp_path: Path) -> None:
    root = folder(tmp_path)
    (root / "train/fox").mkdir()
    assert load(root, "cat\ndog").train.classes == ("cat", "dog")
    with pytest.raises(UsageError, match="classes 'fox'"):
        load(root, "cat\nfox")


def test_a_name_of_several_words(tmp_path: Path) -> None:
    for part in ("train", "val"):
        pack(tmp_path / f"{part}.npz", classes=numpy.array(["ankle boot", "bag", "coat"]))
    assert load(tmp_path, "bag of leather\nankle boot\n").train.classes == ("bag", "ankle boot")


@pytest.mark.parametrize("kind", ["folder", "packed"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got 0"),
        ("# nothing\n\n", "got 0"),
        ("cat\n", "got 1"),
        ("cat\ndog\ncat hairy\n", "once, got 'cat'"),
        ("cat\ndogs\n", r"classes .* 'dogs'\. Did you mean 'dog'\?"),
        ("cat\nn01443537 goldfish\n", r"do not have: 'n01443537'\. There are 'cat', 'dog', 'emu'\."),
        ("\n".join(f"x{number}" for number in range(9)), "'x0', 'x1', 'x2', 'x3', 'x4' and 4 more"),
        (b"\xff\xfe\x00cat", "UTF-8"),
    ],
)
def test_lists_that_do_not_fit(tmp_path: Path, kind: str, text: str | bytes, words: str) -> None:
    with pytest.raises(UsageError, match=rf"list\.txt .*{words}"):
        load(made(tmp_path, kind), text)


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.txt"):
        image_sets.load_image_set(".", folder(tmp_path), str(tmp_path / "none.txt"))


def test_a_list_without_pictures(tmp_path: Path) -> None:
    pack(tmp_path / "train.npz")
    pack(tmp_path / "val.npz", labels=numpy.zeros(6, int))
    with pytest.raises(UsageError, match=r"list\.txt"):
        load(tmp_path, "dog\nemu")
