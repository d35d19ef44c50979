"""Statistics of one layer over a stream of batches, in memory that does not grow with their number."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from uncollapse import metrics
from uncollapse.backbones.sites import Context
from uncollapse.diagnosis.result import Layer, Summary
from uncollapse.diagnosis.stats.compensated_sum import CompensatedSum
from uncollapse.diagnosis.stats.moments import Moments
from uncollapse.diagnosis.stats.reservoir import Reservoir
from uncollapse.diagnosis.stats.scalar import ScalarStats
from uncollapse.metrics import robust
from uncollapse.metrics.similarity import pair_cosine
from uncollapse.metrics.spectrum import gram_spectrum, rank_from_singular_values
from uncollapse.pairwise import numerics

WIDEST = 1536  # features up to which the moments of all tokens are kept: 36 MiB a layer there, 9 at 768
TOKENS = 1024  # tokens of a batch that enter measures of the dataset, or twice the features if that is more
SAMPLE = 1024  # tokens kept for what is not a moment
FIRST = 8  # sequences of the first batch whose ranks are taken, at least, so that short runs have some
CURVE = 256  # singular values that a diagnosis stores
SIDE = 48  # tokens on a side of a heat map


@dataclass(frozen=True)
class StatsConfig:
    """How a layer is measured.

    rank_samples: sequences of each batch but the first, which gives eight at least, whose ranks and robust measures are
    taken. attention: whether maps are measured. prefix: whether CLS, distillation and register tokens count.
    all_tokens: whether measures of the dataset see every token of a batch, or a sample of them. seed: of all sampling.
    t, alpha: of uniformity and alignment.
    """

    rank_samples: int = 2
    attention: bool = False
    prefix: bool = False
    all_tokens: bool = False
    seed: int = 0
    t: float = 2.0
    alpha: float = 2.0


class LayerStats:
    """Gathers what a diagnosis says about one layer."""

    def __init__(self, plan: StatsConfig) -> None:
        self.plan = plan
        self.sets = 0
        self.tokens = 0
        self._picture: tuple[int, tuple[tuple[float, ...], ...]] | None = None  # the seed of the part, and its heat map
        self._spreads: dict[str, ScalarStats] = {}
        self._moments: Moments | None = None
        self._sample: Reservoir | None = None
        self._pooled: Tensor | None = None  # of the last batch, until its second view comes
        self._views: Reservoir | None = None
        self._distances = ScalarStats(plan.seed)  # of the two views of a set
        self._means: CompensatedSum | None = None  # of the mean tokens of sets at length one
        self._mean_count = 0
        self._chooser = torch.Generator().manual_seed(plan.seed)

    def update(self, x: Tensor, mask: Tensor | None, context: Context) -> None:
        """Add the sets of tokens x (b, n, d) of a batch, of which mask (b, n) tells the real ones."""
        x = numerics.tokens(x.detach(), mask)
        sample = self._rows(x)
        if self._picture is None:
            self._picture = self.plan.seed, cosines(x[0], None if mask is None else mask[0])
        self.sets += len(x)
        self.tokens += x.shape[:-1].numel() if mask is None else int(mask.sum())
        rows = self._some(x, mask)
        sample.update(rows)
        if self._moments is not None:
            self._moments.update(rows)
        if mask is not None or x.shape[1] > 1:  # one token has no cosine
            self._add("mean_cosine", pair_cosine(x, numerics.real_count(x, mask)).clamp(-1, 1), mask)
        self._update_sampled(x, mask, context)

    def update_means(self, x: Tensor, mask: Tensor | None) -> None:
        """Add the mean tokens of the sets x (b, n, d), by which whole sets are compared."""
        unit = numerics.unit_rows(pooled(x.detach(), mask).double())
        self._means = self._means or CompensatedSum.zero(unit.shape[-1], device=unit.device)
        self._means.add(unit.sum(0))
        self._mean_count += len(unit)

    def update_graph(self, nodes: Tensor, edge_index: Tensor) -> None:
        """Add the nodes (N, d) of a batch of graphs as the measures of its edges see them."""
        self._add("dirichlet_energy", metrics.dirichlet_energy(nodes, edge_index, normalize="norm"), None)
        self._add("mean_average_distance", metrics.mean_average_distance(nodes, edge_index), None)

    def update_attention(self, attn: Tensor, context: Context) -> None:
        """Add the attention maps (b, heads, n, n) of a batch."""
        prefix = 0 if self.plan.prefix else context.prefix
        if attn.shape[-1] - prefix < 2:
            return
        for name in ("attention_similarity", "attention_std", "attention_entropy"):
            self._add(name, metrics_of(name)(attn.detach(), context.mask, prefix=prefix), context.mask)

    def pool(self, x: Tensor, mask: Tensor | None) -> None:
        """Keep the mean token of each set, for its second view; a set of vectors is kept as it is."""
        self._pooled = pooled(x.detach(), mask)

    def pair(self, x: Tensor, mask: Tensor | None) -> None:
        """Compare the second views x (b, n, d) of the sets that `pool` was given last."""
        first, second = self._pooled, pooled(x.detach(), mask)
        if first is None or first.shape != second.shape:
            shape = None if first is None else tuple(first.shape)
            raise ValueError(f"a batch of pairs must match its batch, got {tuple(second.shape)} beside {shape}.")
        self._views = self._views or Reservoir(SAMPLE, first.shape[-1], self.plan.seed)
        self._views.update(first)
        squares = (numerics.unit_rows(first.double()) - numerics.unit_rows(second.double())).square().sum(-1)
        self._distances.update(squares.pow(self.plan.alpha / 2))
        self._pooled = None

    def merge(self, other: "LayerStats") -> "LayerStats":
        """What both gathered, as a new object with the plan of the smaller seed; any order and nesting gives the same.

        Measures of all tokens and of sets come out as if one gauge had seen everything; samples are samples of both
        streams. ValueError for another width, another plan but for the seed, or the same seed on both sides.
        """
        if self.plan.seed == other.plan.seed or replace(self.plan, seed=other.plan.seed) != other.plan:
            raise ValueError(f"Gauges to merge need one plan and different seeds, got {self.plan} and {other.plan}.")
        if self._pooled is not None or other._pooled is not None:
            raise ValueError("A gauge still waits for the second views of its last batch; merge after `pair`.")
        first, second = sorted((self, other), key=lambda gauge: gauge.plan.seed)
        merged = LayerStats(first.plan)
        merged.sets, merged.tokens = first.sets + second.sets, first.tokens + second.tokens
        merged._picture = min((gauge._picture for gauge in (first, second) if gauge._picture), default=None)
        merged._spreads = _merged_spreads(first._spreads, second._spreads)
        merged._moments = _both(first._moments, second._moments)
        merged._sample, merged._views = _both(first._sample, second._sample), _both(first._views, second._views)
        merged._distances = first._distances.merge(second._distances)
        merged._means, merged._mean_count = _both(first._means, second._means), first._mean_count + second._mean_count
        merged._chooser.set_state(first._chooser.get_state())
        return merged

    def layer(self, name: str, place: str, path: str) -> Layer:
        """What was gathered, as a part of a diagnosis."""
        assert self._sample is not None
        assert self._picture is not None
        measures = {key: spread.summary() for key, spread in self._spreads.items()}
        sigma = spectrum_of(self._moments, self._sample.rows)
        measures.update({key: Summary(float(value)) for key, value in self._of_dataset(sigma).items()})
        spectrum, ranks = thinned(sigma)
        about = (name, place, path, self._sample.dim, self.tokens)
        return Layer(*about, measures, spectrum, ranks, self._picture[1])

    def _of_dataset(self, sigma: Tensor) -> dict[str, Tensor]:
        """Measures of all tokens, of their pairs and of the means of sets."""
        assert self._sample is not None
        found = of_dataset(self._moments, self._sample.rows, sigma, self.plan.t)
        if (
            self._means is not None and self._mean_count > 1
        ):  # the closed form of the mean cosine, see `metrics.mean_cosine`
            n = self._mean_count
            found["pooled_cosine"] = ((self._means.value.square().sum() - n) / (n * (n - 1))).clamp(-1, 1)
        if self._views is not None:
            found["alignment"] = torch.tensor(self._distances.summary().mean, dtype=torch.float64)
            found["pooled_uniformity"] = metrics.uniformity(self._views.rows, self.plan.t)
        return found

    def _rows(self, x: Tensor) -> Reservoir:
        """The sample of tokens; it and the moments are made when the width is known."""
        dim = x.shape[-1]
        if self._sample is None:
            self._sample = Reservoir(SAMPLE, dim, self.plan.seed)
            device = x.device if x.device.type == "cuda" else "cpu"
            self._moments = Moments(dim, device) if dim <= WIDEST else None
        if self._sample.dim != dim:
            raise ValueError(f"it had {self._sample.dim} features in an earlier batch and has {dim} now.")
        return self._sample

    def _some(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The real tokens (m, d) of a batch, or a uniform sample of them if they are many."""
        n, most = x.shape[1], max(TOKENS, 2 * x.shape[-1])
        places = torch.arange(x.shape[:2].numel(), device=x.device) if mask is None else mask.flatten().nonzero()[:, 0]
        if len(places) > most and not self.plan.all_tokens:
            kept = torch.randperm(len(places), generator=self._chooser)[:most].sort().values
            places = places[kept.to(x.device)]
        return x[places // n, places % n]

    def _update_sampled(self, x: Tensor, mask: Tensor | None, context: Context) -> None:
        """Measures that take more time, on some sets of the batch."""
        count = self.plan.rank_samples if "effective_rank" in self._spreads else max(self.plan.rank_samples, FIRST)
        chosen = torch.randperm(len(x), generator=self._chooser)[:count].to(x.device)
        x = x[chosen]
        real = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device) if mask is None else mask[chosen]
        for name in ("effective_rank", "token_variance", "feature_variance"):
            self._add(name, metrics_of(name)(x, real), real)
        if context.causal:
            self._add("first_token_norm", first_token_norm(x, real), real)
            real = robust.without_first(real)
        self._add("robust_cosine", robust.robust_cosine(x, real), real)
        self._add("rank_share", robust.rank_share(x, real), real, least=3)

    def _add(self, name: str, values: Tensor, mask: Tensor | None, least: int = 2) -> None:
        """Add a value a set; sets with fewer than `least` real tokens have none."""
        if mask is not None:
            values = values[mask.sum(-1) >= least]
        if values.numel() > 0:
            self._spreads.setdefault(name, ScalarStats(self.plan.seed)).update(values)


