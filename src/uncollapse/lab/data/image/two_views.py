"""Two random views of each image, for contrastive training.

Images of one size that fit into memory are decoded once; all transforms then run on whole batches, on the device. Other
images are decoded and cropped by workers that read ahead, and the other transforms run on batches. Either way the views
of an epoch depend only on the seed and the epoch.
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

HELD = 4 * 2**30  # largest size of images in memory, in bytes


@dataclass(frozen=True)
class ViewAugmentation:
    """Augmentation of a view, see `batch_transforms`."""

    least_area: float = 0.08
    flip: float = 0.5
    jitter: float = 0.4
    hue: float = 0.4
    jitter_chance: float = 1.0
    grey: float = 0.2
    blur: float = 0.0

    def steps(self, look: InputSpec, crop: bool) -> Callable[[Tensor], Tensor]:
        """Return the transform of a batch of bytes (b, 3, h, w), including the model's normalisation."""
        v2: Any = _transforms()
        steps: list[torch.nn.Module] = [changes.RandomResizedCrop(look.side, self.least_area)] if crop else []
        steps += [changes.RandomHorizontalFlip(self.flip)] if self.flip else []
        steps += [changes.ColorJitter(self.jitter, self.hue, self.jitter_chance)] if self.jitter or self.hue else []
        steps += [changes.RandomGrayscale(self.grey)] if self.grey else []
        steps += [changes.RandomGaussianBlur(look.side, self.blur)] if self.blur else []
        made = changes.compose([*steps, v2.Normalize(look.mean, look.std)])
        return lambda images: made(images.float() / 255)


class ImagesInMemory(NamedTuple):
    """Images (n, 3, h, w) of bytes and labels (n,)."""

    images: Tensor
    labels: Tensor


class TwoViews:
    """Two random views of each image.

    Args:
        source: Images to view.
        look: Input of the model.
        changed: Augmentation of a view.
        workers: Processes that read ahead, if the images are not in memory.
        count: Called with the number of unreadable images.
    """

    def __init__(
        self,
        source: Images,
        look: InputSpec,
        changed: ViewAugmentation,
        workers: int = 0,
        count: Callable[[int], None] | None = None,
    ) -> None:
        self.source, self.spec, self.augmentation, self.workers, self.count = source, look, changed, workers, count
        self.in_memory = load_into_memory(source)
        if self.in_memory is not None and count is not None and len(self.in_memory.labels) < len(source):
            count(len(source) - len(self.in_memory.labels))
        self._steps = changed.steps(look, crop=self.in_memory is not None)

    def __len__(self) -> int:
        return len(self.source) if self.in_memory is None else len(self.in_memory.labels)

    def batches(self, seed: int, size: int, whole: bool = False) -> "MemoryBatches | ImageBatches":
        """Return batches of all images in a random order, without an incomplete last one unless it is the only one.

        whole: keep the last one.
        """
        order = epoch_order(len(self), seed)
        if not whole:
            order = order[: len(order) // size * size or len(order)]
        if self.in_memory is not None:
            return MemoryBatches(self.in_memory, order, size)
        transform = _two_crops(self.spec, self.augmentation)
        return ImageBatches(self.source, order, size, transform, seed, self.workers, self.count)

    def pair(self, batch: ImageBatch, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return two views (b, 3, side, side) of each image of a batch, as the model's input."""
        images = batch.images.to(device)
        first, second = (images, images) if self.in_memory is not None else images.unbind(1)
        with torch.autocast(images.device.type, enabled=False):
            return self._steps(first), self._steps(second)


class MemoryBatches:
    """Batches of images in memory. order: their indices. part: as for `ImageBatches`."""

    def __init__(
        self, held: ImagesInMemory, order: Sequence[int], size: int, first: int = 0, part: tuple[int, int] = (0, 1)
    ) -> None:
        self.in_memory, self.order, self.size, self.first, self.part = held, order, size, first, part

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def after(self, count: int) -> "MemoryBatches":
        """Return the batches after the first few."""
        rest = copy.copy(self)
        rest.first = count
        return rest

    def share(self, number: int, count: int) -> "MemoryBatches":
        """Return the shards of one of several processes."""
        own = copy.copy(self)
        own.part = number, count
        return own

    def __iter__(self) -> Iterator[ImageBatch]:
        for whole in torch.split(torch.tensor(self.order), self.size)[self.first :]:
            places = whole[shard_slice(len(whole), *self.part)]
            yield ImageBatch(self.in_memory.images[places], self.in_memory.labels[places])


def load_into_memory(source: Images) -> ImagesInMemory | None:
    """Return all readable images; None if their sizes differ or they are too large for memory."""
    images: NDArray[numpy.uint8] | None = None
    places: list[int] = []
    for at in range(len(source)):
        try:
            image = numpy.asarray(source.image(at)).transpose(2, 0, 1)
        except UnreadableError:
            continue
        if images is None:
            if image.nbytes * len(source) > HELD:
                return None
            images = numpy.empty((len(source), *image.shape), "uint8")  # at once, to avoid a second copy
        elif image.shape != images.shape[1:]:
            return None
        images[len(places)] = image
        places.append(at)
    if images is None:
        raise UsageError(f"None of the {len(source)} images can be read.")
    return ImagesInMemory(torch.from_numpy(images[: len(places)]), source.labels[places])


def _two_crops(look: InputSpec, changed: ViewAugmentation) -> Transform:
    """Return a transform from an image to bytes (2, 3, side, side): two random crops of it."""
    v2: Any = _transforms()
    crop = v2.RandomResizedCrop(look.side, scale=(changed.least_area, 1.0), antialias=True)
    return lambda image: torch.stack([v2.functional.pil_to_tensor(crop(image)) for _ in range(2)])


def _transforms() -> Any:
    torchvision_ops.declare()
    return import_optional("torchvision.transforms.v2", "timm")
