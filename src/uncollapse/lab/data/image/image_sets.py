"""Load image sets by name: folders in ImageNet's layout, packed files, torchvision's sets, scikit-learn's digits."""

from pathlib import Path
from typing import Any

from uncollapse.errors import UsageError, did_you_mean
from uncollapse.io.files import expand_user, user_cache
from uncollapse.lab.data.image import image_files, image_source
from uncollapse.lab.data.image.image_source import ClassList, Images, ImageSet

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
    wanted = image_source.read_class_list(expand_user(class_list)) if class_list else None
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
        what = f"differ in {image_source.quote_names(odd)}" if odd else "have them in another order"
        raise UsageError(f"{folder} must have the same classes in its training and test splits, which {what}.")
    if len(train.classes) < 2:
        raise UsageError(f"{folder} must have two or more classes, got {image_source.quote_names(train.classes)}.")
    if wanted is None:
        return train, test
    classes = wanted.classes(train.classes)
    parts = tuple(image_source.select_classes(part, classes) for part in (train, test))
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
