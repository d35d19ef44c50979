"""Gather the statistics of one layer over a stream of batches, in memory that does not grow with their number."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from uncollapse import metrics
from uncollapse.backbones.attention_calls import Tiles
from uncollapse.backbones.sites import Context
from uncollapse.diagnosis.layer_measures import (
    WIDEST,
    cosine_map,
    dataset_measures,
    dataset_spectrum,
    first_token_norm,
    massive_activation,
    measure_tiles,
    sample_size,
    thin_spectrum,
    token_norm,
)
from uncollapse.diagnosis.result import Layer, Summary
from uncollapse.diagnosis.stats.compensated_sum import CompensatedSum
from uncollapse.diagnosis.stats.moments import Moments
from uncollapse.diagnosis.stats.reservoir import Reservoir
from uncollapse.diagnosis.stats.scalar import ScalarStats
from uncollapse.errors import NotFiniteError
from uncollapse.metrics import robust
from uncollapse.pairwise import numerics
from uncollapse.pairwise.pair_means import SetSums, mean_from_sum

TOKENS = 1024  # tokens of a batch used for measures of the dataset, or twice the features if that is more
FIRST = 8  # sequences of the first batch whose ranks are taken at least, so that short runs have some


@dataclass(frozen=True)
class StatsConfig:
    """How a layer is measured.

    rank_samples: how many sequences of each batch have their ranks and robust measures taken; of the first batch at
    least eight. attention: whether attention maps are measured. prefix: whether CLS, distillation and register tokens
    count. all_tokens: whether measures of the dataset see every token of a batch rather than a sample. seed: of all
    sampling. t, alpha: of uniformity and alignment.
    """

    rank_samples: int = 2
    attention: bool = False
    prefix: bool = False
    all_tokens: bool = False
    seed: int = 0
    t: float = 2.0
    alpha: float = 2.0


@dataclass(frozen=True)
class Samples:
    """Copies of a part of a batch: tokens (m, d), and sets of tokens (k, n, d) with their mask."""

    rows: Tensor
    sets: Tensor
    real: Tensor
    causal: bool

    @property
    def size(self) -> int:
        """The bytes that it holds."""
        return self.rows.nbytes + self.sets.nbytes


class LayerStats:
    """The statistics of one layer, from which a diagnosis takes its measures."""

    def __init__(self, config: StatsConfig) -> None:
        self.config = config
        self.sets = 0
        self.tokens = 0
        self._heatmap: tuple[int, tuple[tuple[float, ...], ...]] | None = (
            None  # with the seed, by which merging chooses one
        )
        self._scalars: dict[str, ScalarStats] = {}
        self._moments: Moments | None = None
        self._sample: Reservoir | None = None
        self._pooled: SetSums | None = None  # of the last batch, until its second view comes
        self._views: Reservoir | None = None
        self._distances = ScalarStats(config.seed)  # of the two views of a set
        self._means: CompensatedSum | None = None  # of the mean tokens of sets, normalised
        self._mean_counts = 0, 0  # how many of them are not zero, and how many there are
        self._chooser = torch.Generator().manual_seed(config.seed)
        self._ranked = False  # a set of at least two tokens was among those whose ranks are taken

    def update(self, x: Tensor, mask: Tensor | None, context: Context, *, means: bool = True) -> None:
        """Add the sets of tokens x (b, n, d) of a batch, where mask (b, n) is True for real tokens.

        means: also add the mean token of each set, for comparing whole sets.
        """
        self.finish_update(self.begin_update(x, mask, context, means=means))

    def begin_update(self, x: Tensor, mask: Tensor | None, context: Context, *, means: bool = True) -> "Samples":
        """Begin an update; return what its rest, which takes most time, needs of the batch."""
        sums = SetSums.of(x.detach(), mask)
        x = numerics.to_full(x.detach())
        self._prepare_samples(x)
        if self._heatmap is None:
            self._heatmap = self.config.seed, cosine_map(x[0], None if mask is None else mask[0])
        self.sets += len(x) if mask is None else int((sums.count > 0).sum())
        self.tokens += x.shape[:-1].numel() if mask is None else int(mask.sum())
        if mask is not None or x.shape[1] > 1:  # one token has no cosine
            self._add("mean_cosine", sums.mean_cosine().clamp(-1, 1), mask)
        if means:
            self._add_means(sums.means()[sums.count > 0])
        return Samples(self._sample_tokens(x, mask), *self._sample_sets(x, mask), context.causal)

    def finish_update(self, samples: "Samples") -> None:
        """Add the samples of a batch; batches come in the order in which their updates began."""
        self.add_rows(samples)
        self.add_sets(samples)

    def add_rows(self, samples: "Samples") -> None:
        """Add the tokens of a batch, the first half of `finish_update`; both halves may run at once."""
        assert self._sample is not None
        self._sample.update(samples.rows)
        if self._moments is not None:
            self._moments.update(samples.rows)

    def _add_means(self, means: Tensor) -> None:
        unit = numerics.unit_rows(means.double())
        self._means = self._means or CompensatedSum.zero(unit.shape[-1], device=unit.device)
        self._means.add(unit.sum(0))
        pointing, count = self._mean_counts
        self._mean_counts = pointing + int((unit != 0).any(-1).sum()), count + len(unit)

    def update_graph(self, nodes: Tensor, edge_index: Tensor) -> None:
        """Add the nodes (N, d) of a batch of graphs, for measures along edges."""
        self._add("dirichlet_energy", metrics.dirichlet_energy(nodes, edge_index, normalize="norm"), None)
        self._add("mean_average_distance", metrics.mean_average_distance(nodes, edge_index), None)

    def update_attention(self, attn: Tensor, context: Context) -> None:
        """Add the attention maps (b, heads, n, n) of a batch."""
        prefix = 0 if self.config.prefix else context.prefix
        if attn.shape[-1] - prefix < 2:
            return
        for name in ("attention_similarity", "attention_std", "attention_entropy"):
            self._add(name, metric_function(name)(attn.detach(), context.mask, prefix=prefix), context.mask)

    def update_attention_tiles(self, tiles: Tiles, context: Context) -> None:
        """Add the attention maps of a batch as tiles."""
        prefix = 0 if self.config.prefix else context.prefix
        if tiles.shape[-1] - prefix < 2 or tiles.shape[0] == 0:
            return
        for name, values in measure_tiles(tiles, context.mask, prefix).items():
            self._add(name, values, context.mask)

    def pool(self, x: Tensor, mask: Tensor | None) -> None:
        """Remember the mean token of each set until its second view comes."""
        self._pooled = SetSums.of(x.detach(), mask)

    def pair(self, x: Tensor, mask: Tensor | None) -> None:
        """Compare the second views x (b, n, d) with the sets that `pool` was given last; empty sets have no pair."""
        pooled, views = self._pooled, SetSums.of(x.detach(), mask)
        if pooled is None or pooled.plain.shape != views.plain.shape:
            shape = None if pooled is None else tuple(pooled.plain.shape)
            raise ValueError(f"a batch of pairs must match its batch, got {tuple(views.plain.shape)} and {shape}.")
        both = (pooled.count > 0) & (views.count > 0)
        first, second = pooled.means()[both], views.means()[both]
        self._views = self._views or Reservoir(sample_size(first.shape[-1]), first.shape[-1], self.config.seed)
        self._views.update(first)
        squares = (numerics.unit_rows(first.double()) - numerics.unit_rows(second.double())).square().sum(-1)
        self._distances.update(squares.pow(self.config.alpha / 2))
        self._pooled = None

    def forget_first_view(self) -> None:
        """Leave the last batch without a pair: its second view is only padding."""
        self._pooled = None

    def merge(self, other: "LayerStats") -> "LayerStats":
        """Return the statistics of both, as a new object with the config of the smaller seed.

        Any order and nesting of merges gives the same. Measures of all tokens and of sets are as if one object had seen
        everything; samples are samples of both streams. ValueError for another width, another config except for the
        seed, or the same seed on both sides.
        """
        if self.config.seed == other.config.seed or replace(self.config, seed=other.config.seed) != other.config:
            raise ValueError(
                f"LayerStats to merge need one config and different seeds, got {self.config} and {other.config}."
            )
        if self._pooled is not None or other._pooled is not None:
            raise ValueError("LayerStats still wait for the second views of their last batch; merge after `pair`.")
        first, second = sorted((self, other), key=lambda stats: stats.config.seed)
        merged = LayerStats(first.config)
        merged.sets, merged.tokens = first.sets + second.sets, first.tokens + second.tokens
        merged._heatmap = min((stats._heatmap for stats in (first, second) if stats._heatmap), default=None)
        merged._scalars = _merge_scalars(first._scalars, second._scalars)
        merged._moments = _merge_optional(first._moments, second._moments)
        merged._sample, merged._views = (
            _merge_optional(first._sample, second._sample),
            _merge_optional(first._views, second._views),
        )
        merged._distances = first._distances.merge(second._distances)
        merged._means = _merge_optional(first._means, second._means)
        (pointing, count), (others_pointing, others) = first._mean_counts, second._mean_counts
        merged._mean_counts = pointing + others_pointing, count + others
        merged._chooser.set_state(first._chooser.get_state())
        merged._ranked = first._ranked or second._ranked
        return merged

    def layer(self, name: str, place: str, path: str) -> Layer:
        """Return the measures as a layer of a diagnosis."""
        assert self._sample is not None
        assert self._heatmap is not None
        measures = {key: scalar.summary() for key, scalar in self._scalars.items()}
        sigma = dataset_spectrum(self._moments, self._sample.rows)
        measures.update({key: Summary(float(value)) for key, value in self._dataset_measures(sigma).items()})
        spectrum, ranks = thin_spectrum(sigma)
        about = (name, place, path, self._sample.dim, self.tokens)
        return Layer(*about, measures, spectrum, ranks, self._heatmap[1])

    def _dataset_measures(self, sigma: Tensor) -> dict[str, Tensor]:
        """Return measures of all tokens, of their pairs and of the means of sets."""
        assert self._sample is not None
        found = dataset_measures(self._moments, self._sample.rows, sigma, self.config.t)
        if self._means is not None and self._mean_counts[1] > 1:
            pointing, count = self._means.value.new_tensor(self._mean_counts)
            found["pooled_cosine"] = mean_from_sum(self._means.value, pointing, count).clamp(-1, 1)
        if self._views is not None:
            found["alignment"] = torch.tensor(self._distances.summary().mean, dtype=torch.float64)
            found["pooled_uniformity"] = metrics.uniformity(self._views.rows, self.config.t)
        return found

    def _prepare_samples(self, x: Tensor) -> None:
        """Create the sample of tokens and the moments when the width is known."""
        dim = x.shape[-1]
        if self._sample is None:
            self._sample = Reservoir(sample_size(dim), dim, self.config.seed)
            device = x.device if x.device.type == "cuda" else "cpu"
            self._moments = Moments(dim, device) if dim <= WIDEST else None
        if self._sample.dim != dim:
            raise ValueError(f"it had {self._sample.dim} features in an earlier batch and has {dim} now.")

    def _sample_tokens(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the real tokens (m, d) of a batch, or a uniform sample if there are many."""
        n, most = x.shape[1], max(TOKENS, 2 * x.shape[-1])
        places = torch.arange(x.shape[:2].numel(), device=x.device) if mask is None else mask.flatten().nonzero()[:, 0]
        if len(places) > most and not self.config.all_tokens:
            kept = torch.randperm(len(places), generator=self._chooser)[:most].sort().values
            places = places[kept.to(x.device)]
        return x[places // n, places % n]

    def _sample_sets(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return some sets of the batch and their mask, for measures that take more time."""
        count = self.config.rank_samples if self._ranked else max(self.config.rank_samples, FIRST)
        chosen = torch.randperm(len(x), generator=self._chooser)[:count].to(x.device)
        sets = x[chosen]
        real = torch.ones(sets.shape[:-1], dtype=torch.bool, device=x.device) if mask is None else mask[chosen]
        self._ranked = self._ranked or bool((real.sum(-1) > 1).any())
        return numerics.prepare(sets, real), real

    def add_sets(self, samples: "Samples") -> None:
        """Add measures of some sets of a batch, the second half of `finish_update`."""
        x, real = samples.sets, samples.real
        for name in ("effective_rank", "token_variance", "feature_variance"):
            values = metric_function(name)(x, real)
            if bool(values.isinf().any()):
                largest = float(x.abs().max())
                raise NotFiniteError(f"numbers as large as {largest:.1e}, whose squares overflow single precision")
            self._add(name, values, real)
        if samples.causal:
            self._add("first_token_norm", first_token_norm(x, real), real)
            self._add("massive_activation", massive_activation(x, real), real)
            self._add("token_norm", token_norm(x, real), real)
            real = robust.drop_first_token(real)
        cosine, share = robust.cosine_and_rank_share(x, real)
        self._add("robust_cosine", cosine, real)
        self._add("rank_share", share, real, least=3)

    def _add(self, name: str, values: Tensor, mask: Tensor | None, least: int = 2) -> None:
        """Add one value per set, except for sets with fewer than `least` real tokens."""
        if mask is not None:
            values = values[mask.sum(-1) >= least]
        if values.numel() > 0:
            self._scalars.setdefault(name, ScalarStats(self.config.seed)).update(values)


def metric_function(name: str) -> Callable[..., Tensor]:
    """Return the metric function of this name."""
    function: Callable[..., Tensor] = getattr(metrics, name)
    return function


def _merge_optional(first: Any, second: Any) -> Any:
    """Merge two objects of which one or both may be None; never return an object that is still being filled."""
    if first is None or second is None:
        return copy.deepcopy(second if first is None else first)
    return first.merge(second)


def _merge_scalars(first: dict[str, ScalarStats], second: dict[str, ScalarStats]) -> dict[str, ScalarStats]:
    return {name: _merge_optional(first.get(name), second.get(name)) for name in {**first, **second}}
