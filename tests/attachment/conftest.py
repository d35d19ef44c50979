"""Tests of `uc.attach`, `uc.tokens` and saved cures.

by_hand        the table of models and places, with every block written by hand; no hooks
tiny_models    one tiny model with a batch for each family
test_places    family × place: a cure equals the formula written into the block
test_contract  family × cure: trained, copied, saved, removed, in other dtypes
test_formulas  cures that take more than tokens, by hand
fuzzing        random cures at random places of random models
"""

from uncollapse.backbones import torchvision_ops

torchvision_ops.declare()  # before any test of this folder imports transformers or timm
