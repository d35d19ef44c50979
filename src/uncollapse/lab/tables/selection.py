"""Select the results that count: the best on validation, and those run with the same settings."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from uncollapse.errors import UsageError

Record = Mapping[str, Any]
Values = tuple[Any, ...]


def select_best(runs: Mapping[Values, Mapping[int, Record]], by: str) -> Values:
    """Return the values with the best mean of the metric `by`, in results by values and seed; of equals, the smaller.

    Means are over the seeds of `seeds_of_choice`, so that no values win by seeds that others were not run with. A run
    that did not stay finite makes its values the worst.
    """
    seeds = seeds_of_choice(runs)
    scores = {values: _mean(of, seeds, by) for values, of in runs.items() if all(seed in of for seed in seeds)}
    return min(scores, key=lambda values: (_worst_last(scores[values]), [_rank(value) for value in values]))


def seeds_of_choice(runs: Mapping[Values, Mapping[int, Record]]) -> list[int]:
    """Return the seeds that every value was run with; if there are none, the lowest of those that most were run with.

    >>> seeds_of_choice({(0.5,): {0: {}, 1: {}, 2: {}}, (1.0,): {0: {}, 1: {}}})
    [0, 1]
    """
    counts = Counter(seed for of in runs.values() for seed in of)
    common = sorted(seed for seed, count in counts.items() if count == len(runs))
    return common or [min(counts, key=lambda seed: (-counts[seed], seed))]


def common_settings(
    cells: Iterable[Iterable[Record]], but: Collection[str], first: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the value of each field, except `but`, that most cells have; each cell counts once.

    first: values that are taken where others are as common.
    """
    preferred = first or {}
    counts: dict[str, Counter[Any]] = defaultdict(Counter)
    for records in cells:
        for name, value in {pair for record in records for pair in _others(record, but).items()}:
            counts[name][value] += 1

    def rank(name: str, value: Any) -> tuple[int, bool, str]:
        return -counts[name][value], name not in preferred or freeze(preferred[name]) != value, repr(value)

    return {name: min(of, key=partial(rank, name)) for name, of in counts.items()}


def main_settings(
    records: Sequence[Record], but: Collection[str], usual: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Record]]:
    """Return unusual settings and the results that share them; fields in `but` may differ.

    Means are taken over results that differ only in their seed. If there are others, those with the most usual settings
    count, and among equally usual ones the most runs; the metrics themselves never decide.
    """
    alike: dict[tuple[tuple[str, Any], ...], list[Record]] = defaultdict(list)
    for record in records:
        others = ((name, value) for name, value in _others(record, but).items() if value != usual[name])
        alike[tuple(sorted(others))].append(record)
    unusual = min(alike, key=lambda pairs: (len(pairs), -len(alike[pairs]), repr(pairs)))
    return dict(unusual), alike[unusual]


def metric_of(record: Record, name: str) -> float | None:
    """Return a metric of a result; None if it is missing or not finite."""
    value = record["figures"].get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def field_of(record: Record, name: str) -> Any:
    """Return a field of a result's config; for several, joined by "+", those that are not 0 or none, as text."""
    if "+" in name:
        values = {part: field_of(record, part) for part in name.split("+")}
        said = [str(v) if isinstance(v, str) else f"{part} {v}" for part, v in values.items() if v and v != "none"]
        return ", ".join(said) or "none"
    if name not in record["config"]:
        there = ", ".join(record["config"])
        raise UsageError(f"A result of {record['recipe']} has no field {name!r}; it has: {there}.")
    return freeze(record["config"][name])


def freeze(value: Any) -> Any:
    """Return a hashable value: JSON has lists where a config has tuples."""
    return tuple(map(freeze, value)) if isinstance(value, list) else value


def _others(record: Record, but: Collection[str]) -> dict[str, Any]:
    return {name: freeze(value) for name, value in record["config"].items() if name not in but}


def _mean(runs: Mapping[int, Record], seeds: Iterable[int], by: str) -> float | None:
    """Return the mean of a metric over seeds; None if it is missing or not finite in any of them."""
    found = [metric_of(runs[seed], by) for seed in seeds]
    return None if None in found else statistics.fmean(value for value in found if value is not None)


def _worst_last(score: float | None) -> float:
    return math.inf if score is None else -score


def _rank(value: Any) -> tuple[float, str]:
    """Return a sort key: numbers by size, then other values by name."""
    return (value, "") if isinstance(value, int | float) else (math.inf, str(value))
