"""Diagnose embeddings in one pass over their rows.

`RowStatistics` gathers what a diagnosis needs; parts of the rows can be measured separately and merged.
`diagnose_rows` fills one from a stream.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from uncollapse import distributed, metrics
from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis import describe
from uncollapse.diagnosis.build import Labels, Measured, build, check_enough
from uncollapse.diagnosis.describe import bin_shares, row_distances, uniform_distances
from uncollapse.diagnosis.layer_measures import (
    WIDEST,
    cosine_map,
    dataset_measures,
    dataset_spectrum,
    sample_size,
    thin_spectrum,
)
from uncollapse.diagnosis.result import Diagnosis, Layer, Summary
from uncollapse.diagnosis.stats.moments import Moments, Terms
from uncollapse.diagnosis.stats.reservoir import Reservoir
from uncollapse.diagnosis.stats.scalar import ScalarStats
from uncollapse.diagnosis.stats.streaming import (
    check_keys,
    check_single,
    chunks,
    flat_rows,
    map_ahead,
    named_state,
    nested_state,
    next_view,
    read_integer,
    read_number,
)
from uncollapse.diagnosis.verdict import Subject
from uncollapse.io import files
from uncollapse.metrics import robust
from uncollapse.metrics.bootstrap import Bootstrap, Interval, check_exponent
from uncollapse.metrics.hypersphere import SHARPEST, uniformity_gap
from uncollapse.pairwise import numerics
from uncollapse.pairwise.numerics import check_positive

HEAD = ("t", "alpha", "seed")  # keys of a stored state: how it was measured
PARTS = ("sample", "distances", "moments")  # and what it holds


class RowTerms(NamedTuple):
    """What some rows add to `RowStatistics`: themselves, their moments, and the distances to their second views."""

    rows: Tensor
    moments: list[Terms]
    distances: list[Tensor] | None


class RowStatistics:
    """What a diagnosis needs to know about embeddings, in memory that does not grow with their number.

    `diagnose_rows` fills one of these from a stream. The rows may also lie on many machines: each fills its own object,
    with its own seed, the objects are merged in any order, and the result gives the diagnosis. Merging is exact: any
    order and nesting gives the same bits (see `Moments.merge` and `Reservoir.merge`). How the rows were divided changes
    spectrum, ranks, cosine, correlations and alignment by the rounding inside sums, about 1e-13. It also draws another
    sample for what is measured on 1,024 rows: uniformity, the rank shares, the robust cosine. Objects can be pickled,
    so engines such as Dask or Ray can send them.

    Args:
        dim: the number of features d. Up to 1,536 the Gram matrix of all rows is kept; of wider rows, only the sample.
        t: sharpness of the potential in uniformity. alpha: exponent of the distances in alignment.
        seed: of the samples, a different one for each part that will be merged, 0 ≤ seed < 2³².

    Attributes:
        count: the number of rows seen.

    >>> import torch, uncollapse as uc
    >>> x = torch.randn(3000, 16, generator=torch.Generator().manual_seed(0))
    >>> parts = [uc.RowStatistics(16, seed=number) for number in range(3)]
    >>> for part, rows in zip(parts, x.split(1000)):
    ...     part.update(rows)
    >>> whole = parts[0] + parts[1] + parts[2]
    >>> whole
    RowStatistics(dim=16, count=3000)
    >>> apart, at_once = whole.diagnosis().layers[0], uc.diagnose_rows([x]).layers[0]
    >>> abs(apart["dataset_rank"] - at_once["dataset_rank"]) < 1e-12
    True
    """

    def __init__(self, dim: int, *, t: float = 2.0, alpha: float = 2.0, seed: int = 0) -> None:
        numerics.check_positive_number(t, "t")
        if t > SHARPEST:
            raise ValueError(f"t must be at most {SHARPEST:g}, up to which the optimum is known, got {t}.")
        check_exponent(alpha)
        self.dim, self.t, self.alpha, self.seed = dim, t, alpha, seed
        self._sample = Reservoir(sample_size(dim), dim, seed)
        self._moments = Moments(dim) if dim <= WIDEST else None
        self._distances = ScalarStats(seed)  # of the rows and their second views

    @property
    def count(self) -> int:
        """The number of rows seen."""
        return self._sample.count

    def update(self, rows: Tensor, pairs: Tensor | None = None) -> None:
        """Add rows (m, d) of any float dtype, and the second views of the same rows, for alignment.

        NaN, infinity and values beyond the range of float32 raise ValueError, as do pairs of another shape, or pairs
        for only some rows. Nothing is added then.
        """
        self.add(self.terms(rows, pairs))

    def terms(self, rows: Tensor, pairs: Tensor | None = None) -> RowTerms:
        """Return what `update` adds. Nothing changes here, so threads can work on several parts of a stream."""
        for name, x in (("rows", rows), *([] if pairs is None else [("pairs", pairs)])):
            numerics.check_float(x, name)
        if rows.dim() != 2:
            raise ValueError(
                f"Embeddings must have shape (m, d), or come in parts of that shape, got {tuple(rows.shape)}."
            )
        if pairs is not None and pairs.shape != rows.shape:
            raise ValueError(f"Pairs must have the shape of their rows, {tuple(rows.shape)}, got {tuple(pairs.shape)}.")
        for x in (rows,) if pairs is None else (rows, pairs):
            check_single(flat_rows(x, None, self.dim))
        moments = [] if self._moments is None else self._moments.terms(rows)
        if pairs is None:
            return RowTerms(rows, moments, None)
        views = zip(chunks((rows, None)), chunks((pairs, None)), strict=True)
        return RowTerms(rows, moments, [_distances(first, second, self.alpha) for first, second in views])

    def add(self, terms: RowTerms) -> None:
        """Add the terms of some rows. ValueError if only some rows come with pairs; nothing is added then."""
        self._check_pairs(self.count > 0 and len(terms.rows) > 0, terms.distances is not None)
        self._sample.update(terms.rows)
        if self._moments is not None:
            self._moments.add(terms.moments)
        for distances in terms.distances or ():
            self._distances.update(distances)

    def merge(self, other: "RowStatistics") -> "RowStatistics":
        """Return the statistics of both streams, as a new object.

        ValueError for another dim, t or alpha, for a seed that occurs on both sides, and if only one side has pairs.
        """
        if (self.dim, self.t, self.alpha) != (other.dim, other.t, other.alpha):
            raise ValueError(
                f"Statistics to merge need the same dim, t and alpha, got {self._settings} and {other._settings}."
            )
        self._check_pairs(self.count > 0 and other.count > 0, other._distances.count > 0)
        merged = RowStatistics(self.dim, t=self.t, alpha=self.alpha, seed=min(self.seed, other.seed))
        merged._sample = self._sample.merge(other._sample)
        merged._distances = self._distances.merge(other._distances)
        if self._moments is not None and other._moments is not None:
            merged._moments = self._moments.merge(other._moments)
        return merged

    def __add__(self, other: "RowStatistics") -> "RowStatistics":
        return self.merge(other) if isinstance(other, RowStatistics) else NotImplemented

    def __repr__(self) -> str:
        return f"RowStatistics(dim={self.dim}, count={self.count})"

    @property
    def _settings(self) -> tuple[int, float, float]:
        return self.dim, self.t, self.alpha

    def _check_pairs(self, both: bool, there: bool) -> None:
        """Raise ValueError if only some of the rows come with pairs."""
        if both and there != (self._distances.count > 0):
            raise ValueError("Alignment is over all rows or none: give pairs with all parts of the rows, or with none.")

    def diagnosis(
        self,
        *,
        labels: Labels | None = None,
        level: float = 0.95,
        draws: int = 1000,
        seconds: float = 0.0,
        layer: str = "embeddings",
    ) -> Diagnosis:
        """Return the diagnosis of all rows; `diagnose_rows` gives the same.

        Args:
            labels: names of the embeddings and of where they come from, for tables and reports.
            level: of the intervals. draws: how many resamples they are computed from; 0 for no intervals.
            seconds: how long the measurement took. layer: the name of the only layer.
        """
        bootstrap = make_bootstrap(level, draws, self.seed)
        if self.count == 0:
            raise ValueError("There are no embeddings: the stream has no rows.")
        check_enough(self.count)
        labels = labels or Labels()
        found_layer = self._layer(layer, bootstrap)
        settings = {"places": [OUTPUT], "tokens": "all", "attention": False, "seed": self.seed}
        settings |= {"t": self.t, "alpha": self.alpha, "level": level, "draws": draws}
        subject = Subject("embeddings", "embeddings", False, (OUTPUT,))
        found = build(Measured((found_layer,), settings=settings, seconds=seconds), subject, labels)
        cautions = (*describe.describe_embeddings(found_layer, self.t, self.alpha), *found.verdict.cautions)
        return replace(found, verdict=replace(found.verdict, cautions=cautions))

    def _layer(self, name: str, bootstrap: Bootstrap | None) -> Layer:
        rows, moments = self._sample.rows, self._moments
        sigma = dataset_spectrum(moments, rows)
        found = {**_set_measures(moments, rows), **dataset_measures(moments, rows, sigma, self.t)}
        measures = {key: Summary(float(value)) for key, value in found.items()}
        if self._distances.count > 0:
            measures["alignment"] = Summary(self._distances.summary().mean)
        measures["uniformity_gap"] = Summary(uniformity_gap(float(found["uniformity"]), self.dim, self.t))
        about = (name, OUTPUT, "", self.dim, self.count)
        shown = (*thin_spectrum(sigma), cosine_map(rows, None), self._intervals(bootstrap), self._histograms())
        return Layer(*about, measures, *shown)

    def _histograms(self) -> dict[str, tuple[float, ...]]:
        """Return the shares of distances per bin: of two rows, of a row and its partner, and of random points."""
        found = {"rows": row_distances(self._sample.rows), "random": uniform_distances(self.dim)}
        if self._distances.count > 0:
            found["pairs"] = bin_shares(self._distances.sample().pow(1 / self.alpha))
        return found

    def _intervals(self, bootstrap: Bootstrap | None) -> dict[str, Interval]:
        """Return the intervals of uniformity and alignment, if they are wanted."""
        if bootstrap is None:
            return {}
        level, draws, seed = bootstrap.level, bootstrap.draws, bootstrap.seed
        rows = self._sample.rows
        found = {"uniformity": metrics.uniformity_interval(rows, self.t, level=level, draws=draws, seed=seed)}
        if self._distances.count > 0:
            found["alignment"] = self._distances.interval(2.0**self.alpha, bootstrap)
        return found

    def state(self) -> dict[str, Tensor | int]:
        """Return a copy of everything, for storage."""
        t, alpha = torch.tensor([self.t, self.alpha], dtype=torch.float64)
        parts = {"sample": self._sample.state(), "distances": self._distances.state()}
        if self._moments is not None:
            parts["moments"] = self._moments.state()
        return {"t": t, "alpha": alpha, "seed": self.seed, **named_state(parts)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor | int]) -> Self:
        """Return the statistics that `state()` described, to be continued or merged. ValueError if it is invalid."""
        check_keys({name: value for name, value in state.items() if name.partition(".")[0] not in PARTS}, HEAD)
        t, alpha, seed = read_number(state, "t"), read_number(state, "alpha"), read_integer(state, "seed")
        sample = Reservoir.from_state(nested_state(state, "sample"))
        statistics = cls(sample.dim, t=t, alpha=alpha, seed=seed)
        statistics._sample, sizes = sample, {(sample.dim, sample.count)}
        statistics._distances = ScalarStats.from_state(nested_state(state, "distances"))
        if statistics._moments is not None:
            statistics._moments = Moments.from_state(nested_state(state, "moments"))
            sizes.add((statistics._moments.dim, statistics._moments.count))
        if (
            len(sizes) > 1
            or statistics._distances.count not in (0, sample.count)
            or sample.size != sample_size(sample.dim)
        ):
            raise ValueError("The parts of the state are not of the same rows: this is not a state of RowStatistics.")
        return statistics

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file that `load` reads back exactly; the file is never half written."""
        from safetensors.torch import save

        tensors = {name: torch.as_tensor(value).contiguous() for name, value in self.state().items()}
        return files.write(Path(path), save(tensors))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. ValueError if it is something else."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return cls.from_state(load_file(path))
        except (ValueError, SafetensorError) as error:
            raise ValueError(f"{path} is not a readable file of row statistics: {error}") from error


