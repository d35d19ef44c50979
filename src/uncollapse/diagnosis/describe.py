"""Describe alignment and uniformity of embeddings in sentences: value, interval, distance to the optimum."""

import math
from collections.abc import Iterator

from uncollapse.diagnosis.layer_stats import sample_size
from uncollapse.diagnosis.result import Layer
from uncollapse.metrics.bootstrap import Interval
from uncollapse.metrics.hypersphere import uniformity_optimum

NO_PAIRS = (
    "Alignment was not measured: it needs a second view of each row, in the same order (--pairs FILE, pairs=), such as "
    "embeddings of paraphrases, of other augmentations, or of the passages that answer queries."
)


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
