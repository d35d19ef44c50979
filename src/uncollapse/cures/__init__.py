"""Cures: layers against collapse. Each file has the pure function first and a thin module around it below."""

from uncollapse.cures.attn_scale import AttnScale, attn_scale
from uncollapse.cures.centered_attention import CenteredAttention, centered_attention
from uncollapse.cures.contra_norm import ContraNorm, contra_norm
from uncollapse.cures.diff_group_norm import DiffGroupNorm, diff_group_norm
from uncollapse.cures.drop_edge import DropEdge, drop_edge
from uncollapse.cures.feat_scale import FeatScale, feat_scale
from uncollapse.cures.gfsa import GFSA, gfsa
from uncollapse.cures.initial_residual import InitialResidual, initial_residual
from uncollapse.cures.layer_norm_scaling import LayerNormScaling, layer_norm_scaling
from uncollapse.cures.layer_scale import LayerScale, layer_scale
from uncollapse.cures.mean_subtraction import MeanSubtraction, mean_subtraction
from uncollapse.cures.neutreno import NeuTRENO, neutreno
from uncollapse.cures.node_norm import NodeNorm, node_norm
from uncollapse.cures.output_gate import OutputGate, output_gate
from uncollapse.cures.pair_norm import PairNorm, pair_norm
from uncollapse.cures.pre_activation_residual import PreActivationResidual, pre_activation_residual
from uncollapse.cures.residual import Residual, residual
from uncollapse.cures.value_residual import ValueResidual, value_residual
from uncollapse.registry import discover

__all__ = [
    "GFSA",
    "AttnScale",
    "CenteredAttention",
    "ContraNorm",
    "DiffGroupNorm",
    "DropEdge",
    "FeatScale",
    "InitialResidual",
    "LayerNormScaling",
    "LayerScale",
    "MeanSubtraction",
    "NeuTRENO",
    "NodeNorm",
    "OutputGate",
    "PairNorm",
    "PreActivationResidual",
    "Residual",
    "ValueResidual",
    "attn_scale",
    "centered_attention",
    "contra_norm",
    "diff_group_norm",
    "drop_edge",
    "feat_scale",
    "gfsa",
    "initial_residual",
    "layer_norm_scaling",
    "layer_scale",
    "mean_subtraction",
    "neutreno",
    "node_norm",
    "output_gate",
    "pair_norm",
    "pre_activation_residual",
    "residual",
    "value_residual",
]

discover(__name__, __path__)
