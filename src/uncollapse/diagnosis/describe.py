"""Describe embeddings: alignment and uniformity in sentences, and histograms of their distances.

Sentences give the value, its interval and the distance to the optimum. Histograms are compared with those of random
points on the sphere.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from uncollapse.diagnosis.layer_measures import sample_size
from uncollapse.diagnosis.result import Layer
from uncollapse.metrics.bootstrap import Interval
from uncollapse.metrics.hypersphere import uniformity_optimum
from uncollapse.pairwise import numerics

NO_PAIRS = (
    "Alignment was not measured: it needs a second view of each row, in the same order (--pairs FILE, pairs=), such as "
    "embeddings of paraphrases, of other augmentations, or of the passages that answer queries."
)
BINS = 40  # of distances between unit rows, from 0 to 2
SHIFTS = 32  # partners of each row: enough for a histogram, without all pairs
COLUMNS = 256  # features of all rows that fit into the cache of a processor
STEPS = 2**16  # angles at which the density of random points is summed


def describe_embeddings(layer: Layer, t: float, alpha: float) -> Iterator[str]:
    """Yield sentences about the rows of a layer; uniformity was measured with t, alignment with alpha."""
    yield _alignment(layer, alpha) if "alignment" in layer.measures else NO_PAIRS
    yield _uniformity(layer, t)


def format_interval(interval: Interval) -> str:
    """Return an interval as text: "95 %: −3.45 to −3.37"."""
    low, high = (_number(end, _digits(interval)) for end in (interval.low, interval.high))
    return f"{100 * interval.level:g} %: {low} to {high}"


def _alignment(layer: Layer, alpha: float) -> str:
    text = f"Alignment {_value(layer, 'alignment')} over {layer.tokens:,} pairs"
    if alpha != 2:
        return f"{text}, distances to the power of {alpha:g}."
    apart = _number(2 - 2 * layer["mean_cosine"])  # ‖x − y‖² of unit rows is 2 − 2 cos
    return f"{text}: their mean squared distance, compared with {apart} for two random rows."


def _uniformity(layer: Layer, t: float) -> str:
    gap, optimum = layer["uniformity_gap"], _number(uniformity_optimum(layer.dim, t))
    percent = f"{abs(gap):.{1 if abs(gap) < 10 else 0}f} %"
    where = f"{percent} {'from' if gap > -0.05 else 'below'} the optimum"
    dimensions = "1 dimension" if layer.dim == 1 else f"{layer.dim:,} dimensions"
    count = min(layer.tokens, sample_size(layer.dim))
    rows = f"{count:,} rows" if count == layer.tokens else f"{count:,} of {layer.tokens:,} rows"
    sharpness = "" if t == 2 else f", with t = {t:g}"
    beyond = " A sample can lie below it by chance." if gap <= -0.05 else ""
    text = f"Uniformity {_value(layer, 'uniformity')}, {where} {optimum} of {dimensions}"
    return f"{text}, over {rows}{sharpness}.{beyond}"


def _value(layer: Layer, measure: str) -> str:
    interval = layer.intervals.get(measure)
    if interval is None:
        return _number(layer[measure])
    return f"{_number(layer[measure], _digits(interval))} ({format_interval(interval)})"


def _digits(interval: Interval) -> int:
    """Return how many decimals are significant given the interval, at least two."""
    half = (interval.high - interval.low) / 2
    return min(6, max(2, -math.floor(math.log10(half)))) if half > 0 else 3


def _number(value: float, digits: int = 3) -> str:
    text = f"{value:.{digits}f}"
    return text.replace("-", "−") if float(text) else text.removeprefix("-")


def row_distances(rows: Tensor) -> tuple[float, ...]:
    """Return the shares per bin of the distances ‖x − y‖ of two different rows (n, d), which are normalized.

    Each row is compared with up to 32 others, spread evenly over all.
    """
    unit = numerics.unit_rows(rows.double())
    count = min(len(unit) - 1, SHIFTS)
    shifts = [1 + number * (len(unit) - 1) // count for number in range(count)]
    squares = torch.zeros(count, len(unit), dtype=torch.float64)
    for part in torch.split(unit, COLUMNS, -1):
        squares += torch.stack([(part - part.roll(shift, 0)).square().sum(-1) for shift in shifts])
    return bin_shares(squares.sqrt().flatten())


def bin_shares(distances: Tensor) -> tuple[float, ...]:
    """Return the shares of distances (m,) in each of 40 bins from 0 to 2."""
    counts = torch.histc(distances.double().clamp(0, 2), BINS, 0, 2)
    return tuple((counts / counts.sum()).tolist())


def uniform_distances(dim: int) -> tuple[float, ...]:
    """Return the expected shares of the distances of two independent uniform points on the unit sphere in `dim` dims.

    The density of the angle θ between them is proportional to sinᵈ⁻²θ, and their distance is 2 sin(θ/2).
    """
    if dim == 1:  # two points
        return (0.5, *[0.0] * (BINS - 2), 0.5)
    angles = torch.linspace(0, math.pi, STEPS + 1, dtype=torch.float64)
    middle = (angles[1:] + angles[:-1]) / 2
    logs = (dim - 2) * middle.sin().log()
    weights = (logs - logs.max()).exp()
    places = (2 * (middle / 2).sin() * BINS / 2).long().clamp(max=BINS - 1)
    shares = torch.zeros(BINS, dtype=torch.float64).index_add_(0, places, weights / weights.sum())
    return tuple(shares.tolist())
