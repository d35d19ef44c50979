"""Two views of each picture, from memory or by readers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.lab.experiments.contrastive.tiny_images import Made, pictures

from uncollapse.errors import UsageError
from uncollapse.lab.data.image import two_views as module
from uncollapse.lab.data.image.augmentation import InputSpec
from uncollapse.lab.data.image.image_source import Images
from uncollapse.lab.data.image.two_views import TwoViews, ViewAugmentation, load_into_memory

LOOK = InputSpec(16, (0.5,) * 3, (0.5,) * 3, "bilinear")


class Growing(Made):
    """Each picture is larger than the one before."""

    def image(self, number: int) -> Any:
        picture = super().image(number)
        return picture.resize((12 + number, 12))


def growing(count: int) -> Images:
    return Images.all_of(Growing(count), torch.arange(count) % 3, ("red", "green", "blue"))


def made(views: TwoViews, seed: int = 3, size: int = 4, first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    return [views.pair(batch) for batch in views.batches(seed, size).after(first)]


def test_pictures_of_one_size_are_held_as_they_are() -> None:
    held = load_into_memory(pictures(5))
    assert held is not None
    assert (held.images.shape, held.images.dtype, held.labels.tolist()) == (
        (5, 3, 12, 12),
        torch.uint8,
        [0, 1, 2, 0, 1],
    )
    assert [int(image.float().mean((1, 2)).argmax()) for image in held.images] == [0, 1, 2, 0, 1]


def test_others_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_into_memory(growing(3)) is None
    monkeypatch.setattr(module, "HELD", 5 * 12 * 12 * 3 - 1)
    assert load_into_memory(pictures(5)) is None


def test_unreadable_ones_are_left_out_with_their_labels_and_counted() -> None:
    told: list[int] = []
    views = TwoViews(pictures(6, broken=(1,)), LOOK, ViewAugmentation(), count=told.append)
    assert views.in_memory is not None
    assert (len(views), views.in_memory.labels.tolist(), told) == (5, [0, 2, 0, 1, 2], [1])
    with pytest.raises(UsageError, match="2 images"):
        load_into_memory(pictures(2, broken=(0, 1)))


@pytest.mark.parametrize("of", [pictures, growing])
def test_views_are_two_changes_of_the_same_pictures(of: Any) -> None:
    views = TwoViews(of(9), LOOK, ViewAugmentation())
    pairs = made(views)
    assert [len(x) for x, _ in pairs] == [4, 4]  # the ninth does not fill a batch
    for x, y in pairs:
        assert x.shape == y.shape == (4, 3, 16, 16)
        assert not torch.equal(x, y)
        assert float(x.abs().max()) <= 1.0 + 1e-6  # bytes to −1 … 1 by this mean and deviation


@pytest.mark.parametrize("of", [pictures, growing])
def test_views_depend_on_the_seed_only_and_can_begin_later(of: Any) -> None:
    views = TwoViews(of(8), LOOK, ViewAugmentation(flip=0.0, jitter=0.0, hue=0.0, grey=0.0))
    first, again, other = made(views), made(views), made(views, seed=4)
    assert all(torch.equal(x, z) for (x, _), (z, _) in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    if (
        views.in_memory is None
    ):  # crops are made by readers, each by the picture's place: what was skipped changes nothing
        assert torch.equal(made(views, first=1)[0][0], first[1][0])
    assert len(made(views, first=1)) == 1


def test_readers_in_other_processes_give_the_same_crops() -> None:
    alone = TwoViews(growing(6), LOOK, ViewAugmentation(flip=0.0, jitter=0.0, hue=0.0, grey=0.0))
    apart = TwoViews(growing(6), LOOK, ViewAugmentation(flip=0.0, jitter=0.0, hue=0.0, grey=0.0), workers=1)
    assert all(
        torch.equal(x, z) and torch.equal(y, w)
        for (x, y), (z, w) in zip(made(alone, size=3), made(apart, size=3), strict=True)
    )


def test_a_batch_larger_than_the_set_is_the_set() -> None:
    views = TwoViews(pictures(3), LOOK, ViewAugmentation())
    assert [len(batch) for batch in views.batches(0, 64)] == [3]


@pytest.mark.parametrize("of", [pictures, growing])
def test_those_that_do_not_fill_a_batch_may_be_wanted_too(of: Any) -> None:
    views = TwoViews(of(9), LOOK, ViewAugmentation())
    assert [len(batch) for batch in views.batches(0, 4, whole=True)] == [4, 4, 1]


@pytest.mark.parametrize(("off", "steps"), [({}, 4), ({"blur": 0.5}, 5), ({"flip": 0.0, "jitter": 0.0, "hue": 0.0}, 2)])
def test_changes_without_strength_are_left_out(
    off: dict[str, float], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sequence[Any]] = []
    monkeypatch.setattr(module.changes, "compose", lambda steps: seen.append(steps) or (lambda x: x))
    ViewAugmentation(**off).steps(LOOK, crop=True)
    assert len(seen[0]) == steps + 1  # and the normalisation
