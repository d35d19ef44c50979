"""Two random views of each picture: what contrastive encoders learn from.

Pictures of one size that fit into memory are decoded once and held there; all changes are then made on whole batches,
on the device. Others are decoded and cropped as they are needed, by processes that read ahead, and the rest of the
changes is made on batches. Either way an epoch's views depend on the seed and the epoch only.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.data.image import batch_transforms as changes
from uncollapse.lab.data.image.augmentation import InputSpec
from uncollapse.lab.data.image.image_batches import ImageBatch, ImageBatches, Transform, epoch_order
from uncollapse.lab.data.image.image_source import Images, UnreadableError
from uncollapse.lab.engine.sharding import shard_slice

HELD = 4 * 2**30  # bytes of pictures that are held in memory


@dataclass(frozen=True)
class ViewAugmentation:
    """What may happen to a picture. Chances are those that it happens at all; see `batch_augmenting`."""

    least_area: float = 0.08
    flip: float = 0.5
    jitter: float = 0.4
    hue: float = 0.4
    jitter_chance: float = 1.0
    grey: float = 0.2
    blur: float = 0.0

    def steps(self, look: InputSpec, crop: bool) -> Callable[[Tensor], Tensor]:
        """The changes of a batch of bytes (b, 3, h, w), which then has the model's mean and deviation."""
        v2: Any = _transforms()
        steps: list[torch.nn.Module] = [changes.RandomResizedCrop(look.side, self.least_area)] if crop else []
        steps += [changes.RandomHorizontalFlip(self.flip)] if self.flip else []
        steps += [changes.ColorJitter(self.jitter, self.hue, self.jitter_chance)] if self.jitter or self.hue else []
        steps += [changes.RandomGrayscale(self.grey)] if self.grey else []
        steps += [changes.RandomGaussianBlur(look.side, self.blur)] if self.blur else []
        made = changes.compose([*steps, v2.Normalize(look.mean, look.std)])
        return lambda images: made(images.float() / 255)


class ImagesInMemory(NamedTuple):
    """Pictures in memory: images (n, 3, h, w) of bytes and labels (n,)."""

    images: Tensor
    labels: Tensor


class TwoViews:
    """The views of some pictures.

    Args:
        pictures: to look at.
        look: what the model wants.
        changed: what may happen to a picture.
        workers: processes that read ahead, where pictures are not held in memory.
        count: told of pictures that cannot be read.
    """

    def __init__(
        self,
        pictures: Images,
        look: InputSpec,
        changed: ViewAugmentation,
        workers: int = 0,
        count: Callable[[int], None] | None = None,
    ) -> None:
        self.pictures, self.spec, self.augmentation, self.workers, self.count = pictures, look, changed, workers, count
        self.in_memory = load_into_memory(pictures)
        if self.in_memory is not None and count is not None and len(self.in_memory.labels) < len(pictures):
            count(len(pictures) - len(self.in_memory.labels))
        self._steps = changed.steps(look, crop=self.in_memory is not None)

    def __len__(self) -> int:
        return len(self.pictures) if self.in_memory is None else len(self.in_memory.labels)

    def batches(self, seed: int, size: int, whole: bool = False) -> "MemoryBatches | ImageBatches":
        """All pictures in a random order; those that do not fill a batch are left out, unless there are no others.

        whole: leave out none.
        """
        order = epoch_order(len(self), seed)
        if not whole:
            order = order[: len(order) // size * size or len(order)]
        if self.in_memory is not None:
            return MemoryBatches(self.in_memory, order, size)
        transform = _two_crops(self.spec, self.augmentation)
        return ImageBatches(self.pictures, order, size, transform, seed, self.workers, self.count)

    def pair(self, batch: ImageBatch, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Two views (b, 3, side, side) of each picture of a batch, as the model wants them."""
        images = batch.images.to(device)
        first, second = (images, images) if self.in_memory is not None else images.unbind(1)
        with torch.autocast(images.device.type, enabled=False):
            return self._steps(first), self._steps(second)


class MemoryBatches:
    """Batches of pictures that are in memory. order: their places. part: as of `Batches`."""

    def __init__(
        self, held: ImagesInMemory, order: Sequence[int], size: int, first: int = 0, part: tuple[int, int] = (0, 1)
    ) -> None:
        self.in_memory, self.order, self.size, self.first, self.part = held, order, size, first, part

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def after(self, count: int) -> "MemoryBatches":
        """Those behind the first few."""
        rest = copy.copy(self)
        rest.first = count
        return rest

    def share(self, number: int, count: int) -> "MemoryBatches":
        """Those of one of several processes."""
        own = copy.copy(self)
        own.part = number, count
        return own

    def __iter__(self) -> Iterator[ImageBatch]:
        for whole in torch.split(torch.tensor(self.order), self.size)[self.first :]:
            places = whole[shard_slice(len(whole), *self.part)]
            yield ImageBatch(self.in_memory.images[places], self.in_memory.labels[places])


def load_into_memory(pictures: Images) -> ImagesInMemory | None:
    """All pictures but those that cannot be read; None if their sizes differ or they are too many for the memory."""
    images: NDArray[numpy.uint8] | None = None
    places: list[int] = []
    for at in range(len(pictures)):
        try:
            picture = numpy.asarray(pictures.image(at)).transpose(2, 0, 1)
        except UnreadableError:
            continue
        if images is None:
            if picture.nbytes * len(pictures) > HELD:
                return None
            images = numpy.empty((len(pictures), *picture.shape), "uint8")  # at once: two copies would be too many
        elif picture.shape != images.shape[1:]:
            return None
        images[len(places)] = picture
        places.append(at)
    if images is None:
        raise UsageError(f"None of the {len(pictures)} pictures can be read.")
    return ImagesInMemory(torch.from_numpy(images[: len(places)]), pictures.labels[places])


def _two_crops(look: InputSpec, changed: ViewAugmentation) -> Transform:
    """A picture -> bytes (2, 3, side, side): two random parts of it."""
    v2: Any = _transforms()
    crop = v2.RandomResizedCrop(look.side, scale=(changed.least_area, 1.0), antialias=True)
    return lambda picture: torch.stack([v2.functional.pil_to_tensor(crop(picture)) for _ in range(2)])


def _transforms() -> Any:
    torchvision_ops.declare()
    return import_optional("torchvision.transforms.v2", "timm")
