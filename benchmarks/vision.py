"""Training a vision transformer with a cure or with losses on its patches, beside a run without; and the loader."""

import io
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.targets import Result, slower
from uncollapse.lab.data.image.augmentation import InputSpec, training_transform
from uncollapse.lab.data.image.image_batches import ImageBatch, ImageBatches
from uncollapse.lab.data.image.image_files import PackedImages
from uncollapse.lab.data.image.image_source import Images
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.experiments.vit import config as vision
from uncollapse.lab.experiments.vit import recipe as vit
from uncollapse.lab.experiments.vit.training import Training, avoid_slow_attention

LARGE: dict[str, Any] = {"model": "deit_small_patch16_224", "batch": 8, "mixup": 0.0, "drop_path": 0.0}
ALL_THREE: dict[str, Any] = dict.fromkeys(vit.DIVERSE, 1.0)
SMALL: dict[str, Any] = {**vit.RECIPE.presets["small"], "data": "cifar10"}
WAYS: dict[str, dict[str, Any]] = {
    "ContraNorm at every norm": {"cure": "contra_norm"},
    "the three losses of DiversePatch": ALL_THREE,
    "  its cosine loss": {"cosine_loss": 1.0},
    "  its contrastive loss": {"contrast_loss": 1.0},
    "  its mixing loss": {"mixing_loss": 1.0},
    "  all three, contrast as released": {**ALL_THREE, "contrast_form": "released"},
    "ContraNorm and DiversePatch": {**ALL_THREE, "cure": "contra_norm"},
    "AttnScale": {"cure": "attn_scale"},
    "FeatScale": {"cure": "feat_scale"},
}
TARGETS = {"ContraNorm at every norm": 1.25, "the three losses of DiversePatch": 1.15}
TARGETS_OF_SMALL = {"ContraNorm at every norm": 1.25}
FEW = 2  # rounds of what has no target
IMAGES = 96  # that the loader reads in a round


def training(rounds: int = 5) -> Iterator[Result]:
    """Whole steps of the recipe but for reading images: mixing, forward and backward passes, AdamW."""
    yield from _beside_vanilla("DeiT-S/16, 8×3×224×224", LARGE, 1000, rounds, TARGETS)
    for depth in (12, 24):
        small = {**SMALL, "depth": depth}
        yield from _beside_vanilla(f"CIFAR-10's model, {depth} blocks, bf16", small, 10, rounds, TARGETS_OF_SMALL)
    yield from _loading()


def _beside_vanilla(
    where: str, shared: dict[str, Any], classes: int, rounds: int, targets: dict[str, float]
) -> Iterator[Result]:
    made = partial(steps, shared, classes)
    base = made({})
    for name, changes in WAYS.items():
        of_this = rounds if name in targets else min(rounds, FEW)
        yield slower(f"{name}, {where}", targets.get(name), base, made(changes), of_this)


def steps(shared: dict[str, Any], classes: int, changes: dict[str, Any]) -> Callable[[], None]:
    """A step of a run."""
    config = vit.Config(**{"cure": "none", **shared, **changes})
    model = vision.build(config, classes)
    avoid_slow_attention(model.vit, config.precision, "cpu")
    task = Training(model, config, {"train": _draw_images(config.batch, 8, classes)}, Runtime()).__enter__()
    side = config.image or 224
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(config.batch, 3, side, side, generator=generator)
    batch = ImageBatch(images, torch.randint(classes, (config.batch,), generator=generator))
    model.train()

    def run() -> None:
        task.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
            loss = task.loss(model, ImageBatch(batch.images.clone(), batch.labels))
        torch.autograd.backward(loss)
        task.optimizer.step()

    return run


def _loading() -> Iterator[Result]:
    """Pictures a second: decoded, augmented, in a tensor."""
    look = InputSpec(224, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    deit: dict[str, Any] = {"crop": "resized", "least_area": 0.08, "color_jitter": 0.3, "erasing": 0.25}
    ways = {
        "32×32, moved and flipped": (32, training_transform(
            InputSpec(32, look.mean, look.std), crop="padded", least_area=1.0
        )),
        "500×375 to 224×224, DeiT's augmentation": (
            500, training_transform(look, auto_augment="rand-m9-mstd0.5-inc1", **deit)
        ),
    }  # fmt: skip
    for name, (side, transform) in ways.items():
        for workers in (0, 1, 2):
            speeds = [_speed(_draw_images(IMAGES, side, 10), transform, workers) for _ in range(3)]
            yield Result(
                f"loader, {workers} processes, {name}", None, statistics.median(speeds), "images/s", True, "JPEG"
            )


def _speed(images: Images, transform: Any, workers: int) -> float:
    """Once the first batch is there: starting processes takes its time once an epoch."""
    order = list(range(len(images))) * (40 if len(images.image(0).getdata()) < 5000 else 4)
    stream = iter(ImageBatches(images, order, 32, transform, workers=workers))
    next(stream)
    started, count = time.perf_counter(), 0
    for batch in stream:
        count += len(batch)
    return count / (time.perf_counter() - started)


def _draw_images(count: int, side: int, classes: int) -> Images:
    """Smooth random photographs of 4:3, as JPEG."""
    from PIL import Image

    random, contents = np.random.default_rng(0), []
    for _ in range(count):
        small = random.integers(0, 255, (max(2, side // 16), max(2, side // 16), 3), dtype=np.uint8)
        file = io.BytesIO()
        height = side if side < 64 else side * 3 // 4
        Image.fromarray(small).resize((side, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        contents.append(np.frombuffer(file.getvalue(), np.uint8))
    offsets = np.cumsum([0, *map(len, contents)])
    source = PackedImages("made up", np.concatenate(contents), offsets)
    return Images.all_of(source, torch.arange(count) % classes, tuple(map(str, range(classes))))
