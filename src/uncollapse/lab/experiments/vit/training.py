"""Training and evaluation of the recipe `vit`: batches, loss, optimizer, accuracy, diagnosis."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.run import diagnose
from uncollapse.diagnosis.target import Plan
from uncollapse.errors import NotFiniteError, UsageError, import_optional
from uncollapse.lab.data.image.augmentation import InputSpec, evaluation_transform, training_transform
from uncollapse.lab.data.image.image_batches import ImageBatch, ImageBatches, epoch_order
from uncollapse.lab.data.image.image_source import Images
from uncollapse.lab.engine.runtime import Runtime
from uncollapse.lab.engine.schedules import cosine
from uncollapse.lab.engine.task import Task
from uncollapse.lab.experiments.vit import soft_labels
from uncollapse.lab.experiments.vit.patch_losses import PatchLosses, WithPatchHead

WARMUP = 5  # epochs, as in DeiT
EVALUATION_BATCH = 250  # images
DIAGNOSED, DIAGNOSED_SEED, DIAGNOSED_BATCH = 256, 0, 32  # test images, the same for all runs


class Training:
    """The task of a run as a context manager: while it is open, losses on patches read the model's activations.

    `skipped` counts the images of each split that could not be read; in training, each time that one was drawn.
    """

    def __init__(self, model: WithPatchHead, config: Any, parts: Mapping[str, Images], runtime: Runtime) -> None:
        self.model, self.config, self.parts, self.runtime = model, config, parts, runtime
        weights = {"cosine": config.cosine_loss, "contrast": config.contrast_loss, "mixing": config.mixing_loss}
        self.losses = PatchLosses(model.vit, weights, absolute=config.absolute, form=config.contrast_form)
        self.spec = input_spec(model.vit)
        self.mixer = _mixer(model.vit, config)
        self.teacher = soft_labels.load_teacher(config.teacher, model.vit, parts["train"].classes)
        self.skipped: dict[str, int] = {}
        self.open = ExitStack()

    def __enter__(self) -> Task:
        config, steps = self.config, self.config.epochs * self.steps
        if steps < 2:
            raise UsageError("The training has one step, at which the schedule is 0 already. Take a smaller batch.")
        self.open.enter_context(self.losses.open())
        if self.teacher is not None:
            self.open.enter_context(self.teacher.show_both_heads(self.model.vit))
        warmup = min(WARMUP / config.epochs, 0.1) if config.warmup is None else config.warmup / config.epochs
        schedule = cosine(steps, warmup, floor=config.lr_floor / config.lr if config.lr else 0.0)
        return Task(
            self.model, build_optimizer(self.model, config), self.batches, self.loss, self.evaluate, schedule, "images"
        )

    def __exit__(self, *error: Any) -> None:
        self.open.__exit__(*error)

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        accumulate: int = self.config.accumulate
        return math.ceil(len(self.batches(1)) / accumulate)

    def batches(self, epoch: int) -> ImageBatches:
        """Return the batches of an epoch."""
        config, images = self.config, self.parts["train"]
        seed = 1_000_003 * config.seed + epoch
        transform = training_transform(
            self.spec,
            crop=config.crop,
            least_area=config.least_area,
            flip=config.flip,
            auto_augment=config.auto_augment,
            color_jitter=config.color_jitter,
            erasing=config.erasing,
        )
        order = epoch_order(len(images), seed, config.repeats)
        count = partial(self._count, "train")
        return ImageBatches(images, order, config.batch, transform, seed, self.runtime.workers, count)

    def loss(self, model: Any, batch: ImageBatch) -> Tensor:
        """Return the classification loss plus the losses on patches."""
        device = next(self.model.parameters()).device
        mixed = self.mixer(batch.images.to(device), batch.labels.to(device))
        task = soft_labels.classification_loss(model(mixed.images), mixed, self.teacher)
        return task + self.losses(self.model.patch_head, mixed.patches).to(task)

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the accuracy on the held-out images, and on the test images if these are read in every epoch."""
        splits = ("validation", *(("test",) if self.config.test_each_epoch else ()))
        return {split: self.accuracy(model.vit, split) for split in splits if split in self.parts}

    @torch.no_grad()
    def accuracy(self, vit: nn.Module, part: str) -> float:
        """Return the accuracy on a split; images that cannot be read do not count."""
        if part == "test":  # the others are evaluated during training
            self.runtime.report_stage("evaluating on the test images")
        vit.eval()
        device = next(vit.parameters()).device
        right = count = 0
        unread, self.skipped[part] = "", 0
        for batch in self.evaluation_batches(part):
            unread, self.skipped[part] = batch.unread or unread, self.skipped[part] + batch.skipped
            if not len(batch):
                continue
            with self._precision(device):
                logits = vit(batch.images.to(device)).float()
            if not bool(logits.isfinite().all()):  # argmax would return a class all the same
                raise NotFiniteError("The model's outputs are not finite.")
            right += int((logits.argmax(1).cpu() == batch.labels).sum())
            count += len(batch)
        if not count:
            raise UsageError(f"None of the {len(self.parts[part])} {part} images can be read. The last was {unread}.")
        return right / count

    def evaluation_batches(self, part: str, which: Tensor | None = None, size: int = EVALUATION_BATCH) -> ImageBatches:
        """Return images of a split without augmentation; `which` selects some of them."""
        images = self.parts[part] if which is None else self.parts[part].select(which)
        transform = evaluation_transform(self.spec, crop=self.config.crop)
        return ImageBatches(images, range(len(images)), size, transform, workers=self.runtime.workers)

    def diagnose(self) -> Diagnosis:
        """Diagnose the model on some test images, with its attention."""
        count = len(self.parts["test"])
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(DIAGNOSED_SEED))[:DIAGNOSED]
        batches = self.evaluation_batches("test", drawn, DIAGNOSED_BATCH)

        def images() -> Iterator[Tensor]:
            for number, batch in enumerate(batches):
                self.runtime.report_stage(f"measuring the model, {number} of {len(batches)} batches")
                if len(batch):
                    yield batch.images

        return diagnose(self.model.vit, images(), attention=True, plan=Plan(baseline=0))

    def _precision(self, device: torch.device) -> Any:
        """Return the autocast context of the training."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.precision)
        return nullcontext() if half is None else torch.autocast(device.type, half)

    def _count(self, part: str, skipped: int) -> None:
        self.skipped[part] = self.skipped.get(part, 0) + skipped


def input_spec(vit: Any) -> InputSpec:
    """Return the image size and normalization that a model of timm expects."""
    facts: dict[str, Any] = import_optional("timm.data", "timm").resolve_data_config({}, model=vit)
    height, width = vit.patch_embed.img_size
    if height != width:
        raise UsageError(f"This recipe needs a model for square images, got one for {height} × {width} pixels.")
    return InputSpec(height, tuple(facts["mean"]), tuple(facts["std"]), facts["interpolation"])


def _mixer(vit: Any, config: Any) -> soft_labels.Mixer:
    patch = vit.patch_embed.patch_size
    if config.mixing_loss and not config.mix_twice:
        return soft_labels.patch_mixer(
            vit.num_classes, patch, cutmix=config.cutmix, chance=config.mix_chance, smoothing=config.smoothing
        )
    mixer = soft_labels.image_mixer(
        vit.num_classes,
        mixup=config.mixup,
        cutmix=config.cutmix,
        chance=config.mix_chance,
        switch=config.mix_switch,
        smoothing=config.smoothing,
    )
    return soft_labels.twice_mixer(mixer, patch) if config.mixing_loss else mixer


def build_optimizer(model: WithPatchHead, config: Any) -> torch.optim.Optimizer:
    """Return AdamW without weight decay for norms, biases and, unless asked for, class tokens and positions.

    `layer_decay` lowers the learning rate of lower layers.
    """
    optim: Any = import_optional("timm.optim", "timm")
    shared = {
        "weight_decay": config.weight_decay,
        "no_weight_decay_list": () if config.decay_positions else model.vit.no_weight_decay(),
    }
    if config.layer_decay < 1:
        made = optim.param_groups_layer_decay(model.vit, layer_decay=config.layer_decay, **shared)
    else:
        made = optim.param_groups_weight_decay(model.vit, **shared)
    groups = [
        {
            "params": group["params"],
            "weight_decay": group["weight_decay"],
            "lr": config.lr * group.get("lr_scale", 1.0),
        }
        for group in made
    ]
    if model.patch_head is not None:
        groups.append({"params": list(model.patch_head.parameters()), "weight_decay": config.weight_decay})
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def avoid_slow_attention(vit: nn.Module, precision: str, device: str | None) -> None:
    """Turn fused attention off where it is slow: its backward pass in bfloat16 on a CPU.

    There it took half of a training step of a small model, five times as long as in float32 (torch 2.13).
    """
    on_cpu = device == "cpu" or (device is None and not torch.accelerator.is_available())
    if precision != "bf16" or not on_cpu:
        return
    for module in vit.modules():
        if getattr(module, "fused_attn", False):
            module.fused_attn = False  # type: ignore[assignment]
