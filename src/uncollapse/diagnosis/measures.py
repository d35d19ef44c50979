"""List what a diagnosis measures at each layer: names, titles and directions, for reports and tables.

A measure of a sequence (an image, a graph) is averaged over sequences. A measure of the dataset covers all tokens.
"""

from dataclasses import dataclass
from typing import Literal

from uncollapse.registry import METRICS

Scope = Literal["sequence", "dataset"]
Group = Literal["similarity", "rank", "spread", "attention", "graph", "outliers", "views"]


@dataclass(frozen=True)
class Measure:
    """A number that is measured at a layer.

    short: the column title in a terminal. better: which direction is further from collapse, None if neither is.
    """

    name: str
    title: str
    short: str
    scope: Scope
    group: Group
    better: Literal["higher", "lower"] | None
    bounds: tuple[float | None, float | None]
    says: str


def _of(name: str, title: str, short: str, scope: Scope, group: Group, says: str, metric: str | None = None) -> Measure:
    """Return a measure with the facts of a registered metric, the one of the same name unless another is given."""
    facts = METRICS[metric or name]
    return Measure(name, title, short, scope, group, facts.better, facts.bounds, says)


MEASURES: dict[str, Measure] = {
    m.name: m
    for m in (
        _of(
            "mean_cosine",
            "Token similarity",
            "cosine",
            "sequence",
            "similarity",
            "mean cosine of two tokens; 1 = all alike",
        ),
        _of(
            "robust_cosine",
            "Token similarity without outliers",
            "robust cosine",
            "sequence",
            "similarity",
            "mean cosine of two tokens without the three largest features and, in causal models, the first token",
            "mean_cosine",
        ),
        _of(
            "pooled_cosine",
            "Similarity of sequences",
            "pooled cosine",
            "dataset",
            "similarity",
            "mean cosine of the mean tokens of two sequences; 1 = the input does not matter",
            "mean_cosine",
        ),
        _of(
            "effective_rank",
            "Effective rank",
            "rank",
            "sequence",
            "rank",
            "dimensions that the tokens of a sequence span",
        ),
        Measure(
            "rank_share",
            "Rank share of a sequence",
            "rank share",
            "sequence",
            "rank",
            "higher",
            (0, 1),
            "effective rank of the centred tokens of a sequence, without outliers, over the most that it could be",
        ),
        _of(
            "dataset_rank",
            "Effective rank of the dataset",
            "dataset rank",
            "dataset",
            "rank",
            "dimensions that all tokens span around their mean",
            "effective_rank",
        ),
        Measure(
            "dataset_rank_share",
            "Rank share of the dataset",
            "dataset share",
            "dataset",
            "rank",
            "higher",
            (0, 1),
            "effective rank of all tokens with standardised features, without outliers, over the most it could be",
        ),
        _of(
            "token_variance",
            "Token variance",
            "token variance",
            "sequence",
            "spread",
            "squared distance of the tokens from their mean",
        ),
        _of(
            "feature_variance",
            "Feature variance",
            "feature variance",
            "sequence",
            "spread",
            "variance over the features of each token",
        ),
        _of(
            "uniformity",
            "Uniformity",
            "uniformity",
            "dataset",
            "spread",
            "log mean potential of a sample of tokens; 0 = one point",
        ),
        Measure(
            "uniformity_gap",
            "Distance to the optimum (%)",
            "% from optimum",
            "dataset",
            "spread",
            "lower",
            (None, 100),
            "how far the uniformity of embeddings is from that of a uniform distribution; 100 = one point",
        ),
        _of(
            "feature_correlation",
            "Feature correlation",
            "feature corr.",
            "dataset",
            "spread",
            "mean |correlation| of two features",
        ),
        _of(
            "outlier_share",
            "Outlier share",
            "outlier share",
            "dataset",
            "outliers",
            "share of the variance in the 3 largest features",
        ),
        Measure(
            "first_token_norm",
            "First token",
            "first token",
            "sequence",
            "outliers",
            None,
            (0, None),
            "length of the first token over the median length of the others",
        ),
        _of(
            "attention_similarity",
            "Attention similarity",
            "attention cosine",
            "sequence",
            "attention",
            "mean cosine of two attention rows",
        ),
        _of(
            "attention_std",
            "Attention deviation",
            "attention std",
            "sequence",
            "attention",
            "standard deviation of an attention row",
        ),
        _of(
            "attention_entropy",
            "Attention entropy",
            "attention entropy",
            "sequence",
            "attention",
            "entropy of an attention row over log n",
        ),
        _of(
            "dirichlet_energy",
            "Dirichlet energy",
            "Dirichlet energy",
            "sequence",
            "graph",
            "squared differences along edges, over ‖X‖²",
        ),
        _of(
            "mean_average_distance",
            "MAD",
            "MAD",
            "sequence",
            "graph",
            "mean cosine distance of a node to its neighbours",
        ),
        _of(
            "alignment",
            "Alignment",
            "alignment",
            "dataset",
            "views",
            "mean squared distance of the two views of a sample",
        ),
        Measure(
            "pooled_uniformity",
            "Uniformity of pooled views",
            "pooled uniformity",
            "dataset",
            "views",
            "lower",
            (None, 0),
            "log mean potential of the pooled samples; 0 = one point",
        ),
    )
}
