"""Vision transformers as tasks of the arena: on scikit-learn's digits, and on a part of CIFAR-10."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from uncollapse.lab.data.image.image_sets import load_image_set
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.engine.task import Task, TrainingOptions
from uncollapse.lab.experiments.arena.config import Config
from uncollapse.lab.experiments.arena.problems import Cure, Problem, scaled_epochs
from uncollapse.lab.experiments.vit import digits
from uncollapse.lab.models.vision_classifier import build_vit
from uncollapse.lab.runs.results import fingerprint

DIAGNOSED = 64  # images


def build_digits(config: Config, settings: Mapping[str, Any], cure: Cure, runtime: Runtime) -> Problem:
    """Return a vision transformer on scikit-learn's digits, as in the recipe vit-digits."""
    epochs = scaled_epochs(config, digits.Config().epochs)
    own = digits.Config(norm="layer", depth=config.built, lr=config.lr, epochs=epochs, seed=config.seed, **settings)
    splits, model = digits.digits(), digits.build(own)
    with use_seed(own.seed):
        cure(model)
    task = digits.build_task(model, own, splits)
    return _vision("scikit-learn's digits", task, TrainingOptions(epochs, own.seed, clip=own.clip), splits)


CIFAR_IMAGES, CIFAR_EPOCHS, CIFAR_BATCH = 10_000, 3, 64


def build_cifar(config: Config, settings: Mapping[str, Any], cure: Cure, runtime: Runtime) -> Problem:
    """Return a small vision transformer on 10,000 images of CIFAR-10, without augmentation but flips."""
    splits = _cifar_splits(runtime.data_root)
    images, labels = splits["train"]
    epochs = scaled_epochs(config, CIFAR_EPOCHS)
    sizes: dict[str, Any] = {"embed_dim": 64, "num_heads": 4, "img_size": 32, "patch_size": 8, "depth": config.built}
    with use_seed(config.seed):
        model = build_vit("vit_tiny_patch16_224", 10, init="xavier", **sizes, **settings)
        cure(model)

    def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1_000_003 * config.seed + epoch)
        order = torch.randperm(len(images), generator=generator)
        flip = torch.rand(len(images), generator=generator)[:, None, None, None] < 0.5
        return [
            (torch.where(flip[rows], images[rows].flip(-1), images[rows]), labels[rows])
            for rows in torch.split(order, CIFAR_BATCH)
        ]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"validation": digits.accuracy(model, *splits["validation"])}

    steps = epochs * math.ceil(len(images) / CIFAR_BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.05, fused=True)
    task = Task(model, optimizer, batches, loss, evaluate, cosine(steps, 0.1))
    return _vision("CIFAR-10", task, TrainingOptions(epochs, config.seed, clip=1.0), splits)


def _cifar_splits(root: Path | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Return standardized images of training, validation and test: the first 12,000 for training, 2,000 of them held
    out."""
    found = load_image_set("cifar10", root)
    count = CIFAR_IMAGES + 2_000
    parts = {"train": (found.train, count), "test": (found.test, len(found.test))}
    arrays = {name: _stack(images, number) for name, (images, number) in parts.items()}
    deviation, mean = torch.std_mean(arrays["train"][0], (0, 2, 3), keepdim=True)
    scaled = {name: ((images - mean) / deviation, labels) for name, (images, labels) in arrays.items()}
    images, labels = scaled["train"]
    return {
        "train": (images[:CIFAR_IMAGES], labels[:CIFAR_IMAGES]),
        "validation": (images[CIFAR_IMAGES:], labels[CIFAR_IMAGES:]),
        "test": scaled["test"],
    }


def _stack(images: Any, count: int) -> tuple[Tensor, Tensor]:
    arrays = [torch.from_numpy(numpy.asarray(images.image(number)).copy()) for number in range(count)]
    return torch.stack(arrays).permute(0, 3, 1, 2).float() / 255, images.labels[:count]


def _vision(name: str, task: Task, options: TrainingOptions, splits: Mapping[Any, tuple[Tensor, Tensor]]) -> Problem:
    images, labels = splits["test"]
    facts = {"name": name, "fingerprint": fingerprint(tensor for pair in splits.values() for tensor in pair)}
    sizes = {str(split): len(pair[1]) for split, pair in splits.items()}

    def test(model: nn.Module) -> dict[str, float]:
        return {"test": digits.accuracy(model, images, labels)}

    return Problem(task, options, test, torch.split(images[:DIAGNOSED], 32), facts | sizes)