def make_bootstrap(level: float, draws: int, seed: int) -> Bootstrap | None:
    """Return how intervals are computed, or None for no intervals."""
    if draws < 0:
        raise ValueError(f"draws is the number of resamples, or 0 for no intervals, got {draws}.")
    return Bootstrap(level, draws, seed) if draws else None


def _distances(first: Tensor, second: Tensor, alpha: float) -> Tensor:
    """Return ‖x − y‖^α of normalized rows and their second views, (m, d) and (m, d) -> (m,)."""
    squares = (numerics.unit_rows(first.double()) - numerics.unit_rows(second.double())).square().sum(-1)
    return squares.pow(alpha / 2)


def _set_measures(moments: Moments | None, rows: Tensor) -> dict[str, Tensor]:
    """Return measures of a sequence, for all embeddings as one sequence; robust ones come from the sample."""
    real = torch.ones(len(rows), dtype=torch.bool)
    found = {"robust_cosine": robust.robust_cosine(rows, real)}
    if len(rows) > 2:
        found["rank_share"] = robust.rank_share(rows, real)
    if moments is None:  # too wide for moments: use the sample
        return {"mean_cosine": metrics.mean_cosine(rows), "effective_rank": metrics.effective_rank(rows), **found}
    gram, dim = moments.gram, moments.dim
    found["token_variance"] = moments.variance().sum() * moments.count
    found["feature_variance"] = (gram.trace() - gram.sum() / dim).clamp(min=0) / max(1, dim - 1)
    return {"mean_cosine": moments.mean_cosine().clamp(-1, 1), "effective_rank": moments.effective_rank(), **found}


