"""Sources of images: folders per class as in ImageNet, packed .npz files, and arrays of torchvision and scikit-learn.

A folder has `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`. A packed file has the arrays `data` (the bytes of all image
files), `offsets`, `labels` and `classes`.
"""

import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, file_errors, import_optional
from uncollapse.io.download import cause
from uncollapse.io.images import IMAGE_SUFFIXES, decode_image
from uncollapse.io.tensor_files import check_growth, read_member, read_npz
from uncollapse.lab.data.image.image_source import ClassList, Images, UnreadableError, quote_names

TEST_SPLITS = ("test", "val", "valid", "validation")  # the first one that exists is the test split
SIZES = 10_000  # at most so many file sizes are read: over a network that takes time
LAYOUT = "train/CLASS/*.JPEG and val/CLASS/*.JPEG, one folder per class (test, valid or validation may replace val)"


class ImageFiles:
    """Images in files below a folder. The names are one byte string, as there may be millions."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        coded = [os.fsencode(name) for name in names]
        self.folder, self.names = os.fspath(folder), b"".join(coded)
        self.ends = numpy.fromiter(accumulate(map(len, coded), initial=0), "int64", len(coded) + 1)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def path(self, number: int) -> str:
        """Return the path of an image."""
        return os.path.join(self.folder, os.fsdecode(self.names[self.ends[number] : self.ends[number + 1]]))

    def image(self, number: int) -> Any:
        """Return an RGB image."""
        path = self.path(number)
        try:
            with open(path, "rb") as file:
                return decode_image(file, path)
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror or error}") from error

    def fingerprint(self) -> str:
        """Return a fingerprint of all names and of some file sizes, at even steps."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        sizes = [_size(self.path(number)) for number in range(0, len(self), -(-len(self) // SIZES))]
        digest = hashlib.sha256(self.names)
        digest.update(f"{self.ends.tolist()} {sizes}".encode())
        return digest.hexdigest()[:16]


def read_folder(folder: Path, wanted: ClassList | None = None) -> tuple[Images, Images, str]:
    """Return the training images, the test images, and the name of the folder of the latter.

    Args:
        folder: Has `train` and one of `TEST_SPLITS`, with one folder per class in both.
        wanted: Classes to use, in this order; None: all, in alphabetical order. Only their folders are read.
    """
    there = _folders(folder / "train")
    classes = tuple(there) if wanted is None else wanted.classes(there)
    if len(classes) < 2:
        raise UsageError(f"{folder / 'train'} must have folders of two or more classes, got {len(classes)}.")
    part = next((part for part in TEST_SPLITS if set(there) & set(_folders(folder / part))), None)
    if part is None:
        raise UsageError(f"{folder} has training images, but no test images: expected {LAYOUT}.")
    unknown = [name for name in _folders(folder / part) if name not in set(there)]
    if unknown:
        raise UsageError(f"{folder / part} has classes that train does not have: {quote_names(unknown)}.")
    return _read_classes(folder / "train", classes), _read_classes(folder / part, classes), part


def read_unlabelled(folder: Path) -> Images | None:
    """Return all images in a folder and its subfolders, as one class; None if there are none."""
    there = folder.resolve()
    names = sorted(_files(there.parent, there.name))
    if not names:
        return None
    return Images.all_of(ImageFiles(there.parent, names), torch.zeros(len(names), dtype=torch.long), (there.name,))


def _read_classes(folder: Path, classes: tuple[str, ...]) -> Images:
    files = [sorted(_files(folder, name)) for name in classes]
    empty = [name for name, found in zip(classes, files, strict=True) if not found]
    if empty:
        raise UsageError(
            f"{folder} has no images of the classes {quote_names(empty)}. Add some, remove these folders, or "
            f"leave the classes out with --class-list. Images end in {', '.join(sorted(IMAGE_SUFFIXES))}."
        )
    labels = torch.repeat_interleave(torch.arange(len(classes)), torch.tensor([len(found) for found in files]))
    return Images.all_of(ImageFiles(folder, [name for found in files for name in found]), labels, classes)


