"""List what a diagnosis measures at each layer: names and directions, for reports and tables.

A measure of a sequence (an image, a graph) is averaged over sequences. A measure of the dataset covers all tokens.
"""

from dataclasses import dataclass
from typing import Literal

from uncollapse.registry import METRICS

Scope = Literal["sequence", "dataset"]
Group = Literal["similarity", "rank", "spread", "attention", "graph", "outliers", "views"]


@dataclass(frozen=True)
class Measure:
    """A number that is measured at a layer. It has one name: `effective_rank` in code, "effective rank" in text.

    better: which direction is further from collapse, None if neither is.
    """

    name: str
    scope: Scope
    group: Group
    better: Literal["higher", "lower"] | None
    bounds: tuple[float | None, float | None]
    says: str

    @property
    def short(self) -> str:
        """The name in words, as in tables and sentences."""
        return self.name.replace("_", " ").replace("dirichlet", "Dirichlet")

    @property
    def title(self) -> str:
        """The name in words, with a capital letter."""
        return self.short[0].upper() + self.short[1:]


def _of(name: str, scope: Scope, group: Group, says: str, metric: str | None = None) -> Measure:
    """Return a measure with the facts of a registered metric, the one of the same name unless another is given."""
    facts = METRICS[metric or name]
    return Measure(name, scope, group, facts.better, facts.bounds, says)


MEASURES: dict[str, Measure] = {
    m.name: m
    for m in (
        _of(
            "mean_cosine",
            "sequence",
            "similarity",
            "mean cosine of two tokens; 1 = all point the same way",
        ),
        _of(
            "robust_cosine",
            "sequence",
            "similarity",
            "mean cosine of two tokens without the three largest features and, in causal models, the first token",
            "mean_cosine",
        ),
        _of(
            "pooled_cosine",
            "dataset",
            "similarity",
            "mean cosine of the mean tokens of two sequences; 1 = the input does not matter",
            "mean_cosine",
        ),
        _of(
            "effective_rank",
            "sequence",
            "rank",
            "dimensions that the tokens of a sequence span",
        ),
        Measure(
            "rank_share",
            "sequence",
            "rank",
            "higher",
            (0, 1),
            "effective rank of the centered tokens of a sequence, without outliers, divided by its maximum",
        ),
        _of(
            "dataset_rank",
            "dataset",
            "rank",
            "dimensions that all tokens span around their mean",
            "effective_rank",
        ),
        Measure(
            "dataset_rank_share",
            "dataset",
            "rank",
            "higher",
            (0, 1),
            "effective rank of all tokens with standardized features, without outliers, divided by its maximum",
        ),
        _of(
            "token_variance",
            "sequence",
            "spread",
            "squared distance of the tokens from their mean",
        ),
        _of(
            "feature_variance",
            "sequence",
            "spread",
            "variance over the features of each token",
        ),
        _of(
            "uniformity",
            "dataset",
            "spread",
            "log mean potential of a sample of tokens; 0 = one point",
        ),
        Measure(
            "uniformity_gap",
            "dataset",
            "spread",
            "lower",
            (None, 100),
            "distance of the uniformity of embeddings from its optimum, in percent; 100 = one point",
        ),
        _of(
            "feature_correlation",
            "dataset",
            "spread",
            "mean |correlation| of two features",
        ),
        _of(
            "outlier_share",
            "dataset",
            "outliers",
            "share of the variance in the 3 largest features",
        ),
        Measure(
            "first_token_norm",
            "sequence",
            "outliers",
            None,
            (0, None),
            "length of the first token over the median length of the others",
        ),
        Measure(
            "massive_activation",
            "sequence",
            "outliers",
            None,
            (0, None),
            "largest |activation| over the median; called massive from about 1,000 on (arXiv 2402.17762)",
        ),
        Measure(
            "token_norm",
            "sequence",
            "spread",
            None,
            (0, None),
            "median length of the tokens, without the first; it grows with depth in pre-norm models",
        ),
        _of(
            "attention_similarity",
            "sequence",
            "attention",
            "mean cosine of two attention rows",
        ),
        _of(
            "attention_std",
            "sequence",
            "attention",
            "standard deviation of an attention row",
        ),
        _of(
            "attention_entropy",
            "sequence",
            "attention",
            "entropy of an attention row over log n",
        ),
        _of(
            "dirichlet_energy",
            "sequence",
            "graph",
            "squared differences along edges, over ‖X‖²",
        ),
        _of(
            "mean_average_distance",
            "sequence",
            "graph",
            "mean cosine distance of a node to its neighbors",
        ),
        _of(
            "alignment",
            "dataset",
            "views",
            "mean squared distance of the two views of a sample",
        ),
        Measure(
            "pooled_uniformity",
            "dataset",
            "views",
            "lower",
            (None, 0),
            "log mean potential of the pooled samples; 0 = one point",
        ),
    )
}
