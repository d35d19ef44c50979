"""Cures: layers against collapse. Each file has the pure function first and a thin module around it below."""

from uncollapse.cures.attn_scale import AttnScale, attn_scale
from uncollapse.cures.contra_norm import ContraNorm, contra_norm
from uncollapse.cures.diff_group_norm import DiffGroupNorm, diff_group_norm
from uncollapse.cures.drop_edge import DropEdge, drop_edge
from uncollapse.cures.feat_scale import FeatScale, feat_scale
from uncollapse.cures.initial_residual import InitialResidual, initial_residual
from uncollapse.cures.layer_norm_scaling import LayerNormScaling, layer_norm_scaling
from uncollapse.cures.layer_scale import LayerScale, layer_scale
from uncollapse.cures.mean_subtraction import MeanSubtraction, mean_subtraction
from uncollapse.cures.node_norm import NodeNorm, node_norm
from uncollapse.cures.pair_norm import PairNorm, pair_norm
from uncollapse.cures.residual import Residual, residual
from uncollapse.registry import discover

__all__ = [
    "AttnScale",
    "ContraNorm",
    "DiffGroupNorm",
    "DropEdge",
    "FeatScale",
    "InitialResidual",
    "LayerNormScaling",
    "LayerScale",
    "MeanSubtraction",
    "NodeNorm",
    "PairNorm",
    "Residual",
    "attn_scale",
    "contra_norm",
    "diff_group_norm",
    "drop_edge",
    "feat_scale",
    "initial_residual",
    "layer_norm_scaling",
    "layer_scale",
    "mean_subtraction",
    "node_norm",
    "pair_norm",
    "residual",
]

discover(__name__, __path__)
