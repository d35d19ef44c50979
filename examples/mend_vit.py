"""Mend a deep vision transformer with one line, and compare the rank of its
tokens and its accuracy.

The model is timm's ViT with 48 blocks, far too many for digits of 8×8 pixels.
It is trained three times from the same initial weights: unchanged, for twice
as many epochs, and with ContraNorm in front of every norm, as published for
DeiT, which takes about as long as twice the epochs. With the default arguments
this takes a few minutes. One seed is not a comparison: docs/which-cure.md has
results over several seeds.

    python examples/mend_vit.py --out results/mend_vit.json
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import uncollapse as uc
from uncollapse.lab.experiments.vit import digits

NAMES = {"plain": "unchanged", "longer": "twice the epochs", "mended": "with ContraNorm"}


def main() -> None:
    """Train all three, print a table, and write the metrics if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=48, help="number of blocks")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--scale", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the metrics")
    args = parser.parse_args()
    config = digits.Config(norm="layer", depth=args.depth, epochs=args.epochs, seed=args.seed)
    longer = replace(config, epochs=2 * config.epochs)
    runs = {"plain": train(config), "longer": train(longer), "mended": train(config, args.scale)}
    show(runs)
    if args.out is not None:
        args.out.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def train(config: digits.Config, scale: float | None = None) -> dict[str, Any]:
    """Build the model, attach the cure if a scale is given, train, and measure the last block."""
    model = digits.build(replace(config, norm="layer"))
    if scale is not None:
        print(uc.attach(model, "contra_norm", scale=scale, at="norms", tokens="all"))
    started = time.process_time()
    record = digits.fit(model, config)
    spent = time.process_time() - started
    images, _ = digits.digits()["test"]
    diagnosis = uc.diagnose(model, torch.split(images, 50), plan=uc.Plan(baseline=0))
    last = [layer for layer in diagnosis.layers if layer.name.startswith("block")][-1]
    return {
        **record,
        "cpu_seconds": round(spent, 1),
        "cures": diagnosis.settings.get("cures", []),
        "effective_rank": last["effective_rank"],
        "mean_cosine": last["mean_cosine"],
        "verdict": diagnosis.verdict.sentence,
    }


def show(runs: dict[str, dict[str, Any]]) -> None:
    """Print the runs next to each other."""
    table = Table("", *NAMES.values())
    for title, key in (("effective rank after the last block", "effective_rank"), ("mean cosine there", "mean_cosine")):
        table.add_row(title, *(f"{runs[name][key]:.2f}" for name in NAMES))
    table.add_row("test accuracy", *(f"{runs[name]['figures']['test']:.1%}" for name in NAMES))
    table.add_row("CPU seconds of training", *(f"{runs[name]['cpu_seconds']:.0f}" for name in NAMES))
    Console().print(table)


if __name__ == "__main__":
    main()
