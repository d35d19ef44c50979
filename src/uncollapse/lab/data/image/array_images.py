"""Pictures that lie in an array: torchvision's data sets and scikit-learn's digits."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, import_optional
from uncollapse.io.download import cause
from uncollapse.lab.data.image.image_source import Pictures

TEST, SPLIT_SEED = 300, 0  # of the digits: as in the recipe vit-digits


class Arrays:
    """The pictures of an array of bytes, (n, height, width, 3) or without the last for grey ones."""

    def __init__(self, data: NDArray[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def picture(self, number: int) -> Any:
        """A picture in colour."""
        image: Any = import_optional("PIL.Image", "data")
        return image.fromarray(numpy.ascontiguousarray(self.data[number])).convert("RGB")

    def fingerprint(self) -> str:
        """Of all bytes."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(str(self.data.shape).encode())
        digest.update(numpy.ascontiguousarray(self.data).data)
        return digest.hexdigest()[:16]


class Loader(NamedTuple):
    """How torchvision gets a set: its class, its folder, and the page that has its files."""

    dataset: str
    folder: str
    page: str


LOADERS = {
    "cifar10": Loader("CIFAR10", "cifar-10-batches-py", "www.cs.toronto.edu/~kriz/cifar.html"),
    "cifar100": Loader("CIFAR100", "cifar-100-python", "www.cs.toronto.edu/~kriz/cifar.html"),
    "stl10": Loader("STL10", "stl10_binary", "cs.stanford.edu/~acoates/stl10"),
    "fashion-mnist": Loader("FashionMNIST", "FashionMNIST", "github.com/zalandoresearch/fashion-mnist"),
}
STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


def of_torchvision(name: str, root: Path, unlabelled: bool = False) -> tuple[Pictures, Pictures]:
    """A set to learn from and one to be judged by, from their files below `root` or `root/name`, or else fetched.

    unlabelled: with STL-10's 100,000 pictures that have no labels; theirs is −1.
    """
    torchvision_ops.declare()
    loader = LOADERS[name]
    dataset: Any = getattr(import_optional("torchvision.datasets", "timm"), loader.dataset)
    if name == "stl10" and not unlabelled:  # nor need the 2.6 GB of pictures that have no labels be there
        dataset = type("STL10", (dataset,), {"train_list": dataset.train_list[:2]})
    place = next((folder for folder in (root, root / name) if (folder / loader.folder).is_dir()), root)
    learned = "train+unlabeled" if unlabelled else "train"
    parts = [{"split": part} if name == "stl10" else {"train": part == "train"} for part in (learned, "test")]
    try:
        train, test = (_set(dataset, place, part) for part in parts)
        return _pictures(train), _pictures(test)
    except Exception as error:  # the network, the disk, a torn file: what helps is the same
        raise UsageError(
            f"{place} has no intact folder {loader.folder}, and {name} cannot be fetched now ({cause(error)}). Get it "
            f"from {loader.page} and put that folder there, or name with --data-root a folder that has it."
        ) from error


def digits() -> tuple[Pictures, Pictures]:
    """scikit-learn's 1,797 handwritten digits of 8×8 pixels; the last 300 in a random order, always the same, judge."""
    bunch: Any = import_optional("sklearn.datasets", "data").load_digits()
    grey = numpy.rint(bunch.images * (255 / 16)).astype("uint8")
    found = Pictures.all_of(Arrays(grey), torch.from_numpy(bunch.target), tuple(map(str, bunch.target_names)))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(SPLIT_SEED))
    return found.chosen(order[:-TEST]), found.chosen(order[-TEST:])


def _set(dataset: Any, root: Path, part: dict[str, Any]) -> Any:
    """A part by torchvision, which compares the check sums of CIFAR and STL-10 before it opens their files."""
    try:
        return dataset(str(root), **part)
    except RuntimeError:  # not there, or not whole
        return dataset(str(root), **part, download=True)


def _pictures(found: Any) -> Pictures:
    data = numpy.asarray(found.data)
    if data.ndim == 4 and data.shape[1] == 3:  # STL-10 has its channels first
        data = data.transpose(0, 2, 3, 1)
    labels = found.labels if hasattr(found, "labels") else found.targets
    classes = getattr(found, "classes", STL10)
    return Pictures.all_of(Arrays(data), torch.as_tensor(numpy.asarray(labels)), tuple(classes))
