"""A picture -> the tensor that a model takes, through timm's parts: DeiT's augmentation, or none."""

from dataclasses import dataclass
from typing import Any

from uncollapse.backbones import torchvision_ops
from uncollapse.errors import UsageError, import_optional
from uncollapse.lab.data.image.image_batches import Transform

SHARE = 0.875  # of the side that is kept when a picture is judged
BORDER = 8  # padded crops have a border of an eighth of the side
POLICY = "rand-m9-mstd0.5-inc1"  # DeiT's


@dataclass(frozen=True)
class InputSpec:
    """What a model wants of a picture: its side, and the mean and deviation of each channel."""

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"


def training_transform(
    look: InputSpec,
    *,
    crop: str = "resized",
    least_area: float = 0.08,
    auto_augment: str = "",
    color_jitter: float = 0.0,
    erasing: float = 0.0,
    flip: float = 0.5,
) -> Transform:
    """Random crops and flips, with RandAugment, jitter of colours and random erasing where they are wanted.

    Args:
        look: what the model wants.
        crop: "resized", a random part of the picture at any scale, or "padded", the picture moved by a few pixels.
        least_area: of a resized crop, as a share of the picture.
        auto_augment: timm's name of a policy, such as `POLICY`; "" for none.
        color_jitter: its strength; timm leaves it out beside auto_augment.
        erasing: probability of random erasing.
        flip: probability that it is mirrored.
    """
    create: Any = _data().create_transform
    try:
        made: Any = create(
            look.side,
            is_training=True,
            scale=(least_area, 1.0),
            hflip=flip,
            color_jitter=color_jitter or None,
            auto_augment=auto_augment or None,
            interpolation=look.interpolation,
            mean=look.mean,
            std=look.std,
            re_prob=erasing,
            re_mode="pixel",
        )
    except (AssertionError, ValueError, IndexError) as error:  # of timm, about the policy
        raise UsageError(f"auto_augment must be a policy of timm such as {POLICY}, got {auto_augment!r}.") from error
    if crop == "padded":
        made.transforms[0] = _padded_crop(look)
    _fix_posterize(made)
    transform: Transform = made
    return transform


def evaluation_transform(look: InputSpec, *, crop: str) -> Transform:
    """The middle of the picture, or for padded crops all of it."""
    transform: Transform = _data().create_transform(
        look.side,
        interpolation=look.interpolation,
        mean=look.mean,
        std=look.std,
        crop_pct=SHARE if crop == "resized" else 1.0,
        crop_mode="center" if crop == "resized" else "squash",
    )
    return transform


def _padded_crop(look: InputSpec) -> Any:
    vision: Any = import_optional("torchvision.transforms", "timm")
    mode = vision.InterpolationMode(look.interpolation)
    resize = vision.Resize((look.side, look.side), interpolation=mode)
    return vision.Compose([resize, vision.RandomCrop(look.side, padding=look.side // BORDER)])


def posterize(picture: Any, bits: int, **_: Any) -> Any:
    """Keep so many bits of each channel, as timm does; of none a black picture is left.

    timm asks for none at the highest strength, as the policies were published; Pillow used to take it and now refuses.
    """
    if bits < 1:
        return picture.point(lambda value: 0)
    augmentations: Any = import_optional("timm.data.auto_augment", "timm")
    return augmentations.posterize(picture, bits)


def _fix_posterize(made: Any) -> None:
    """Let the operations of a policy, however timm keeps them, go through `posterized`."""
    for transform in made.transforms:
        policies = getattr(transform, "policy", [getattr(transform, "ops", [])])
        for operation in (operation for policy in policies for operation in policy):
            if getattr(operation, "name", "").startswith("Posterize"):
                operation.aug_fn = posterize


def _data() -> Any:
    torchvision_ops.declare()
    return import_optional("timm.data", "timm")
