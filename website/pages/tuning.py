"""Tables of the page on tuning: a search beside a grid by hand at equal cost, from results/tune."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "results" / "tune"
TITLES = {
    "gcn-depth": "Cora, 16 layers",
    "glue": "SST-2, 1,500 sentences, MiniLM",
}
WAYS = {"hand": "grid by hand", "search": "`uncollapse tune`"}
Row = tuple[str, ...]


def compared() -> tuple[Row, Sequence[Row]]:
    """Both ways with each seed; without rows where nothing was run."""
    head = ("task", "seed", "method", "tried", "full trainings", "validation", "test", "selected")
    return head, [_row(record, way) for record in _records() for way in WAYS]


def means() -> tuple[Row, Sequence[Row]]:
    """Both ways in the mean over the seeds, and the run without a cure."""
    rows = []
    for recipe, title in TITLES.items():
        own = [record for record in _records() if record["config"]["recipe"] == recipe]
        for way, name in WAYS.items() if own else ():
            cost = statistics.fmean(record[way]["cost"]["trainings"] for record in own)
            rows.append((title, name, str(len(own)), f"{cost:.1f}", *_spreads([_figures(each, way) for each in own])))
        if own:
            rows.append((title, "without a cure", str(len(own)), "1.0", *_spreads([_baseline(each) for each in own])))
    return ("task", "method", "seeds", "full trainings", "validation", "test"), rows


def verdict() -> str:
    """How often the search was at least as good, on validation and on test."""
    found = _records()
    if not found:
        return "Not run yet."
    parts = []
    for number, part in enumerate(("validation", "test")):
        gaps = [_figures(record, "search")[number] - _figures(record, "hand")[number] for record in found]
        reached = sum(gap >= 0 for gap in gaps)
        parts.append(
            f"on {part} in {reached} of {len(gaps)} cases, by {100 * statistics.fmean(gaps):+.1f} points in the mean "
            f"(from {100 * min(gaps):+.1f} to {100 * max(gaps):+.1f})"
        )
    return f"The search was at least as good as the grid {' and '.join(parts)}."


def _records() -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*-seed*.json"))]


def _figures(record: dict[str, Any], way: str) -> tuple[float, float]:
    best = record[way]["best"]
    return best["validation"], best[record["judged"]]


def _baseline(record: dict[str, Any]) -> tuple[float, float]:
    base = record["search"]["baseline"]
    return base["validation"], base[record["judged"]]


def _row(record: dict[str, Any], way: str) -> Row:
    validation, test = _figures(record, way)
    settings = ", ".join(f"{name} {_said(value)}" for name, value in record[way]["best"]["settings"].items())
    tried = [trial for trial in record[way]["trials"] if not trial.get("idle")]
    stopped = sum(trial.get("state") == "pruned" for trial in tried)
    count = f"{len(tried)}, {stopped} stopped early" if stopped else str(len(tried))
    task, cost = TITLES[record["config"]["recipe"]], f"{record[way]['cost']['trainings']:.1f}"
    figures = (f"{100 * validation:.1f} %", f"{100 * test:.1f} %")
    return task, str(record["seed"]), WAYS[way], count, cost, *figures, settings


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _spreads(figures: list[tuple[float, float]]) -> list[str]:
    """Mean and deviation of both figures."""
    return [_spread(list(values)) for values in zip(*figures, strict=True)]


def _spread(values: list[float]) -> str:
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{deviation} %"


PARTS: dict[str, Callable[[], tuple[Row, Sequence[Row]]]] = {"tuning_compared": compared, "tuning_means": means}
TEXTS: dict[str, Callable[[], str]] = {"tuning_verdict": verdict}
