"""Images with their classes from any source, decoded on access; splits of them, and lists of classes."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io.files import expand_user, user_cache
from uncollapse.io.images import UnreadableError
from uncollapse.lab.data.image import image_files
from uncollapse.lab.runs.results import fingerprint

__all__ = ["ImageSet", "ImageSource", "Images", "UnreadableError", "split_images"]


class ImageSource(Protocol):
    """Where images are stored. It can be passed to another process."""

    def __len__(self) -> int: ...

    def image(self, number: int) -> Any:
        """Return an RGB image of Pillow, or raise UnreadableError."""
        ...

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change when the images do."""
        ...


@dataclass(frozen=True)
class Images:
    """Some images of a source. numbers (n,): their indices in it. labels (n,): their class indices."""

    source: ImageSource
    numbers: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    @classmethod
    def all_of(cls, source: ImageSource, labels: Tensor, classes: tuple[str, ...]) -> "Images":
        """Return all images of a source, in their order."""
        return cls(source, torch.arange(len(source)), labels.long(), classes)

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, which: Tensor) -> "Images":
        """Return the images at some indices, in their order."""
        return Images(self.source, self.numbers[which], self.labels[which], self.classes)

    def image(self, at: int) -> Any:
        """Return the image at an index, or raise UnreadableError."""
        return self.source.image(int(self.numbers[at]))

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change when the images, their classes or their order do."""
        own = fingerprint((self.numbers, self.labels))
        return hashlib.sha256(f"{self.source.fingerprint()} {own} {self.classes}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ImageSet:
    """Training and test images of the same classes. facts: what a record says of them."""

    name: str
    train: Images
    test: Images
    facts: dict[str, Any]


def split_images(images: Images, examples: int, holdout: float, seed: int) -> dict[str, Images]:
    """Draw the training images, and images held out to choose settings on.

    Args:
        images: All of them.
        examples: Number of training images; 0: all that are not held out.
        holdout: Share of the examples (of all images, where examples is 0) that is held out; 0: none.
        seed: Seed of the draw.

    Returns:
        The split "train", and "validation" if any images are held out.
    """
    count = len(images)
    held = round(holdout * (examples or count))
    most = count - held
    if examples > most:
        raise UsageError(f"There are {count} training images, too few for examples {examples} and {held} held out.")
    if most < 1 or (holdout and not held):
        raise UsageError(f"holdout {holdout} of {count} images leaves a split empty; use another share, or 0.")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    parts = {"train": images.select(order[held : held + (examples or most)])}
    return parts | ({"validation": images.select(order[:held])} if held else {})


SHOWN = 5  # names in an error message


@dataclass(frozen=True)
class ClassList:
    """List of the classes to use, such as ImageNet-100: the lines of a file without empty ones and comments."""

    path: Path
    lines: tuple[str, ...]

    def classes(self, known: Sequence[str]) -> tuple[str, ...]:
        """Return the classes in the order of the list; an image set must have all of them.

        A line is the name of a class, or starts with it: `n01443537 goldfish`.
        """
        names = set(known)
        found = [line if line in names else line.split()[0] for line in self.lines]
        repeated = [name for name, times in Counter(found).items() if times > 1]
        if repeated:
            raise UsageError(f"{self.path} must name each class once, got {quote_names(repeated)} repeatedly.")
        missing = [name for name in found if name not in names]
        if missing:
            hint = did_you_mean(missing[0], known) or f" There are {quote_names(known)}."
            raise UsageError(f"{self.path} names classes that the images do not have: {quote_names(missing)}.{hint}")
        return tuple(found)

    def facts(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return what a record says of the list. sha256: the first digits of `sha256sum` of the bare names."""
        digest = hashlib.sha256("".join(f"{name}\n" for name in classes).encode()).hexdigest()
        return {"name": self.path.name, "sha256": digest[:16], "classes": len(classes)}


def read_class_list(path: Path) -> ClassList:
    """Read a list from a file. Empty lines and lines that start with # are left out."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"The list of classes {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a list of classes: expected UTF-8 text with one class per line.") from error
    lines = tuple(line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#"))
    if len(lines) < 2:
        raise UsageError(f"{path} must name two or more classes, one per line, got {len(lines)}.")
    return ClassList(path, lines)


def select_classes(images: Images, classes: tuple[str, ...]) -> Images:
    """Return the images of some classes, which are then numbered in this order."""
    numbers = torch.full((len(images.classes),), -1)
    for number, name in enumerate(classes):
        numbers[images.classes.index(name)] = number
    labels = numbers[images.labels]
    kept = labels >= 0
    return Images(images.source, images.numbers[kept], labels[kept], classes)


def quote_names(names: Sequence[str]) -> str:
    """Return some names for a message.

    >>> listed(["cat"]), listed(list("abcdefg"))
    ("'cat'", "'a', 'b', 'c', 'd', 'e' and 2 more")
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


