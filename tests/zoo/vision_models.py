"""Image models of timm, the smallest of each family, and of torchvision."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .entries import Built, Entry

# What the name of a small model has, the smallest first.
SIZES = (
    *("test_", "atto", "femto", "pico", "nano", "xxs", "xxtiny", "xtiny", "_xs", "_ti", "tiny", "mini", "small", "_s"),
    *("_t0", "_t", "b0", "s0", "l0", "_0", "050", "_18", "18", "_11", "_12", "_m1", "_a0", "lite"),
)
LARGEST = 40e6  # parameters
SIDES = (32, 64, 96, 128, 224, 256)  # of images: the first that a model takes
TORCHVISION = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3"),
    *("maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18"),
    *("resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t"),
    *("vgg11", "vgg11_bn", "vit_b_32", "wide_resnet50_2", "r3d_18", "mc3_18", "r2plus1d_18", "s3d", "swin3d_t"),
    *(
        "mvit_v1_b",
        "mvit_v2_s",
        "fcn_resnet50",
        "deeplabv3_mobilenet_v3_large",
        "lraspp_mobilenet_v3_large",
        "raft_small",
    ),
)
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "swin3d_t", "mvit_v1_b", "mvit_v2_s")


def entries(library: str) -> Iterator[Entry]:
    """Yield the smallest model of each module of timm, or the models of torchvision."""
    if library == "torchvision":
        yield from (Entry(f"torchvision/{name}", name) for name in TORCHVISION)
        return
    import timm

    for module in sorted(timm.list_modules()):
        names = timm.list_models(module=module)
        if names:
            yield Entry(f"timm/{module}", min(names, key=_rank))


def _rank(name: str) -> tuple[int, int, int]:
    """Return a key that is small for names of small models."""
    size = next((number for number, word in enumerate(SIZES) if word in name), len(SIZES))
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    return size, max(numbers, default=0), len(name)


def build(library: str, kind: str) -> Built:
    """Build a model and images of the smallest size that it takes."""
    create = _torchvision if library == "torchvision" else _timm
    reasons = []
    for side in SIDES:
        try:
            torch.manual_seed(0)
            model = create(kind, side).eval()
            first = _images(kind, 3, side, 3)
            _run(model, first)
            return Built(model, [first, _second(model, kind, side)])
        except (RuntimeError, AssertionError, ValueError, IndexError, TypeError) as error:
            reasons.append(f"{side}: {error}")
    raise NotImplementedError(f"{kind} takes no images of {SIDES}: {reasons[-1][:300]}")


def _run(model: nn.Module, images: Any) -> None:
    with torch.no_grad():
        model(*images) if isinstance(images, tuple) else model(images)


def _second(model: nn.Module, kind: str, side: int) -> Any:
    """Return two images of another size, which show the axes of features, or of the same if a model takes no other."""
    larger = _images(kind, 2, side + 32, 2)
    try:
        _run(model, larger)
    except (RuntimeError, AssertionError, ValueError):
        return _images(kind, 2, side, 2)
    return larger


def _images(kind: str, count: int, side: int, seed: int) -> Any:
    random = torch.Generator().manual_seed(seed)
    frames = (16 if kind in ("s3d", "mvit_v1_b", "mvit_v2_s") else 4,) if kind in VIDEO else ()
    images = torch.randn(count, 3, *frames, side, side, generator=random)
    return (images, images.flip(0)) if kind == "raft_small" else images


def _timm(kind: str, side: int) -> Any:
    import timm

    narrow = {"embed_dim": 64, "depth": 3, "num_heads": 4}
    for given in ({**narrow, "img_size": side}, {"img_size": side}, {}):
        try:
            with torch.device("meta"):
                large = sum(p.numel() for p in timm.create_model(kind, num_classes=10, **given).parameters())
            if large <= LARGEST:
                return timm.create_model(kind, num_classes=10, **given)
        except (TypeError, RuntimeError, AssertionError, ValueError, NotImplementedError):
            continue
    raise NotImplementedError(f"{kind} has more than {LARGEST:.0f} parameters")


def _torchvision(kind: str, side: int) -> Any:
    import torchvision

    given: dict[str, Any] = {}
    if kind == "vit_b_32":
        given["image_size"] = side
    if kind in ("googlenet", "inception_v3"):
        given |= {"init_weights": False, "aux_logits": False}
    if kind.startswith(("fcn", "deeplab", "lraspp")):
        given["weights_backbone"] = None
    model = torchvision.models.get_model(kind, weights=None, **given)
    if kind == "s3d":  # its pool takes no images below 224 pixels, of which one pass takes many seconds
        model.avgpool = nn.AdaptiveAvgPool3d((1, 1, 1))
    return model
