"""What ContraNorm's and DiversePatch's papers trained on ImageNet, and the numbers that they print."""

import math
from collections.abc import Mapping
from typing import Any

from uncollapse.lab.tables.paper_table import Published

DEIT: Mapping[str, Any] = {  # all but the data is named, so that no other default ever changes a preset
    "examples": 0,
    "holdout": 0.0,
    "model": "deit_tiny_patch16_224",
    "start": "scratch",
    "depth": 12,
    "width": 0,
    "heads": 0,
    "image": 0,
    "patch": 0,
    "teacher": "",
    "talking_heads": False,
    "init": "timm",
    "cure": "none",
    "at": "norms",
    "scale": 0.2,
    "temperature": 1.0,
    "identity": "no",
    "dual": False,
    "average": "raw",
    "learnable": False,
    "positive": False,
    "cosine_loss": 0.0,
    "absolute": False,
    "contrast_loss": 0.0,
    "contrast_form": "paper",
    "mixing_loss": 0.0,
    "patch_dropout": 0.2,
    "epochs": 300,
    "batch": 1024,
    "accumulate": 1,
    "lr": 1e-3,  # 5e-4 for each 512 images
    "lr_floor": 1e-5,
    "warmup": 5.0,
    "layer_decay": 1.0,
    "weight_decay": 0.05,
    "decay_positions": False,
    "clip": 0.0,
    "head_dropout": 0.0,
    "drop_path": 0.1,
    "crop": "resized",
    "least_area": 0.08,
    "flip": 0.5,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "color_jitter": 0.3,
    "erasing": 0.25,
    "repeats": 3,
    "mixup": 0.8,
    "cutmix": 1.0,
    "mix_chance": 1.0,
    "mix_switch": 0.5,
    "smoothing": 0.1,
    "ema": 0.0,
    "precision": "no",
    "seed": 0,
}
CONTRA_NORM = {**DEIT, "cure": "contra_norm", "epochs": 150}
DIVERSE_PATCH = {  # with what the released code and an early note to it have besides: talking heads, dropout, clipping
    **DEIT,
    "model": "deit_base_patch16_224",
    "talking_heads": True,
    "cosine_loss": 1.0,
    "contrast_loss": 1.0,
    "mixing_loss": 1.0,
    "batch": 576,
    "lr": 5e-4 * 576 / 512,
    "lr_floor": 1e-7,
    "clip": 5.0,
    "head_dropout": 0.2,
    "drop_path": 0.5,
    "repeats": 1,
    "mixup": 0.0,
    "ema": 0.99996,
}
RELEASED = {**DIVERSE_PATCH, "cosine_loss": 0.0, "contrast_form": "released"}  # whose numbers are told
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper-contranorm": CONTRA_NORM,
    "paper-diversepatch": DIVERSE_PATCH,
    "paper-diversepatch-longer": {  # 100 more epochs, at the rate of epoch 300 of 400
        **DIVERSE_PATCH,
        "start": "FOLDER-KEPT-AFTER-300-EPOCHS",  # which --start has to name
        "epochs": 100,
        "lr": DIVERSE_PATCH["lr"] * (1 + math.cos(0.75 * math.pi)) / 2,
        "warmup": 0.0,
        "drop_path": 0.75,
    },
}

Table = Mapping[str, Mapping[int, float]]  # top-1 accuracy by row and depth
TINY_100: Table = {  # DeiT-T on ImageNet-100
    "none": {12: 76.58, 16: 75.34, 24: 76.76},
    "contra_norm": {12: 79.34, 16: 80.44, 24: 81.28},
}
SMALL_1000: Table = {  # DeiT-S on ImageNet; with a scale of 0.3 at 24 blocks
    "none": {12: 77.32, 16: 78.25, 24: 77.69},
    "contra_norm": {12: 77.80, 16: 79.04, 24: 78.67},
}
BASE_1000: Table = {
    "contrast loss + mixing loss": {12: 82.9, 24: 83.3}
}  # DeiT-B on ImageNet, from the notes of the released code


def published(axes: tuple[str, str, str], data: str, table: Table) -> tuple[Published, ...]:
    """The numbers of a table. axes: what a board calls its groups, rows and columns. data: the group."""
    source = "DiversePatch, released code" if table is BASE_1000 else "ContraNorm"
    return tuple(
        Published(dict(zip(axes, (data, row, depth), strict=True)), value, None, source)
        for row, values in table.items()
        for depth, value in values.items()
    )
