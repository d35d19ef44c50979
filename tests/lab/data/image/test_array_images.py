"""torchvision's sets from tiny files in their own formats, and scikit-learn's digits."""

import pickle
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy
import pytest
from tests.lab.data.image.made_up_images import pack, put

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError
from uncollapse.lab.data.image import image_sets

torchvision_ops.declare()
datasets: Any = pytest.importorskip("torchvision.datasets")


def cifar(root: Path, name: str, labels: str) -> None:
    """A file of two pictures for each that torchvision wants."""
    dataset = getattr(datasets, name)
    for number, (file, _) in enumerate(dataset.train_list + dataset.test_list):
        rows = numpy.repeat(numpy.array([[200], [number]], "uint8"), 3072, 1)
        rows[:, 1024:] = 7
        put(root / dataset.base_folder / file, pickle.dumps({"data": rows, labels: [1, 0]}))
    meta = {dataset.meta["key"]: [f"class {number}" for number in range(3)]}
    put(root / dataset.base_folder / dataset.meta["filename"], pickle.dumps(meta))


def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the files for torchvision's own."""
    for module in (datasets.cifar, datasets.stl10):
        monkeypatch.setattr(module, "check_integrity", lambda path, md5=None: Path(path).is_file())


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise URLError(ConnectionRefusedError(111, "Connection refused"))

    for module in (datasets.cifar, datasets.stl10, datasets.mnist):
        monkeypatch.setattr(module, "download_and_extract_archive", refuse)


@pytest.mark.parametrize("below", ["", "cifar"])
@pytest.mark.parametrize(("name", "labels", "count"), [("cifar10", "labels", 10), ("cifar100", "fine_labels", 2)])
def test_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, labels: str, count: int, below: str) -> None:
    trusted(monkeypatch)
    offline(monkeypatch)
    cifar(tmp_path / (below and name), name.upper(), labels)
    found = image_sets.load_image_set(name, tmp_path)
    assert (found.name, found.facts) == (name, {"kind": "torchvision"})
    assert (len(found.train), len(found.test)) == (count, 2)
    assert found.train.labels.tolist() == [1, 0] * (count // 2)
    assert found.train.classes == ("class 0", "class 1", "class 2")
    first = found.train.image(0)
    assert (first.mode, first.size, first.getpixel((5, 9))) == ("RGB", (32, 32), (200, 7, 7))
    assert found.train.fingerprint() != found.test.fingerprint()


def test_packed_files_go_before(tmp_path: Path) -> None:
    for part in ("train", "test"):
        pack(tmp_path / f"cifar10/{part}.npz")
    assert image_sets.load_image_set("cifar10", tmp_path).facts["kind"] == "packed"


class Trap:
    """A pickle that leaves a trace when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_files_with_another_check_sum_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    for file, _ in datasets.CIFAR10.train_list + datasets.CIFAR10.test_list:
        put(tmp_path / "cifar-10-batches-py" / file, pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(UsageError, match="cifar-10-batches-py"):
        image_sets.load_image_set("cifar10", tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10", "fashion-mnist"])
def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    offline(monkeypatch)
    monkeypatch.setenv("UNCOLLAPSE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=rf"{name}.*--data-root"):
        image_sets.load_image_set(name, None)


def test_stl10_without_its_pictures_that_have_no_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted(monkeypatch)
    offline(monkeypatch)
    picture = numpy.zeros((3, 96, 96), "uint8")  # channels, then columns, then rows
    picture[0, 10, 20] = 255
    for part, count in (("train", 2), ("test", 3)):
        put(tmp_path / f"stl10_binary/{part}_X.bin", picture.tobytes() * count)
        put(tmp_path / f"stl10_binary/{part}_y.bin", bytes([1, 10, 2][:count]))
    found = image_sets.load_image_set("stl10", tmp_path)
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([0, 9], [0, 9, 1])
    assert (found.test.classes[9], len(found.test.classes)) == ("truck", 10)
    assert found.train.image(1).getpixel((10, 20)) == (255, 0, 0)


def fashion(root: Path) -> Path:
    for part, count in (("train", 3), ("t10k", 2)):
        pixels = numpy.full((count, 28, 28), 90, "uint8")
        raw = root / "FashionMNIST/raw"
        put(
            raw / f"{part}-images-idx3-ubyte",
            b"\0\0\x08\x03" + numpy.array(pixels.shape, ">i4").tobytes() + pixels.tobytes(),
        )
        put(
            raw / f"{part}-labels-idx1-ubyte",
            b"\0\0\x08\x01" + numpy.array([count], ">i4").tobytes() + bytes([9, 0, 9][:count]),
        )
    return root  # fmt: skip


def test_fashion_mnist_becomes_color(tmp_path: Path) -> None:
    found = image_sets.load_image_set("fashion-mnist", fashion(tmp_path))
    assert (len(found.train), len(found.test), found.train.classes[9]) == (3, 2, "Ankle boot")
    picture = found.train.image(0)
    assert (picture.mode, picture.size, picture.getpixel((5, 5))) == ("RGB", (28, 28), (90, 90, 90))
    put(tmp_path / "list.txt", b"Ankle boot\nBag\n")
    chosen = image_sets.load_image_set("fashion-mnist", tmp_path, str(tmp_path / "list.txt"))
    assert (chosen.train.numbers.tolist(), chosen.train.labels.tolist()) == ([0, 2], [0, 0])


def test_a_torn_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    path = fashion(tmp_path) / "FashionMNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="FashionMNIST"):
        image_sets.load_image_set("fashion-mnist", tmp_path)


def test_digits(tmp_path: Path) -> None:
    found = image_sets.load_image_set("digits", None)
    assert (found.name, found.facts) == ("digits", {"kind": "scikit-learn"})
    assert (len(found.train), len(found.test)) == (1497, 300)
    numbers = {*found.train.numbers.tolist(), *found.test.numbers.tolist()}
    assert len(numbers) == 1797
    assert found.train.classes == tuple("0123456789")
    picture = found.train.image(0)
    assert (picture.mode, picture.size) == ("RGB", (8, 8))
    assert numpy.asarray(picture).max() == 255
    assert image_sets.load_image_set("digits", tmp_path).train.fingerprint() == found.train.fingerprint()
