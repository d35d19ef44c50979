"""Losses on inner layers: train a small vision transformer from timm in four
ways on scikit-learn's digits.

    python examples/diverse_patch.py --epochs 10 --depth 24 --out FILE.json

1. plain;
2. with the three losses of DiversePatch (arXiv 2104.12753) on its patches,
   weights 1;
3. with the uniformity loss on the last block's patches, the baseline of
   ContraNorm (arXiv 2303.06562), weight 1;
4. with ContraNorm attached in front of every norm.

All start from the same initial weights and see the same images, mixed by
CutMix. No setting was selected on test images: the learning rate and the scale
are those of the recipe `vit-digits`. Without other arguments, the results are
written to results/diverse_patch.json, otherwise to the file of --out.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import uncollapse as uc
from uncollapse.lab.engine.runtime import use_threads
from uncollapse.lab.experiments.vit.digits import Config as Vit
from uncollapse.lab.experiments.vit.digits import accuracy, build, digits
from uncollapse.lab.runs.results import build_record

CLASSES = 10
OUT = Path("results/diverse_patch.json")


@dataclass(frozen=True)
class Config:
    """The model and its training, and the seed of both."""

    vit: Vit = field(default_factory=lambda: Vit(norm="layer", depth=24, epochs=10))
    seed: int = 0


def no_loss(t: Any, mix: uc.PatchMix, head: nn.Module) -> Tensor:
    """Return zero: only the loss of the task counts."""
    return torch.zeros(())


def diverse_patch(t: Any, mix: uc.PatchMix, head: nn.Module) -> Tensor:
    """Return the sum of the three losses of DiversePatch."""
    patches = t["final"]
    return (
        uc.patch_cosine_loss(patches)
        + uc.patch_contrastive_loss(t["first"], patches)
        + uc.patch_mixing_loss(head(patches), mix.labels)
    )


def uniformity(t: Any, mix: uc.PatchMix, head: nn.Module) -> Tensor:
    """Return the uniformity loss of the patches of each image."""
    return uc.contra_uniform_loss(t["last"])


WAYS: dict[
    str, tuple[Callable[[Any, uc.PatchMix, nn.Module], Tensor], bool]
] = {  # loss, whether ContraNorm is attached
    "plain": (no_loss, False),
    "DiversePatch losses": (diverse_patch, False),
    "uniformity loss": (uniformity, False),
    "ContraNorm attached": (no_loss, True),
}


def train(way: str, config: Vit, progress: Console) -> nn.Module:
    """Train a model in one of the ways. The head of its patches is only used in training."""
    inner_loss, cured = WAYS[way]
    images, labels = digits()["train"]
    model = build(config)
    if cured:  # before the optimizer is created, which must know the parameters of the cure
        uc.attach(model, "contra_norm", scale=config.scale, at="norms", tokens="all")
    torch.manual_seed(config.seed)
    head = nn.Linear(config.dim, CLASSES)  # one for all patches
    weights = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, config.steps, pct_start=config.warmup)
    random = torch.Generator().manual_seed(config.seed)
    model.train()
    with uc.tokens(model, layers=("first", "last", "final")) as t:
        for _ in track(range(config.epochs), way, console=progress, transient=True):
            for batch in torch.split(torch.randperm(len(images), generator=random), config.batch):
                mix = uc.cutmix_patches(
                    images[batch], labels[batch], config.patch, num_classes=CLASSES, generator=random
                )
                loss = F.cross_entropy(model(mix.images), mix.labels.mean(1)) + inner_loss(t, mix, head)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(weights, config.clip)
                optimizer.step()
                schedule.step()
    return model.eval()


def measured(way: str, config: Vit, progress: Console) -> dict[str, Any]:
    """Train in one way, and return the metrics on validation and test images."""
    started = time.process_time()  # of this process only; wall-clock time depends on other processes
    model = train(way, config, progress)
    seconds = time.process_time() - started
    parts = digits()
    diagnosis = uc.diagnose(model, torch.split(parts["test"][0], 100), plan=uc.Plan(baseline=0))
    last = next(layer for layer in reversed(diagnosis.layers) if layer.name == f"block {config.depth - 1}")
    return {
        "way": way,
        "validation_accuracy": accuracy(model, *parts["validation"]),
        "test_accuracy": accuracy(model, *parts["test"]),
        "mean_cosine": last["mean_cosine"],
        "effective_rank": last["effective_rank"],
        "verdict": diagnosis.verdict.kind,
        "cpu_seconds": round(seconds, 1),
    }


def table(runs: list[dict[str, Any]], config: Vit) -> Table:
    """Return a table with one row per way."""
    shown = Table(title=f"{config.depth} blocks, {config.epochs} epoch{'s' * (config.epochs > 1)}, seed {config.seed}")
    for column in ("way", "test accuracy", "cosine, last block", "effective rank, last block", "CPU time"):
        shown.add_column(column, justify="left" if column == "way" else "right")
    for run in runs:
        cells = (f"{100 * run['test_accuracy']:.1f} %", f"{run['mean_cosine']:.3f}", f"{run['effective_rank']:.1f}")
        shown.add_row(run["way"], *cells, f"{run['cpu_seconds']:.0f} s")
    return shown


@use_threads()
def main() -> None:
    """Train, measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=Config().vit.epochs)
    parser.add_argument("--depth", type=int, default=Config().vit.depth)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = Config(Vit(norm="layer", depth=args.depth, epochs=args.epochs, seed=args.seed), args.seed)
    console, started = Console(), time.perf_counter()
    runs = [measured(way, config.vit, console) for way in WAYS]
    console.print(table(runs, config.vit))
    record = build_record("diverse_patch", config, time.perf_counter() - started, ("timm", "scikit-learn"), runs=runs)
    out = args.out or (OUT if config == Config() else None)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        console.print(f"Written: {out}")


if __name__ == "__main__":
    main()
