"""What is known of embeddings after one pass over them: statistics that parts of the rows gather apart and merge."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from uncollapse import distributed, metrics
from uncollapse.backbones.sites import OUTPUT
from uncollapse.diagnosis import describe
from uncollapse.diagnosis.layer_stats import SAMPLE, WIDEST, cosines, of_dataset, spectrum_of, thinned
from uncollapse.diagnosis.result import Diagnosis, Layer, Summary
from uncollapse.diagnosis.run import check_enough, of_layers, partner
from uncollapse.diagnosis.stats.moments import Moments
from uncollapse.diagnosis.stats.reservoir import Reservoir
from uncollapse.diagnosis.stats.scalar import ScalarStats
from uncollapse.diagnosis.stats.streaming import (
    check_entries,
    check_keys,
    chunks,
    flat_rows,
    inner_state,
    named_state,
    read_integer,
    read_number,
)
from uncollapse.diagnosis.verdict import Subject
from uncollapse.io import files
from uncollapse.metrics import robust
from uncollapse.metrics.bootstrap import Bootstrap, Interval
from uncollapse.metrics.hypersphere import SHARPEST, check_sharpness
from uncollapse.metrics.intervals import check_exponent, uniformity_gap
from uncollapse.pairwise import numerics

HEAD = ("t", "alpha", "seed")  # what a stored state says of how it was measured
PARTS = ("sample", "distances", "moments")  # and what it holds


class RowStatistics:
    """What a diagnosis has to know of embeddings, in memory that does not grow with their number; parts can be merged.

    `diagnose_rows` is one of these, filled from a stream. Here the stream may lie on many machines: each fills its own,
    with a seed of its own, they are merged in any order, and the whole gives the diagnosis. Merging is exact: any order
    and nesting gives the same bits (see `Moments.merge` and `Reservoir.merge`). How the rows were divided changes
    spectrum, ranks, cosine, correlations and alignment by the rounding inside sums, about 1e-13, and draws another
    sample for what comes from 1,024 rows: uniformity, the rank shares, the robust cosine. Objects can be pickled,
    so engines such as Dask or Ray can send them.

    Args:
        dim: the number of features d. Up to 1,536 the Gram matrix of all rows is kept; of wider rows, the sample only.
        t: sharpness of the potential in uniformity. alpha: exponent of the distances in alignment.
        seed: of the samples, another one for each part that will be merged, 0 ≤ seed < 2³².

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
        check_sharpness(t)
        if t > SHARPEST:
            raise ValueError(f"t must be at most {SHARPEST:g}, up to which the optimum is known, got {t}.")
        check_exponent(alpha)
        self.dim, self.t, self.alpha, self.seed = dim, t, alpha, seed
        self._sample = Reservoir(SAMPLE, dim, seed)
        self._moments = Moments(dim) if dim <= WIDEST else None
        self._distances = ScalarStats(seed)  # of the rows and their second views

    @property
    def count(self) -> int:
        """How many rows were seen."""
        return self._sample.count

    def update(self, rows: Tensor, pairs: Tensor | None = None) -> None:
        """Add rows (m, d) of any float dtype, and the second views of the same rows, for alignment.

        NaN, infinite and huge entries (beyond float32) raise ValueError, and so do pairs of another shape, or pairs for
        some rows only. Nothing is added then.
        """
        if rows.dim() != 2:
            raise ValueError(f"Embeddings come in parts of shape (m, d), got {tuple(rows.shape)}.")
        if pairs is not None and pairs.shape != rows.shape:
            raise ValueError(f"Pairs must have the shape of their rows, {tuple(rows.shape)}, got {tuple(pairs.shape)}.")
        self._check_pairs(self.count > 0 and len(rows) > 0, pairs is not None)
        for x in (rows,) if pairs is None else (rows, pairs):
            check_entries(flat_rows(x, None, self.dim), torch.finfo(torch.float32).max)
        self._sample.update(rows)
        if self._moments is not None:
            self._moments.update(rows)
        if pairs is not None:
            for first, second in zip(chunks((rows, None)), chunks((pairs, None)), strict=True):
                self._distances.update(_distances(first, second, self.alpha))

    def merge(self, other: "RowStatistics") -> "RowStatistics":
        """The statistics of both streams together, as a new object.

        ValueError for another dim, t or alpha, for a seed on both sides, and if only one side has pairs.
        """
        if (self.dim, self.t, self.alpha) != (other.dim, other.t, other.alpha):
            raise ValueError(
                f"Statistics to merge need the same dim, t and alpha, got {self._asked} and {other._asked}."
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
    def _asked(self) -> tuple[int, float, float]:
        return self.dim, self.t, self.alpha

    def _check_pairs(self, both: bool, there: bool) -> None:
        """Raise if rows came before without pairs and come with them now, or the other way round."""
        if both and there != (self._distances.count > 0):
            raise ValueError("Alignment is over all rows or none: give pairs with all parts of the rows, or with none.")

    def diagnosis(
        self, *, name: str = "embeddings", data: str = "", level: float = 0.95, draws: int = 1000, seconds: float = 0.0
    ) -> Diagnosis:
        """What all rows together show: see `diagnose_rows`, which gives the same.

        Args:
            name, data: what the embeddings are called in tables and reports, and where they come from.
            level: of the intervals. draws: resamples that they are made from; 0 for no intervals.
            seconds: how long the measurement took.
        """
        asked = intervals_asked(level, draws, self.seed)
        if self.count == 0:
            raise ValueError("There are no embeddings: the stream has no rows.")
        check_enough(self.count)
        layer = self._layer(name, asked)
        settings = {"places": [OUTPUT], "tokens": "all", "attention": False, "seed": self.seed}
        settings |= {"t": self.t, "alpha": self.alpha, "level": level, "draws": draws}
        subject = Subject("embeddings", "embeddings", False, (OUTPUT,))
        found = of_layers((layer,), subject, 1, name, data, (), seconds, settings)
        told = (*describe.sentences(layer, self.t, self.alpha), *found.verdict.cautions)
        return replace(found, verdict=replace(found.verdict, cautions=told))

    def _layer(self, name: str, asked: Bootstrap | None) -> Layer:
        rows, moments = self._sample.rows, self._moments
        sigma = spectrum_of(moments, rows)
        found = {**_of_all(moments, rows), **of_dataset(moments, rows, sigma, self.t)}
        measures = {key: Summary(float(value)) for key, value in found.items()}
        if self._distances.count > 0:
            measures["alignment"] = Summary(self._distances.summary().mean)
        measures["uniformity_gap"] = Summary(uniformity_gap(float(found["uniformity"]), self.dim, self.t))
        about = (name, OUTPUT, "", self.dim, self.count)
        return Layer(*about, measures, *thinned(sigma), cosines(rows, None), self._intervals(asked))

    def _intervals(self, asked: Bootstrap | None) -> dict[str, Interval]:
        """How sure uniformity and alignment are, if that was asked for."""
        if asked is None:
            return {}
        level, draws, seed = asked.level, asked.draws, asked.seed
        rows = self._sample.rows
        found = {"uniformity": metrics.uniformity_interval(rows, self.t, level=level, draws=draws, seed=seed)}
        if self._distances.count > 0:
            found["alignment"] = self._distances.interval(2.0**self.alpha, asked)
        return found

    def state(self) -> dict[str, Tensor | int]:
        """A copy of everything, for storage."""
        t, alpha = torch.tensor([self.t, self.alpha], dtype=torch.float64)
        parts = {"sample": self._sample.state(), "distances": self._distances.state()}
        if self._moments is not None:
            parts["moments"] = self._moments.state()
        return {"t": t, "alpha": alpha, "seed": self.seed, **named_state(parts)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor | int]) -> Self:
        """The statistics that `state()` described, to be continued or merged. ValueError if it is invalid."""
        check_keys({name: value for name, value in state.items() if name.partition(".")[0] not in PARTS}, HEAD)
        t, alpha, seed = read_number(state, "t"), read_number(state, "alpha"), read_integer(state, "seed")
        sample = Reservoir.from_state(inner_state(state, "sample"))
        statistics = cls(sample.dim, t=t, alpha=alpha, seed=seed)
        statistics._sample, sizes = sample, {(sample.dim, sample.count)}
        statistics._distances = ScalarStats.from_state(inner_state(state, "distances"))
        if statistics._moments is not None:
            statistics._moments = Moments.from_state(inner_state(state, "moments"))
            sizes.add((statistics._moments.dim, statistics._moments.count))
        if len(sizes) > 1 or statistics._distances.count not in (0, sample.count) or sample.size != SAMPLE:
            raise ValueError("The parts of the state are not of the same rows: this is no state of RowStatistics.")
        return statistics

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file that `load` reads back exactly; a file of this name is never half written."""
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
            raise ValueError(f"{path} holds no statistics of rows that can be read: {error}") from error


def intervals_asked(level: float, draws: int, seed: int) -> Bootstrap | None:
    """How intervals are made, or None for none."""
    if draws < 0:
        raise ValueError(f"draws is the number of resamples, or 0 for no intervals, got {draws}.")
    return Bootstrap(level, draws, seed) if draws else None


def _distances(first: Tensor, second: Tensor, alpha: float) -> Tensor:
    """‖x − y‖^α of rows at length one and their second views, (m, d) and (m, d) -> (m,)."""
    squares = (numerics.unit_rows(first.double()) - numerics.unit_rows(second.double())).square().sum(-1)
    return squares.pow(alpha / 2)


def _of_all(moments: Moments | None, rows: Tensor) -> dict[str, Tensor]:
    """Measures that a model has for each sequence, for all embeddings as one set; robust ones come from the sample."""
    real = torch.ones(len(rows), dtype=torch.bool)
    found = {"robust_cosine": robust.robust_cosine(rows, real)}
    if len(rows) > 2:
        found["rank_share"] = robust.rank_share(rows, real)
    if moments is None:  # too wide for moments: the sample has to do
        return {"mean_cosine": metrics.mean_cosine(rows), "effective_rank": metrics.effective_rank(rows), **found}
    gram, dim = moments.gram, moments.dim
    found["token_variance"] = moments.variance().sum() * moments.count
    found["feature_variance"] = (gram.trace() - gram.sum() / dim).clamp(min=0) / max(1, dim - 1)
    return {"mean_cosine": moments.mean_cosine().clamp(-1, 1), "effective_rank": moments.effective_rank(), **found}


def diagnose_rows(
    rows: Iterable[Tensor],
    *,
    pairs: Iterable[Tensor] | None = None,
    t: float = 2.0,
    alpha: float = 2.0,
    level: float = 0.95,
    draws: int = 1000,
    name: str = "embeddings",
    data: str = "",
    seed: int = 0,
    gather: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """Measure a stream of embeddings, such as a file that does not fit into memory: one layer, one pass.

    All rows count as one set. Spectrum, ranks, mean cosine and correlations are those of all rows, and alignment is
    over all pairs. Uniformity, the rank shares and the robust cosine are of a uniform sample of at most 1,024 rows, and
    so is all but alignment of rows wider than 1,536 features. How the stream is cut into parts makes no difference.
    Alignment and uniformity come with an interval, in `layer.intervals` and in the cautions of the verdict;
    `uniformity_gap` is the distance to the optimum in percent. `RowStatistics` does the same for rows on many machines.

    Args:
        rows: parts (m, d) of the embeddings.
        pairs: the second views of the same rows, in parts of the same sizes, for alignment.
        t: sharpness of the potential in uniformity. alpha: exponent of the distances in alignment.
        level: of the intervals. draws: resamples that they are made from; 0 for no intervals.
        gather: in several processes of `torch.distributed`, each gives its own rows, which may be none, and all get the
            diagnosis of all rows. Sampling then begins with `seed` + the number of the process.
        name, data, seed, progress: as in `diagnose`.

    >>> import torch, uncollapse as uc
    >>> d = uc.diagnose_rows(torch.randn(4096, 16).split(512))
    >>> d.verdict.kind, d.tokens
    ('none', 4096)
    >>> interval = d.layers[0].intervals["uniformity"]
    >>> interval.low < d.layers[0]["uniformity"] < interval.high
    True
    """
    started = time.perf_counter()
    intervals_asked(level, draws, seed)  # said before anything is read
    statistics = _filled(rows, pairs, {"t": t, "alpha": alpha, "seed": seed + distributed.rank() * gather}, progress)
    if gather:
        with distributed.peer_errors():
            statistics = _of_all_processes(statistics)

    def diagnosis() -> Diagnosis:
        seconds = time.perf_counter() - started
        return statistics.diagnosis(name=name, data=data, level=level, draws=draws, seconds=seconds)

    return distributed.on_rank_zero(diagnosis, "The diagnosis") if gather else diagnosis()


def _filled(
    rows: Iterable[Tensor],
    pairs: Iterable[Tensor] | None,
    asked: dict[str, Any],
    progress: Callable[[int], None] | None,
) -> RowStatistics:
    """The statistics of a stream; without rows they are empty and of width 1."""
    statistics = RowStatistics(1, **asked)
    second = None if pairs is None else iter(pairs)
    for done, part in enumerate(rows):
        if done == 0 and part.dim() == 2:
            statistics = RowStatistics(part.shape[1], **asked)
        statistics.update(part, None if second is None else partner(second, done))
        if progress is not None:
            progress(done + 1)
    return statistics


def _of_all_processes(own: RowStatistics) -> RowStatistics:
    """The statistics of the rows of all processes, in the first one."""
    widths = [dim for dim, count in distributed.gather_objects((own.dim, own.count)) if count > 0]
    if own.count == 0 and widths:
        own = RowStatistics(widths[0], t=own.t, alpha=own.alpha, seed=own.seed)
    if len(set(widths)) > 1:
        raise ValueError(f"All processes must have rows of the same width, got {', '.join(map(str, widths))} features.")
    merged: RowStatistics = distributed.merge_on_rank_zero(own)
    return merged