def _folders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in a folder, without hidden ones; none if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}.") from error


def _files(folder: Path, name: str) -> Iterator[str]:
    """Yield the images of a class, including those in subfolders, as paths relative to the folder."""
    start = len(os.fspath(folder)) + 1
    for place, within, names in os.walk(folder / name, onerror=_raise_unless_missing):
        within[:] = [one for one in within if not one.startswith(".")]
        for one in names:
            if not one.startswith(".") and os.path.splitext(one)[1].lower() in IMAGE_SUFFIXES:
                yield f"{place[start:]}/{one}"


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # a class without a folder has no images, which is reported elsewhere
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}.") from error


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


PACKED_ARRAYS = ("data", "offsets", "labels")
SPARE = 2**26  # bytes that a small file may unpack to: image files hardly compress


class PackedImages:
    """Images of a packed file: image i has the bytes offsets[i] to offsets[i + 1] of `data`."""

    def __init__(self, name: str, data: NDArray[Any], offsets: NDArray[Any]) -> None:
        self.name, self.data, self.offsets = name, data, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def image(self, number: int) -> Any:
        """Return an RGB image."""
        content = self.data[self.offsets[number] : self.offsets[number + 1]].tobytes()
        return decode_image(io.BytesIO(content), f"image {number} of {self.name}")

    def fingerprint(self) -> str:
        """Return a fingerprint of all bytes."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(numpy.ascontiguousarray(self.data).data)
        digest.update(numpy.ascontiguousarray(self.offsets).data)
        return digest.hexdigest()[:16]


def read_packed(path: Path) -> Images:
    """Read a packed file and check it. Images are decoded later, so one may still turn out to be unreadable."""
    check_growth(path, SPARE)
    data, offsets, labels = read_npz(path, PACKED_ARRAYS).values()
    classes = _packed_classes(path)
    _check_offsets(path, data, offsets)
    count = len(offsets) - 1
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise UsageError(f"{path} must have in labels {count} whole numbers, got {labels.dtype} of {labels.shape}.")
    if not 0 <= labels.min() <= labels.max() < len(classes):
        raise UsageError(f"{path} has {len(classes)} classes, and labels {labels.min()} … {labels.max()}.")
    source = PackedImages(path.name, data, offsets)
    return Images.all_of(source, torch.from_numpy(labels.astype("int64")), classes)


def _packed_classes(path: Path) -> tuple[str, ...]:
    with file_errors(path, "file of packed images"), zipfile.ZipFile(path) as file:
        found = read_member(file, "classes") if "classes.npy" in file.namelist() else None
    if found is None or found.dtype.kind != "U" or found.ndim != 1:
        got = "none" if found is None else f"{found.dtype} of {found.shape}"
        raise UsageError(f"{path} must have in classes their names, texts (classes,), got {got}.")
    classes = tuple(map(str, found))
    if len(set(classes)) != len(classes):
        raise UsageError(f"{path} must have in classes each name once.")
    return classes


def _check_offsets(path: Path, data: NDArray[Any], offsets: NDArray[Any]) -> None:
    if data.ndim != 1 or data.dtype != numpy.uint8:
        raise UsageError(f"{path} must have in data bytes, uint8 (bytes,), got {data.dtype} of {data.shape}.")
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < 2:
        raise UsageError(
            f"{path} must have in offsets whole numbers (images + 1,), got {offsets.dtype} of {offsets.shape}."
        )
    if offsets[0] < 0 or offsets[-1] > len(data) or (offsets[1:] < offsets[:-1]).any():
        raise UsageError(f"{path} must have in offsets numbers that never fall, from 0 to at most {len(data)}.")


DIGITS_TEST, SPLIT_SEED = 300, 0  # of the digits: as in the recipe vit-digits


class ArrayImages:
    """Images in an array of bytes: (n, height, width, 3), or (n, height, width) for grayscale."""

    def __init__(self, data: NDArray[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def image(self, number: int) -> Any:
        """Return an RGB image."""
        image: Any = import_optional("PIL.Image", "data")
        return image.fromarray(numpy.ascontiguousarray(self.data[number])).convert("RGB")

    def fingerprint(self) -> str:
        """Return a fingerprint of all bytes."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(str(self.data.shape).encode())
        digest.update(numpy.ascontiguousarray(self.data).data)
        return digest.hexdigest()[:16]


