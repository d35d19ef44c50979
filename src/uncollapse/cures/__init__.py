"""Cures: layers against collapse. Each file has the pure function first and a thin module around it below."""

from uncollapse.cures.attn_scale import AttnScale, attn_scale
from uncollapse.cures.contra_norm import ContraNorm, contra_norm
from uncollapse.cures.drop_edge import DropEdge, drop_edge
from uncollapse.cures.feat_scale import FeatScale, feat_scale
from uncollapse.cures.pair_norm import PairNorm, pair_norm
from uncollapse.registry import discover

__all__ = [
    "AttnScale",
    "ContraNorm",
    "DropEdge",
    "FeatScale",
    "PairNorm",
    "attn_scale",
    "contra_norm",
    "drop_edge",
    "feat_scale",
    "pair_norm",
]

discover(__name__, __path__)