NAMES = (
    "digits",
    *image_files.TORCHVISION_SETS,
)  # sets that need no folder of the user's: they are downloaded or installed
WITHOUT_LABELS = "stl10"
PACKED = "train.npz and val.npz or test.npz (arrays data, offsets, labels and classes)"


def load_image_set(data: str, root: Path | None, class_list: str = "", unlabelled: bool = False) -> ImageSet:
    """Return the image set that `data` names.

    Args:
        data: A folder below the root ("." for the root itself) with packed files or images in ImageNet's layout, or one
            of `NAMES`.
        root: Folder of the data; None: the current one, or the user's cache for `NAMES`.
        class_list: Text file with the classes to use, one per line, in the order of their numbers; "": all.
        unlabelled: Include training images without labels, with label −1. Only STL-10 has them.
    """
    if unlabelled and (data != WITHOUT_LABELS or class_list):
        raise UsageError(f"Only {WITHOUT_LABELS} with all classes has images without labels; leave out --unlabelled.")
    wanted = read_class_list(expand_user(class_list)) if class_list else None
    top = expand_user(root or (user_cache() if data in NAMES else Path()))
    folder = top / expand_user(data)
    if (folder / "train").is_dir() and not (folder / "train.npz").is_file():
        train, test, part = image_files.read_folder(folder, wanted)
        facts: dict[str, Any] = {"kind": "folder", "judged_by": part}
    else:
        train, test, facts = _load_all_classes(data, top, folder, unlabelled)
        train, test = _select_classes(folder, train, test, wanted)
    if wanted is not None:
        facts["class_list"] = wanted.facts(train.classes)
    return ImageSet(folder.resolve().name, train, test, facts)


def load_unlabelled(data: str, root: Path | None) -> ImageSet | None:
    """Return the images of a plain folder, for training only; None if `data` is not a folder without splits."""
    folder = expand_user((root or Path()) / data)
    if data in NAMES or not folder.is_dir() or (folder / "train").is_dir() or (folder / "train.npz").is_file():
        return None
    found = image_files.read_unlabelled(folder)
    if found is None:
        return None
    return ImageSet(folder.resolve().name, found, found.select(found.numbers[:0]), {"kind": "folder without classes"})


def _load_all_classes(data: str, top: Path, folder: Path, unlabelled: bool) -> tuple[Images, Images, dict[str, Any]]:
    """Return the training and test images of all classes, and facts about the set."""
    if (folder / "train.npz").is_file():
        part = next((part for part in image_files.TEST_SPLITS if (folder / f"{part}.npz").is_file()), None)
        if part is None:
            raise UsageError(f"{folder} has train.npz, but neither val.npz nor test.npz next to it.")
        train, test = (image_files.read_packed(folder / f"{name}.npz") for name in ("train", part))
        return train, test, {"kind": "packed", "judged_by": part}
    if data == "digits":
        return *image_files.load_digits(), {"kind": "scikit-learn"}
    if data in NAMES:
        return *image_files.load_torchvision(data, top, unlabelled), {"kind": "torchvision"}
    raise UsageError(_not_found(data, top, folder))


def _select_classes(folder: Path, train: Images, test: Images, wanted: ClassList | None) -> tuple[Images, Images]:
    """Return the images of the classes in the list, or of all."""
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        what = f"differ in {quote_names(odd)}" if odd else "have them in another order"
        raise UsageError(f"{folder} must have the same classes in its training and test splits, which {what}.")
    if len(train.classes) < 2:
        raise UsageError(f"{folder} must have two or more classes, got {quote_names(train.classes)}.")
    if wanted is None:
        return train, test
    classes = wanted.classes(train.classes)
    parts = tuple(select_classes(part, classes) for part in (train, test))
    if not all(map(len, parts)):
        raise UsageError(f"{folder} has no training or test images of the classes in {wanted.path}.")
    return parts[0], parts[1]


def _not_found(data: str, top: Path, folder: Path) -> str:
    """Return the message of a set that was not found."""
    if not top.is_dir():
        return f"There is no folder {top}; set --data-root to the one that has the data, or use --data digits."
    layout = f"A folder has {image_files.LAYOUT}, or {PACKED}."
    if folder.is_dir():
        return f"{folder.resolve()} has no images in a known layout. {layout}"
    hint = did_you_mean(data, NAMES)
    return f"data must be one of {', '.join(NAMES)} or a folder in {top.resolve()}, got {data!r}.{hint} {layout}"