def diagnose_rows(
    rows: Tensor | Iterable[Tensor],
    *,
    pairs: Tensor | Iterable[Tensor] | None = None,
    t: float = 2.0,
    alpha: float = 2.0,
    level: float = 0.95,
    draws: int = 1000,
    labels: Labels | None = None,
    seed: int = 0,
    gather: bool = False,
    workers: int = 1,
) -> Diagnosis:
    """Measure embeddings, or a stream of them such as a file that does not fit into memory: one layer, one pass.

    All rows count as one set. Spectrum, ranks, mean cosine and correlations are computed over all rows, and alignment
    over all pairs. Uniformity, the rank shares and the robust cosine come from a uniform sample of at most 1,024 rows,
    fewer beyond 16,384 features. For rows wider than 1,536 features, everything but alignment comes from this sample.
    The division of the stream into parts makes no difference. Alignment and uniformity have an interval, in
    `layer.intervals` and in the cautions of the verdict; `uniformity_gap` is the distance to the optimum in percent.
    `RowStatistics` does the same for rows on many machines.

    Args:
        rows: the embeddings (n, d), or their parts (m, d).
        pairs: the second views of the same rows, also whole or in parts of the same sizes, for alignment.
        t: sharpness of the potential in uniformity. alpha: exponent of the distances in alignment.
        level: of the intervals. draws: how many resamples they are computed from; 0 for no intervals.
        labels: as in `diagnose`.
        seed: of all sampling.
        gather: in several processes of `torch.distributed`, each gives its own rows, possibly none, and all get the
            diagnosis of all rows. Each process samples with `seed` + its rank.
        workers: threads that sum up parts at a time; with `torch.set_num_threads(1)`, two are faster than one with two
            threads per operation. The result is the same.

    >>> import torch, uncollapse as uc
    >>> d = uc.diagnose_rows(torch.randn(4096, 16))
    >>> d.verdict.kind, d.tokens
    ('none', 4096)
    >>> interval = d.layers[0].intervals["uniformity"]
    >>> interval.low < d.layers[0]["uniformity"] < interval.high
    True
    """
    started = time.perf_counter()
    make_bootstrap(level, draws, seed)  # checked before anything is read
    rows, pairs = _as_parts(rows), None if pairs is None else _as_parts(pairs)
    statistics = _fill(rows, pairs, {"t": t, "alpha": alpha, "seed": seed + distributed.rank() * gather}, workers)
    if gather:
        with distributed.peer_errors():
            statistics = merge_ranks(statistics)

    def diagnosis() -> Diagnosis:
        return statistics.diagnosis(labels=labels, level=level, draws=draws, seconds=time.perf_counter() - started)

    return distributed.on_rank_zero(diagnosis, "The diagnosis") if gather else diagnosis()