class TorchvisionSet(NamedTuple):
    """How torchvision loads a set: its class, its folder, and the page that has its files."""

    dataset: str
    folder: str
    page: str


TORCHVISION_SETS = {
    "cifar10": TorchvisionSet("CIFAR10", "cifar-10-batches-py", "www.cs.toronto.edu/~kriz/cifar.html"),
    "cifar100": TorchvisionSet("CIFAR100", "cifar-100-python", "www.cs.toronto.edu/~kriz/cifar.html"),
    "stl10": TorchvisionSet("STL10", "stl10_binary", "cs.stanford.edu/~acoates/stl10"),
    "fashion-mnist": TorchvisionSet("FashionMNIST", "FashionMNIST", "github.com/zalandoresearch/fashion-mnist"),
}
STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


def load_torchvision(name: str, root: Path, unlabelled: bool = False) -> tuple[Images, Images]:
    """Return the training and test images, from files below `root` or `root/name`, or else downloaded.

    unlabelled: include STL-10's 100,000 images without labels, with label −1.
    """
    torchvision_ops.declare()
    loader = TORCHVISION_SETS[name]
    dataset: Any = getattr(import_optional("torchvision.datasets", "timm"), loader.dataset)
    if name == "stl10" and not unlabelled:  # then the 2.6 GB of unlabelled images need not exist
        dataset = type("STL10", (dataset,), {"train_list": dataset.train_list[:2]})
    place = next((folder for folder in (root, root / name) if (folder / loader.folder).is_dir()), root)
    learned = "train+unlabeled" if unlabelled else "train"
    parts = [{"split": part} if name == "stl10" else {"train": part == "train"} for part in (learned, "test")]
    try:
        train, test = (_set(dataset, place, part) for part in parts)
        return _from_torchvision(train), _from_torchvision(test)
    except Exception as error:  # the network, the disk, a torn file: what helps is the same
        raise UsageError(
            f"{place} has no valid folder {loader.folder}, and {name} cannot be fetched now ({cause(error)}). Get it "
            f"from {loader.page} and put that folder there, or name with --data-root a folder that has it."
        ) from error


def load_digits() -> tuple[Images, Images]:
    """Return scikit-learn's 1,797 digits of 8×8 pixels; the last 300 in a fixed random order are for the test."""
    bunch: Any = import_optional("sklearn.datasets", "data").load_digits()
    grey = numpy.rint(bunch.images * (255 / 16)).astype("uint8")
    found = Images.all_of(ArrayImages(grey), torch.from_numpy(bunch.target), tuple(map(str, bunch.target_names)))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(SPLIT_SEED))
    return found.select(order[:-DIGITS_TEST]), found.select(order[-DIGITS_TEST:])


def _set(dataset: Any, root: Path, part: dict[str, Any]) -> Any:
    """Load a split with torchvision, which checks the checksums of CIFAR and STL-10 before it opens their files."""
    try:
        return dataset(str(root), **part)
    except RuntimeError:  # not there, or not whole
        return dataset(str(root), **part, download=True)


def _from_torchvision(found: Any) -> Images:
    data = numpy.asarray(found.data)
    if data.ndim == 4 and data.shape[1] == 3:  # STL-10 has its channels first
        data = data.transpose(0, 2, 3, 1)
    labels = found.labels if hasattr(found, "labels") else found.targets
    classes = getattr(found, "classes", STL10)
    return Images.all_of(ArrayImages(data), torch.as_tensor(numpy.asarray(labels)), tuple(classes))
