"""A stream of embeddings -> Diagnosis."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from uncollapse import distributed
from uncollapse.diagnosis.result import Diagnosis
from uncollapse.diagnosis.row_statistics import RowStatistics, intervals_asked
from uncollapse.diagnosis.run import partner


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
        with distributed.heeding():
            statistics = _of_all_processes(statistics)

    def diagnosis() -> Diagnosis:
        seconds = time.perf_counter() - started
        return statistics.diagnosis(name=name, data=data, level=level, draws=draws, seconds=seconds)

    return distributed.together(diagnosis, "The diagnosis") if gather else diagnosis()


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
    widths = [dim for dim, count in distributed.everywhere((own.dim, own.count)) if count > 0]
    if own.count == 0 and widths:
        own = RowStatistics(widths[0], t=own.t, alpha=own.alpha, seed=own.seed)
    if len(set(widths)) > 1:
        raise ValueError(f"All processes must have rows of the same width, got {', '.join(map(str, widths))} features.")
    merged: RowStatistics = distributed.merged(own)
    return merged
