"""Losses to add to training so that representations do not collapse. Each returns a scalar."""

from uncollapse.losses.align_uniform import align_loss, uniform_loss
from uncollapse.losses.contra_uniform import contra_uniform_loss
from uncollapse.losses.diverse_patch import (
    PatchMix,
    cutmix_patches,
    patch_contrastive_loss,
    patch_cosine_loss,
    patch_mixing_loss,
)
from uncollapse.losses.info_nce import info_nce
from uncollapse.registry import discover

__all__ = [
    "PatchMix",
    "align_loss",
    "contra_uniform_loss",
    "cutmix_patches",
    "info_nce",
    "patch_contrastive_loss",
    "patch_cosine_loss",
    "patch_mixing_loss",
    "uniform_loss",
]

discover(__name__, __path__)
