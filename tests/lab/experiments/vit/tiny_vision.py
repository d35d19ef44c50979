"""Vision transformers of a few thousand weights, and images for them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from uncollapse.backbones import torchvision_ops
from uncollapse.lab.engine.seeding import use_seed
from uncollapse.lab.experiments.vit.config import Config
from uncollapse.lab.models.vision_classifier import build_vit

torchvision_ops.declare()
timm: Any = pytest.importorskip("timm")

CLASSES = ("ant", "bee", "cat", "dog", "eel")
SIZES: dict[str, Any] = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}
KINDS: dict[str, dict[str, Any]] = {  # what differs in tokens before the patches, and in the last norm
    "class token": {"name": "deit_tiny_patch16_224"},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
    "no class token": {"name": "vit_tiny_patch16_224", "class_token": False, "global_pool": "avg"},
    "registers": {"name": "vit_small_patch16_224", "reg_tokens": 4, "no_embed_class": True},
    "pooled registers": {"name": "vit_little_patch16_reg4_gap_256"},
}


def tiny_vit(name: str = "deit_tiny_patch16_224", seed: int = 0, **changes: Any) -> Any:
    """With weights of a size that lets every step show, and its head too."""
    with use_seed(seed):
        model = build_vit(name, len(CLASSES), **(SIZES | {"init": "xavier"} | changes))
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def tiny_config(**changes: Any) -> Config:
    """A run of the same sizes, without an image of its own."""
    sizes = {"depth": 2, "width": 24, "heads": 3, "image": 32, "patch": 8}
    still = {"cure": "none", "init": "xavier", "mixup": 0.0, "cutmix": 0.0, "drop_path": 0.0}
    return Config(**(sizes | still | changes))


def images(count: int = 4, side: int = 32, seed: int = 0) -> Tensor:
    """Pale enough for products of tokens in which an exponential does not end at 0 or 1."""
    return 0.2 * torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))
