"""Correlations of alignment, uniformity and InfoNCE's bound with the accuracy of encoders."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from uncollapse.errors import import_optional
from uncollapse.lab.experiments.contrastive.objectives import information_bound
from uncollapse.lab.tables.selection import Record

ACCURACY = "validation_output_linear"
FREE = frozenset(
    ("contrast", "temperature", "negatives", "align", "alpha", "uniform", "t", "batch", "dim", "seed")
)  # fields in which encoders of one plot may differ
SUM, INFOMAX = "alignment + uniformity", "InfoMax: log(M + 1) − loss"
FEWEST = 3  # encoders per plot
FEWEST_PARTIAL = 5  # encoders of a partial correlation, which has one degree of freedom less
RESAMPLES, LEVEL, EXACT = 4000, 0.95, 1e-9  # bootstrap; 1 − r² below the last is a perfect correlation


@dataclass(frozen=True)
class Correlation:
    """How well a metric predicts accuracy.

    Args:
        name: Name of the metric.
        spearman: Rank correlation, −1 … 1.
        r_squared: Share of the accuracy's variance that a linear fit explains, 0 … 1.
    """

    name: str
    spearman: float
    r_squared: float


@dataclass(frozen=True)
class PartialCorrelation:
    """Rank correlation of a metric with accuracy that the other metric does not explain.

    Args:
        name: The metric, and the one that is held fixed.
        value: Partial rank correlation, −1 … 1.
        low: Lower end of its 95 % bootstrap interval.
        high: Upper end.
    """

    name: str
    value: float
    low: float
    high: float


def comparable_groups(records: Iterable[Record]) -> list[list[Record]]:
    """Return groups of encoders that differ only in objective, batch, output size and seed, the largest group first."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if {"alignment", "uniformity", "information", ACCURACY} <= record["figures"].keys():
            fixed = {name: value for name, value in record["config"].items() if name not in FREE}
            groups[json.dumps(fixed, sort_keys=True)].append(record)
    return sorted(groups.values(), key=len, reverse=True)


def correlate_with_accuracy(records: Sequence[Record], accuracy: str = ACCURACY) -> list[Correlation]:
    """Return how well the paper's two metrics, their sum, and InfoNCE's bound predict accuracy, for 3 encoders or more.

    The two metrics are added, and also weighted by a linear fit. InfoNCE's bound is taken at the temperature where it
    is tightest and, if all encoders were trained with InfoNCE alone, also from their training loss.
    """
    target = metric_column(records, accuracy)
    align, spread, tightest = (metric_column(records, name) for name in ("alignment", "uniformity", "information"))
    readings: list[tuple[str, NDArray[Any]]] = [
        ("alignment", align),
        ("uniformity", spread),
        (SUM, align + spread),
        ("both, weighted", _linear_fit([align, spread], target)),
        (INFOMAX, tightest),
    ]
    reached = [information_in_training(record) for record in records]
    if None not in reached:
        readings.append(("InfoMax, from the training loss", numpy.array(reached, dtype=float)))
    return [Correlation(words, _spearman(values, target), _r_squared(values, target)) for words, values in readings]


def information_in_training(record: Record) -> float | None:
    """Return log(M + 1) − loss at the end of the training; None unless the objective was InfoNCE alone."""
    config, epochs = record["config"], record.get("epochs")
    if not epochs or not config["contrast"] or config["align"] or config["uniform"]:
        return None
    negatives = config["batch"] - 1 if config["negatives"] == "cross" else 2 * config["batch"] - 2
    return information_bound(epochs[-1]["loss"] / config["contrast"], negatives)


def metric_column(records: Sequence[Record], name: str) -> NDArray[Any]:
    """Return one metric of all encoders."""
    return numpy.array([record["figures"][name] for record in records], dtype=float)


def _spearman(values: NDArray[Any], target: NDArray[Any]) -> float:
    stats: Any = import_optional("scipy.stats", "train")
    if min(values.std(), target.std()) == 0:  # a constant has no correlation
        return 0.0
    return float(stats.spearmanr(values, target).statistic)


def _r_squared(values: NDArray[Any], target: NDArray[Any]) -> float:
    """Return R² of the linear fit."""
    spread = float(((target - target.mean()) ** 2).sum())
    return 1 - float(((target - _linear_fit([values], target)) ** 2).sum()) / spread if spread else 0.0


def _linear_fit(values: Sequence[NDArray[Any]], target: NDArray[Any]) -> NDArray[Any]:
    """Return the prediction of the least-squares fit."""
    design = numpy.column_stack([*values, numpy.ones_like(target)])
    expected: NDArray[Any] = design @ numpy.linalg.lstsq(design, target, rcond=None)[0]
    return expected


def correlation_record(records: Iterable[Record]) -> dict[str, Any]:
    """Return the correlations and partial correlations of each group of comparable encoders as plain data."""
    groups = [group for group in comparable_groups(records) if len(group) >= FEWEST]
    found = [
        {
            "data": group[0]["config"]["data"],
            "encoders": len(group),
            "correlations": [asdict(one) for one in correlate_with_accuracy(group)],
            "partial_correlations": [asdict(one) for one in partial_correlations(group)],
        }
        for group in groups
    ]
    return {"accuracy": ACCURACY, "groups": found}


def partial_correlations(records: Sequence[Record], accuracy: str = ACCURACY) -> list[PartialCorrelation]:
    """Return Spearman's partial correlation of accuracy with alignment given uniformity, and the other way round.

        r_xy·z = (r_xy − r_xz · r_yz) / √((1 − r_xz²)(1 − r_yz²)), of the ranks

    Intervals are percentiles of a bootstrap over encoders, with a fixed seed; resamples without a partial correlation,
    because two columns are then constant or perfectly correlated, do not count. There are none for fewer than five
    encoders, or where the correlation itself is not defined.
    """
    if len(records) < FEWEST_PARTIAL:
        return []
    columns = numpy.stack([metric_column(records, name) for name in (accuracy, "alignment", "uniformity")])
    draw = numpy.random.default_rng(0).integers(0, len(records), (RESAMPLES, len(records)))
    resampled = columns[:, draw]
    found = []
    for name, (x, z) in {"alignment given uniformity": (1, 2), "uniformity given alignment": (2, 1)}.items():
        value = float(_partial_spearman(columns[0], columns[x], columns[z]))
        values = _partial_spearman(resampled[0], resampled[x], resampled[z])
        values = values[numpy.isfinite(values)]
        if numpy.isfinite(value) and len(values):
            low, high = numpy.quantile(values, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
            found.append(PartialCorrelation(name, value, float(low), float(high)))
    return found


def _partial_spearman(y: NDArray[Any], x: NDArray[Any], z: NDArray[Any]) -> NDArray[Any]:
    """Return the partial rank correlation of x and y given z, rows (..., n) -> (...); NaN where it is not defined."""
    stats: Any = import_optional("scipy.stats", "train")
    y, x, z = (_unit(stats.rankdata(values, axis=-1)) for values in (y, x, z))
    xy, xz, yz = ((a * b).sum(-1) for a, b in ((x, y), (x, z), (y, z)))
    left = (1 - xz**2) * (1 - yz**2)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        value: NDArray[Any] = numpy.where(left > EXACT, (xy - xz * yz) / numpy.sqrt(left), numpy.nan)
    return value


def _unit(ranks: NDArray[Any]) -> NDArray[Any]:
    """Return centered rows of length one; NaN for constant ones."""
    centred = ranks - ranks.mean(-1, keepdims=True)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        rows: NDArray[Any] = centred / numpy.linalg.norm(centred, axis=-1, keepdims=True)
    return rows
