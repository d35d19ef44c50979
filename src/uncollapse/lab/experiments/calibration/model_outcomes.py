"""Outcomes of acting on a verdict about a trained network: whether a cure then helped, counted over stored runs.

A case is one seed of a network without a cure, after its training. The cures are those that were run with the same
data, depth and settings. The best one is chosen by its mean score on validation, and its test score is compared with
that of the network without a cure, seed by seed. Acting helps if the score rises by at least `CLEAR`, hurts if it falls
by as much, and makes no clear difference otherwise; such cases count for no rule.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uncollapse.diagnosis.verdict import ALIKE, NARROW
from uncollapse.lab.experiments.calibration.analysis import Rate, Rule, evaluate, leave_one_out

CLEAR = 0.02  # of the score
PLAIN: dict[str, dict[str, Any]] = {  # recipe -> the settings of a network without a cure
    "gcn-depth": {"norm": "none", "residual": 0, "drop_edge": 0.0, "uniform": 0.0},
    "bert-depth": {"cure": "none"},
    "arena": {"cure": "none"},
}
OF_A_CURE = {  # recipe -> settings that a cure may have besides
    "gcn-depth": ("scale", "identity", "sample", "norm_every"),
    "bert-depth": ("at", "scale", "temperature", "axis", "identity", "dual", "norm", "padding", "weight", "uniform_on"),
    "arena": ("scale", "lr"),
}
ALIKES = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 1.01)  # bounds to fit; 1.01 and 0: this measure never counts
NARROWS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
EARLY = "early_verdicts.json"  # in the folder of results, from `python -m experiments.early_verdicts`
Bounds = tuple[float, float]
Record = Mapping[str, Any]


@dataclass(frozen=True)
class ModelCase:
    """A trained network without a cure: its verdict, cosine and rank share at the last block, and the best cure's gain.

    untrained: the verdict before training. early: after a tenth of it, if that was measured. share: the smaller of the
    shares of a sequence and of the dataset.
    """

    family: str
    data: str
    depth: int
    seed: int
    verdict: str
    untrained: str
    cosine: float
    share: float
    cure: str
    gain: float
    early: str | None = None

    @property
    def helps(self) -> bool | None:
        """Return whether acting helps; None without a clear difference."""
        return None if abs(self.gain) < CLEAR else self.gain > 0


def read(results: Path) -> list[ModelCase]:
    """Return the cases of all recipes in a folder of results."""
    path = results / EARLY
    early = json.loads(path.read_text(encoding="utf-8"))["verdicts"] if path.exists() else {}
    return [case for recipe in PLAIN for case in model_cases(_records(results, recipe), early)]


def plain_records(results: Path) -> list[dict[str, Any]]:
    """Return the records of the networks without a cure in a folder of results, each with its file."""
    every = [record for recipe in PLAIN for record in _records(results, recipe)]
    return [record for record in every if _is_plain(record) and not _is_rival(record) and _is_fresh(record)]


def _records(results: Path, recipe: str) -> list[dict[str, Any]]:
    paths = sorted((results / recipe).glob("*.json"))
    every = (json.loads(path.read_text(encoding="utf-8")) | {"file": f"{recipe}/{path.stem}"} for path in paths)
    return [record for record in every if "diagnosis" in record]


def model_cases(records: Sequence[Record], early: Mapping[str, str] | None = None) -> list[ModelCase]:
    """Return the cases of the records of one recipe; of cells with the same data and depth, the one with most runs.

    early: verdicts after a tenth of the training, by file.
    """
    cells: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if not _is_rival(record):
            cells[_cell(record)].append(record)
    found: dict[tuple[str, str, int, int], ModelCase] = {}
    for cell in sorted(cells.values(), key=len):
        found |= {(case.family, case.data, case.depth, case.seed): case for case in _cases(cell, early or {})}
    return list(found.values())


def _cases(cell: Sequence[Record], early: Mapping[str, str]) -> Iterable[ModelCase]:
    runs: dict[tuple[bool, str], dict[int, Record]] = defaultdict(dict)
    for record in cell:
        runs[_is_plain(record), _settings(record)][record["config"]["seed"]] = record
    plain, cured = (
        max((of for (is_plain, _), of in runs.items() if is_plain is wanted), key=_rank, default={})
        for wanted in (True, False)
    )
    for seed in sorted(plain.keys() & cured.keys()):
        if _is_fresh(plain[seed]):
            yield _case(plain[seed], cured[seed], early.get(plain[seed].get("file", "")))


def _rank(runs: Mapping[int, Record]) -> tuple[int, float]:
    """Prefer settings with more seeds, as only those that validation chose have all of them; then by validation."""
    return len(runs), statistics.mean(record["figures"]["validation"] for record in runs.values())


def _case(plain: Record, cured: Record, early: str | None) -> ModelCase:
    config, after = plain["config"], plain["diagnosis"]["after"]
    family = _family(plain)
    layers = after["layers"]
    if family == "graph networks" and len(layers) > 3:
        layers = layers[:-1]  # the last one gives logits
    shares = [value for name in ("rank_share", "dataset_rank_share") if (value := layers[-1].get(name)) is not None]
    return ModelCase(
        family,
        config["data"] if family == "graph networks" else plain["data"]["name"],
        config.get("layers", config.get("depth", 0)),
        config["seed"],
        after["verdict"],
        plain["diagnosis"]["before"]["verdict"],
        layers[-1]["robust_cosine"],
        min(shares),
        cured["config"].get("norm" if "residual" in config else "cure", ""),
        _score(cured) - _score(plain),
        early,
    )


def _family(record: Record) -> str:
    task = record["config"].get("task", "")
    return "graph networks" if record["recipe"] == "gcn-depth" or task == "gcn" else "transformers"


def _score(record: Record) -> float:
    figures = record["figures"]
    return float(figures["test"] if "test" in figures else figures["dev"])


def _is_rival(record: Record) -> bool:
    """Return whether a run of the arena has another depth or length instead of a cure."""
    config = record["config"]
    return record["recipe"] == "arena" and bool(config["blocks"] != 0 or config["longer"] != 1)


def _is_fresh(record: Record) -> bool:
    """Return whether the seed of a run chose nothing, as seed 0 does in the arena."""
    return bool(record["recipe"] != "arena" or record["config"]["seed"] > 0)


def _is_plain(record: Record) -> bool:
    return all(record["config"][name] == value for name, value in PLAIN[record["recipe"]].items())


def _cell(record: Record) -> str:
    free = {*PLAIN[record["recipe"]], *OF_A_CURE[record["recipe"]], "seed"}
    return json.dumps({name: value for name, value in record["config"].items() if name not in free}, sort_keys=True)


def _settings(record: Record) -> str:
    recipe = record["recipe"]
    names = [*PLAIN[recipe], *OF_A_CURE[recipe]]
    return json.dumps([record["config"].get(name) for name in names])


def act_by(bounds: Bounds) -> Rule[ModelCase]:
    """Return the rule that acts from this cosine on, and below this share, at the last block."""
    return lambda case: case.cosine >= bounds[0] or case.share < bounds[1]


def fit_bounds(found: Sequence[ModelCase]) -> Bounds:
    """Return the bounds that are right most often; of equals, those nearest to the shipped ones."""
    every = [(alike, narrow) for alike in ALIKES for narrow in NARROWS]
    return max(every, key=lambda b: (evaluate(act_by(b), found).right, -abs(b[0] - ALIKE) - abs(b[1] - NARROW)))


def fit_rule(found: Sequence[ModelCase]) -> Rule[ModelCase]:
    """Return the rule with the fitted bounds."""
    return act_by(fit_bounds(found))


def hit_rates(found: Sequence[ModelCase]) -> dict[str, Rate]:
    """Return the rates of the verdict, of the trivial rules, and of fitted bounds on the dataset left out."""
    known = [case for case in found if case.early is not None]
    return {
        "the verdict after training": evaluate(lambda case: case.verdict != "none", found),
        "the verdict after a tenth of the training": evaluate(lambda case: case.early != "none", known),
        "the verdict before training": evaluate(lambda case: case.untrained != "none", found),
        "always act": evaluate(lambda case: True, found),
        "never act": evaluate(lambda case: False, found),
        "fitted bounds, one dataset left out": leave_one_out(found, lambda case: case.data, fit_rule),
    }


def summarize(found: Iterable[ModelCase]) -> dict[str, dict[str, dict[str, float]]]:
    """Return for each family and verdict: how many cases, in how many acting helped or hurt, and the median gain."""
    groups: dict[str, dict[str, list[ModelCase]]] = defaultdict(lambda: defaultdict(list))
    for case in found:
        groups[case.family][case.verdict].append(case)
    return {
        family: {verdict: _summary(cases) for verdict, cases in sorted(of.items())}
        for family, of in sorted(groups.items())
    }


def _summary(cases: Sequence[ModelCase]) -> dict[str, float]:
    return {
        "cases": len(cases),
        "sources": len({case.data for case in cases}),
        "helped": sum(case.helps is True for case in cases),
        "hurt": sum(case.helps is False for case in cases),
        "median": round(100 * statistics.median(case.gain for case in cases), 1),
    }
