"""Metrics of collapse: pure functions on tensors, registered with their facts in `uncollapse.registry.METRICS`."""

from uncollapse.metrics.attention import attention_entropy, attention_similarity, attention_std
from uncollapse.metrics.bootstrap import Interval, alignment_interval, uniformity_interval
from uncollapse.metrics.dense import dense_structure, gram_drift
from uncollapse.metrics.graph import dirichlet_energy, group_distance_ratio, mean_average_distance
from uncollapse.metrics.hypersphere import alignment, pairwise_potential, uniformity, uniformity_gap, uniformity_optimum
from uncollapse.metrics.similarity import (
    feature_correlation,
    feature_variance,
    mean_cosine,
    outlier_share,
    token_variance,
)
from uncollapse.metrics.spectrum import effective_rank, participation_ratio, rankme, singular_values, stable_rank
from uncollapse.metrics.views import alpha_req, lidar
from uncollapse.registry import discover

__all__ = [
    "Interval",
    "alignment",
    "alignment_interval",
    "alpha_req",
    "attention_entropy",
    "attention_similarity",
    "attention_std",
    "dense_structure",
    "dirichlet_energy",
    "effective_rank",
    "feature_correlation",
    "feature_variance",
    "gram_drift",
    "group_distance_ratio",
    "lidar",
    "mean_average_distance",
    "mean_cosine",
    "outlier_share",
    "pairwise_potential",
    "participation_ratio",
    "rankme",
    "singular_values",
    "stable_rank",
    "token_variance",
    "uniformity",
    "uniformity_gap",
    "uniformity_interval",
    "uniformity_optimum",
]

discover(__name__, __path__)