def _as_parts(x: Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    """Return the parts of embeddings; a matrix is its only part."""
    return [x] if isinstance(x, Tensor) and x.dim() <= 2 else x


def _fill(
    rows: Iterable[Tensor], pairs: Iterable[Tensor] | None, options: dict[str, Any], workers: int
) -> RowStatistics:
    """Return the statistics of a stream; without rows they are empty and of width 1."""
    check_positive(workers, "workers")
    parts = _with_views(rows, pairs)
    first = next(parts, None)
    if first is None:
        return RowStatistics(1, **options)
    numerics.check_float(first[0], "rows")
    statistics = RowStatistics(first[0].shape[-1] if first[0].dim() == 2 else 1, **options)
    for terms in map_ahead(lambda part: statistics.terms(*part), itertools.chain([first], parts), workers):
        statistics.add(terms)
    return statistics


def _with_views(
    rows: Iterable[Tensor], pairs: Iterable[Tensor] | None
) -> Iterator[tuple[Tensor] | tuple[Tensor, Tensor]]:
    """Yield parts, each with its second views if there are any."""
    views, count = None if pairs is None else iter(pairs), 0
    for number, part in enumerate(rows):
        yield (part,) if views is None else (part, next_view(views, number))
        count = number + 1
    if views is not None and next(views, None) is not None:
        raise ValueError(f"pairs go on after the {count} parts of the rows; each part needs one second view.")


def merge_ranks(own: RowStatistics) -> RowStatistics:
    """Return the statistics of the rows of all processes, on rank 0."""
    widths = [dim for dim, count in distributed.gather_objects((own.dim, own.count)) if count > 0]
    if own.count == 0 and widths:
        own = RowStatistics(widths[0], t=own.t, alpha=own.alpha, seed=own.seed)
    if len(set(widths)) > 1:
        raise ValueError(f"All processes must have rows of the same width, got {', '.join(map(str, widths))} features.")
    merged: RowStatistics = distributed.merge_on_rank_zero(own)
    return merged
