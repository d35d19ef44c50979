"""Losses to add to training so that representations do not collapse. Each returns a scalar."""

from uncollapse.losses.align_uniform import align_loss, uniform_loss
from uncollapse.losses.contra_uniform import contra_uniform_loss
from uncollapse.losses.dispersion import dispersion_loss
from uncollapse.losses.diverse_patch import (
    PatchMix,
    cutmix_patches,
    patch_contrastive_loss,
    patch_cosine_loss,
    patch_mixing_loss,
)
from uncollapse.losses.global_orthogonal import global_orthogonal_loss
from uncollapse.losses.gram_anchor import gram_anchor_loss
from uncollapse.losses.info_nce import info_nce
from uncollapse.losses.koleo import koleo_loss
from uncollapse.losses.sentence_loss import SentenceLoss
from uncollapse.losses.sigreg import sigreg_loss
from uncollapse.losses.vicreg import covariance_loss, variance_loss
from uncollapse.losses.visreg import visreg_loss
from uncollapse.registry import discover

__all__ = [
    "PatchMix",
    "SentenceLoss",
    "align_loss",
    "contra_uniform_loss",
    "covariance_loss",
    "cutmix_patches",
    "dispersion_loss",
    "global_orthogonal_loss",
    "gram_anchor_loss",
    "info_nce",
    "koleo_loss",
    "patch_contrastive_loss",
    "patch_cosine_loss",
    "patch_mixing_loss",
    "sigreg_loss",
    "uniform_loss",
    "variance_loss",
    "visreg_loss",
]

discover(__name__, __path__)