def metrics_of(name: str) -> Callable[..., Tensor]:
    """The metric function of this name."""
    function: Callable[..., Tensor] = getattr(metrics, name)
    return function


def pooled(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean real token of each set, (b, n, d) -> (b, d)."""
    x = numerics.prepared(x, mask)
    return x.sum(-2) / numerics.real_count(x, mask).clamp(min=1)[..., None]


def first_token_norm(x: Tensor, mask: Tensor) -> Tensor:
    """Length of the first real token over the median length of the other real ones, (b, n, d) -> (b,)."""
    norms = torch.linalg.vector_norm(x.double(), dim=-1)
    others = robust.without_first(mask)
    first = norms.masked_fill(~(mask & ~others), 0).sum(-1)
    median = norms.masked_fill(~others, torch.nan).nanmedian(-1).values
    return torch.where(median > 0, first / median, 1.0)


def cosines(x: Tensor, mask: Tensor | None) -> tuple[tuple[float, ...], ...]:
    """Cosines between at most 48 evenly spaced real tokens of one set (n, d), to two digits."""
    rows = (x if mask is None else x[mask])[chosen_tokens(len(x) if mask is None else int(mask.sum()))]
    unit = numerics.unit_rows(rows.float())
    return tuple(tuple(round(value, 2) for value in row) for row in (unit @ unit.mT).tolist())


def chosen_tokens(n: int) -> list[int]:
    """Positions, among n real tokens, of those in a heat map."""
    return torch.linspace(0, n - 1, min(n, SIDE)).round().long().tolist() if n else []


def thinned(sigma: Tensor) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Singular values over their sum, at most 256 of them, and their ranks from 1."""
    total = float(sigma.sum()) or 1.0
    ranks = torch.linspace(0, len(sigma) - 1, min(len(sigma), CURVE)).round().long()
    return tuple(float(f"{value:.6g}") for value in (sigma[ranks] / total).tolist()), tuple((ranks + 1).tolist())


def spectrum_of(moments: Moments | None, rows: Tensor) -> Tensor:
    """Singular values of all tokens minus their mean; of a sample of them if they are too wide for moments."""
    return moments.spectrum(center=True) if moments else gram_spectrum(numerics.centred(rows.double(), None))


def of_dataset(moments: Moments | None, rows: Tensor, sigma: Tensor, t: float) -> dict[str, Tensor]:
    """Measures of all tokens: `rows` is a sample of them, `sigma` are their singular values, the slowest of it."""
    found = {"dataset_rank_share": robust.sample_rank_share(rows)}
    found["uniformity"] = metrics.uniformity(rows, t)
    found["dataset_rank"] = rank_from_singular_values(sigma)
    if moments is None:  # too wide for moments: the sample has to do
        found["feature_correlation"] = metrics.feature_correlation(rows)
        found["outlier_share"] = metrics.outlier_share(rows)
    else:
        found["feature_correlation"] = moments.feature_correlation()
        found["outlier_share"] = moments.outlier_share()
    return found


def _both(first: Any, second: Any) -> Any:
    """What was merged of two, of which one or both may be absent; never an object that a part still fills."""
    if first is None or second is None:
        return copy.deepcopy(second if first is None else first)
    return first.merge(second)


def _merged_spreads(first: dict[str, ScalarStats], second: dict[str, ScalarStats]) -> dict[str, ScalarStats]:
    return {name: _both(first.get(name), second.get(name)) for name in {**first, **second}}
