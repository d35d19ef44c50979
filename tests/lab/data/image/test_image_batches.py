"""Batches of pictures: the same whoever reads them, without those that cannot be read."""

import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.lab.data.image.made_up_images import content, folder, pack
from torch import Tensor

from uncollapse.errors import UsageError
from uncollapse.lab.data.image import image_files, image_sets
from uncollapse.lab.data.image.image_batches import GRACE, ImageBatch, ImageBatches, epoch_order
from uncollapse.lab.data.image.image_source import Images
from uncollapse.lab.engine.seeding import get_random_state


def noisy(picture: Any) -> Tensor:
    """A picture with random numbers of all three kinds."""
    draws = random.random() + numpy.random.rand() + torch.rand(())  # noqa: NPY002
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1) + draws


def plain(picture: Any) -> Tensor:
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1)


def pictures(tmp_path: Path, files: list[bytes] | None = None) -> Images:
    return image_files.read_packed(pack(tmp_path / "train.npz", files or [content((k, 0, 0)) for k in range(12)]))


def equal(one: list[ImageBatch], other: list[ImageBatch]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in pairs)


def test_labels_go_with_their_pictures(tmp_path: Path) -> None:
    batches = list(ImageBatches(pictures(tmp_path), [5, 5, 2, 11, 0], 2, plain))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [int(image[0, 0, 0]) for batch in batches for image in batch.images] == [5, 5, 2, 11, 0]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [2, 2, 2, 2, 0]
    assert batches[0].labels.dtype == torch.int64
    assert len(ImageBatches(pictures(tmp_path), range(5), 2, plain)) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_processes_change_nothing(tmp_path: Path, workers: int) -> None:
    found, order = pictures(tmp_path), epoch_order(12, 3)
    alone = list(ImageBatches(found, order, 5, noisy, seed=7))
    assert equal(alone, list(ImageBatches(found, order, 5, noisy, seed=7, workers=workers)))
    assert equal(alone[1:], list(ImageBatches(found, order, 5, noisy, seed=7, workers=workers).after(1)))
    assert not equal(alone, list(ImageBatches(found, order, 5, noisy, seed=8)))


def test_a_later_start_and_other_sizes_change_nothing(tmp_path: Path) -> None:
    found = pictures(tmp_path)
    whole = ImageBatches(found, range(12), 5, noisy, seed=7)
    for count in range(4):
        assert equal(list(whole)[count:], list(whole.after(count)))
    apart = torch.cat([batch.images for batch in ImageBatches(found, range(12), 3, noisy, seed=7)])
    assert torch.equal(torch.cat([batch.images for batch in whole]), apart)


def test_a_picture_that_comes_twice_is_augmented_anew(tmp_path: Path) -> None:
    (batch,) = ImageBatches(pictures(tmp_path), [4, 4], 2, noisy)
    assert not torch.equal(batch.images[0], batch.images[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_others_draw_as_if_nothing_had_been(tmp_path: Path, workers: int) -> None:
    tensors, values = get_random_state()
    list(ImageBatches(pictures(tmp_path), range(12), 5, noisy, workers=workers))
    after, later = get_random_state()
    assert values == later
    assert all(torch.equal(tensors[name], after[name]) for name in tensors)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_pictures_are_left_out_and_counted(tmp_path: Path, workers: int) -> None:
    good, torn = content((9, 0, 0)), content(side=64, form="JPEG")[:-100]
    found = pictures(tmp_path, [good, b"", good, good, torn, b"text"])
    batches = list(ImageBatches(found, range(6), 3, noisy, seed=1, workers=workers))
    assert [(len(batch), batch.skipped) for batch in batches] == [(2, 1), (1, 2)]
    assert [batch.labels.tolist() for batch in batches] == [[0, 2], [0]]
    sound = ImageBatches(pictures(tmp_path, [good] * 6), range(6), 3, noisy, seed=1)
    first, second = sound
    assert torch.equal(batches[0].images, first.images[[0, 2]]), "the others are augmented as ever"
    assert torch.equal(batches[1].images, second.images[:1])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_unreadable_pictures(tmp_path: Path, workers: int) -> None:
    found = pictures(tmp_path, [content(), content(), b"", b""])
    counts: list[int] = []
    full, empty = ImageBatches(found, range(4), 2, plain, workers=workers, count=counts.append)
    assert (len(full), full.skipped, full.unread) == (2, 0, "")
    assert (len(empty), len(empty.images), empty.skipped) == (0, 0, 2)
    assert empty.unread.startswith("image 3 of train.npz")
    assert counts == [0, 2]


def test_the_batches_behind_the_first_ones_are_counted_too(tmp_path: Path) -> None:
    counts: list[int] = []
    list(ImageBatches(pictures(tmp_path, [content(), b"", b""]), range(3), 1, plain, count=counts.append).after(1))
    assert counts == [1, 1]


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    found = image_sets.load_image_set(".", folder(tmp_path)).train
    (tmp_path / "train/dog/1.png").unlink()
    (batch,) = ImageBatches(found, range(9), 9, plain)
    assert (len(batch), batch.skipped) == (8, 1)


def wrong(picture: Any) -> Tensor:
    raise UsageError("The side must be larger.")


def mistaken(picture: Any) -> Tensor:
    raise RuntimeError("shapes differ")


def dying(picture: Any) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def told(picture: Any) -> Tensor:
    """What comes to a whole group of processes: Ctrl-C and the word to end."""
    for name in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), name)
    return torch.tensor([torch.get_num_threads(), signal.alarm(0)])  # seconds until the end, which is called off


@pytest.mark.parametrize(
    ("transform", "kind", "words"),
    [
        (wrong, UsageError, "^The side must be larger.$"),
        (mistaken, RuntimeError, "shapes differ"),
        (dying, UsageError, "fewer workers"),
    ],
)
def test_errors_of_processes(
    tmp_path: Path, transform: Callable[[Any], Tensor], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        list(ImageBatches(pictures(tmp_path), range(12), 5, transform, workers=1))


def test_processes_end_with_the_batches(tmp_path: Path) -> None:
    batches = iter(ImageBatches(pictures(tmp_path), range(12), 1, plain, workers=2))
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    del batches  # as when the training is interrupted
    assert not multiprocessing.active_children()


def test_processes_go_on_for_a_while_when_they_are_told_to_end(tmp_path: Path) -> None:
    batches = list(ImageBatches(pictures(tmp_path), range(2), 1, told, workers=1))
    assert [batch.images.tolist() for batch in batches] == [[[1, GRACE]], [[1, GRACE]]]
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "torch does not raise where the training happens to be"


def test_pictures_can_be_handed_to_another_process(tmp_path: Path) -> None:
    pack(tmp_path / "packed/train.npz")
    pack(tmp_path / "packed/val.npz")
    folder(tmp_path / "files")
    for name in ("packed", "files", "digits"):
        found = image_sets.load_image_set(name, tmp_path).train
        copied = pickle.loads(pickle.dumps(found))
        assert copied.fingerprint() == found.fingerprint()
        assert copied.image(2).tobytes() == found.image(2).tobytes()


def test_the_order_of_an_epoch() -> None:
    assert epoch_order(100, 5) == torch.randperm(100, generator=torch.Generator().manual_seed(5)).tolist()
    repeated = epoch_order(100, 5, repeats=3)
    assert len(repeated) == 100
    assert repeated == [place for place in epoch_order(100, 5) for _ in range(3)][:100]
    assert epoch_order(300, 6, repeats=2) != epoch_order(300, 7, repeats=2)
    with pytest.raises(UsageError, match="repeats"):
        epoch_order(10, 0, repeats=0)
