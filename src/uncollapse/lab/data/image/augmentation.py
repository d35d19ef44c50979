"""Transforms from an image to a model's input, built from timm: DeiT's augmentation, or none."""

from dataclasses import dataclass
from typing import Any

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.data.image.image_batches import Transform

SHARE = 0.875  # of the side that the centre crop of an evaluation keeps
SHARES = {"resized": SHARE, "published": 64 / 70, "padded": 1.0}
BORDER = 8  # padded crops have a border of an eighth of the side
POLICY = "rand-m9-mstd0.5-inc1"  # DeiT's


@dataclass(frozen=True)
class InputSpec:
    """Input of a model: side in pixels, mean and standard deviation per channel, interpolation."""

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"


def training_transform(
    spec: InputSpec,
    *,
    crop: str = "resized",
    least_area: float = 0.08,
    auto_augment: str = "",
    color_jitter: float = 0.0,
    erasing: float = 0.0,
    flip: float = 0.5,
) -> Transform:
    """Return random crops and flips, with RandAugment, color jitter and random erasing if wanted.

    Args:
        spec: Input of the model.
        crop: "resized", a random part of the image at any scale, or "padded", the image shifted by a few pixels.
        least_area: Smallest share of the image that a resized crop shows.
        auto_augment: timm's name of a policy, such as `POLICY`; "" for none.
        color_jitter: Its strength; timm ignores it with auto_augment.
        erasing: Probability of random erasing.
        flip: Probability of a horizontal flip.
    """
    create: Any = _data().create_transform
    try:
        made: Any = create(
            spec.side,
            is_training=True,
            scale=(least_area, 1.0),
            hflip=flip,
            color_jitter=color_jitter or None,
            auto_augment=auto_augment or None,
            interpolation=spec.interpolation,
            mean=spec.mean,
            std=spec.std,
            re_prob=erasing,
            re_mode="pixel",
        )
    except (AssertionError, ValueError, IndexError) as error:  # of timm, about the policy
        raise UsageError(f"auto_augment must be a policy of timm such as {POLICY}, got {auto_augment!r}.") from error
    if crop == "padded":
        made.transforms[0] = _padded_crop(spec)
    _fix_posterize(made)
    transform: Transform = made
    return transform


def evaluation_transform(spec: InputSpec, *, crop: str) -> Transform:
    """Return a centre crop, or the whole image for models trained with padded crops.

    crop: "resized" keeps seven eighths of the side, "published" 64 of 70 pixels, as Wang & Isola on STL-10, and
    "padded" all of it.
    """
    transform: Transform = _data().create_transform(
        spec.side,
        interpolation=spec.interpolation,
        mean=spec.mean,
        std=spec.std,
        crop_pct=SHARES[crop],
        crop_mode="squash" if crop == "padded" else "center",
    )
    return transform


def _padded_crop(spec: InputSpec) -> Any:
    vision: Any = import_optional("torchvision.transforms", "timm")
    mode = vision.InterpolationMode(spec.interpolation)
    resize = vision.Resize((spec.side, spec.side), interpolation=mode)
    return vision.Compose([resize, vision.RandomCrop(spec.side, padding=spec.side // BORDER)])


def posterize(image: Any, bits: int, **_: Any) -> Any:
    """Keep `bits` bits of each channel, as timm does; 0 bits give a black image.

    timm uses 0 at the highest strength, as the policies were published; Pillow used to accept it and now refuses.
    """
    if bits < 1:
        return image.point(lambda value: 0)
    augmentations: Any = import_optional("timm.data.auto_augment", "timm")
    return augmentations.posterize(image, bits)


def _fix_posterize(made: Any) -> None:
    """Replace the posterize operations of a policy, however timm stores them, by `posterize`."""
    for transform in made.transforms:
        policies = getattr(transform, "policy", [getattr(transform, "ops", [])])
        for operation in (operation for policy in policies for operation in policy):
            if getattr(operation, "name", "").startswith("Posterize"):
                operation.aug_fn = posterize


def _data() -> Any:
    torchvision_ops.declare()
    return import_optional("timm.data", "timm")
