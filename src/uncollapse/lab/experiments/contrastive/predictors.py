"""What explains how good encoders are: alignment, uniformity, both, or the information that InfoNCE reads."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from uncollapse.errors import import_optional
from uncollapse.lab.experiments.contrastive.objectives import information
from uncollapse.lab.tables.selection import Record

ACCURACY = "validation_output_linear"
FREE = frozenset(
    ("contrast", "temperature", "negatives", "align", "alpha", "uniform", "t", "batch", "dim", "seed")
)  # settings in which encoders of one picture may differ
SUM, INFOMAX = "alignment + uniformity", "InfoMax: log(M + 1) − loss"
FEWEST = 3  # encoders that a correlation needs


@dataclass(frozen=True)
class Explained:
    """How well something goes along with accuracy.

    rank: Spearman's correlation, −1 … 1. share: of the accuracy's variance that a linear fit explains, 0 … 1.
    """

    words: str
    rank: float
    share: float


def comparable(records: Iterable[Record]) -> list[list[Record]]:
    """Encoders that differ in objective, batch, size of the output and seed only, in groups; the largest first."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if {"alignment", "uniformity", "information", ACCURACY} <= record["figures"].keys():
            fixed = {name: value for name, value in record["config"].items() if name not in FREE}
            groups[json.dumps(fixed, sort_keys=True)].append(record)
    return sorted(groups.values(), key=len, reverse=True)


def explained(records: Sequence[Record], accuracy: str = ACCURACY) -> list[Explained]:
    """How each measure, the sum of the paper's two, and InfoNCE's reading go along with accuracy; needs 3 encoders.

    The paper's two are added up, and also weighed as suits a linear fit best. InfoNCE is read at the temperature that
    makes its bound tightest and, if all were trained with it alone, also by the loss that each was trained to.
    """
    target = column(records, accuracy)
    align, spread, tightest = (column(records, name) for name in ("alignment", "uniformity", "information"))
    readings: list[tuple[str, NDArray[Any]]] = [
        ("alignment", align),
        ("uniformity", spread),
        (SUM, align + spread),
        ("the two, weighed", _fitted([align, spread], target)),
        (INFOMAX, tightest),
    ]
    reached = [as_trained(record) for record in records]
    if None not in reached:
        readings.append(("InfoMax, by the loss that it was trained to", numpy.array(reached, dtype=float)))
    return [Explained(words, _rank(values, target), _share(values, target)) for words, values in readings]


def as_trained(record: Record) -> float | None:
    """log(M + 1) − loss at the end of the training, with its own temperature and batch; None if it had other aims."""
    config, epochs = record["config"], record.get("epochs")
    if not epochs or not config["contrast"] or config["align"] or config["uniform"]:
        return None
    negatives = config["batch"] - 1 if config["negatives"] == "cross" else 2 * config["batch"] - 2
    return information(epochs[-1]["loss"] / config["contrast"], negatives)


def column(records: Sequence[Record], name: str) -> NDArray[Any]:
    """A figure of each encoder."""
    return numpy.array([record["figures"][name] for record in records], dtype=float)


def _rank(values: NDArray[Any], target: NDArray[Any]) -> float:
    stats: Any = import_optional("scipy.stats", "train")
    if min(values.std(), target.std()) == 0:  # nothing goes along with what does not change
        return 0.0
    return float(stats.spearmanr(values, target).statistic)


def _share(values: NDArray[Any], target: NDArray[Any]) -> float:
    """R² of the linear fit."""
    spread = float(((target - target.mean()) ** 2).sum())
    return 1 - float(((target - _fitted([values], target)) ** 2).sum()) / spread if spread else 0.0


def _fitted(values: Sequence[NDArray[Any]], target: NDArray[Any]) -> NDArray[Any]:
    """What the best linear fit expects."""
    design = numpy.column_stack([*values, numpy.ones_like(target)])
    expected: NDArray[Any] = design @ numpy.linalg.lstsq(design, target, rcond=None)[0]
    return expected
