"""Standings of the arena: the gain of each row over doing nothing, what it costs, and what the diagnosis showed."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from uncollapse.lab.experiments.arena.config import find_contestant
from uncollapse.lab.tables.contrasts import Comparison, compare_rows
from uncollapse.lab.tables.paper_table import PaperTable, TableCell, build_cells
from uncollapse.lab.tables.selection import Record, metric_of
from uncollapse.lab.tables.significance import Paired, compare, mean_interval
from uncollapse.registry import CURES

NONE, LONGER = "none", "more epochs"  # rows that others are compared with
WORKS = 0.9  # of the best validation score of a place: from here on a learning rate works
KINDS = {  # of models, as advice calls them
    "gcn": "graph network",
    "vit-digits": "pre-norm encoder",
    "vit-cifar": "pre-norm encoder",
    "bert": "post-norm encoder",
    "decoder": "pre-norm decoder",
}
FEWEST = 3  # seeds from which on a gain counts for advice
At = tuple[str, str, int]  # group, row, depth
CHOSEN = ("lr", "scale", "blocks")  # fields that trials choose
SLACK = 1.05  # a row that takes longer by less than this takes as long: seconds of equal runs differ


@dataclass(frozen=True)
class Standing:
    """A row at a place of the arena, over its fresh seeds.

    group, depth: the place. chosen: settings chosen on validation. scores: test scores by seed, in percent.
    gain: over doing nothing, at equal steps. gain_in_time: over a plain model that trains for as many seconds.
    seconds: of processor time per run. megabytes: what a step stores for its backward pass. verdicts, ranks: before and
    after the training, the most frequent verdict and the mean effective rank after the last block. rates: the best
    validation score of the trials by learning rate, in percent. tried: values of the chosen settings that were tried.
    trials: how many there were. failed: fresh seeds that did not stay finite, which no mean contains. lacks: how far
    its sweep is, such as "3 of 9 trials", if it is not complete. plain_seconds: those of the plain model in
    `gain_in_time`, where the row took longer than it ever trained; otherwise None. processors: on which it ran, "" for
    those of results that do not say; seconds of different ones are not compared.
    """

    group: str
    row: str
    depth: int
    chosen: Mapping[str, Any]
    scores: Mapping[int, float]
    seconds: float
    megabytes: float
    verdicts: tuple[str, str]
    ranks: tuple[float, float]
    rates: Mapping[float, float] = field(default_factory=dict)
    gain: Comparison | None = None
    gain_in_time: Paired | None = None
    plain_seconds: float | None = None
    tried: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    trials: int = 0
    failed: tuple[int, ...] = ()
    lacks: str = ""
    processors: frozenset[str] = frozenset()

    @property
    def mean(self) -> float:
        """The mean test score, in percent."""
        return statistics.fmean(self.scores.values())

    @property
    def label(self) -> str:
        """The row in words, with what its sweep still lacks."""
        return f"{self.row} ({self.lacks})" if self.lacks else self.row

    @property
    def choice(self) -> str:
        """The chosen settings in words; those at an end of what was tried are marked."""
        said = []
        for name, values in self.tried.items():
            end = {values[0]: " (lowest)", values[-1]: " (highest)"}.get(self.chosen[name], "")
            said.append(f"{name} {self.chosen[name]:g}{end}")
        return ", ".join(said)


def build_standings(
    table: PaperTable, records: Sequence[Record], unfinished: Mapping[At, str] | None = None
) -> list[Standing]:
    """Return the rows that have fresh seeds, in the order of the table. unfinished: rows that lack runs, with words."""
    cells = [cell for cell in build_cells(table, records) if cell.figures]
    gains = {(each.group, each.row, each.column): each for each in compare_rows(table, cells)}
    places = [(cell.group, cell.row, cell.column) for cell in cells]
    made = {at: _standing(cell, gains.get(at)) for at, cell in zip(places, cells, strict=True)}
    lacks = unfinished or {}
    return [replace(_with_time(each, made), lacks=lacks.get(at, "")) for at, each in made.items()]


def _standing(cell: TableCell, gain: Comparison | None) -> Standing:
    def is_chosen(record: Record) -> bool:
        return all(record["config"][name] == value for name, value in cell.chosen.items())

    runs = [r for r in cell.records if r["seed"] in cell.figures and is_chosen(r)]
    trials = [r for r in cell.records if r["seed"] not in (*cell.figures, *cell.failed)]
    seconds = [r["cost"]["processor_seconds"] for r in runs if r["cost"]["processor_seconds"] is not None]
    return Standing(
        cell.group,
        cell.row,
        cell.column,
        {name: runs[0]["config"][name] for name in CHOSEN},
        cell.figures,
        seconds=statistics.fmean(seconds) if seconds else math.nan,  # of resumed runs it is not known
        megabytes=statistics.fmean(r["cost"]["saved_megabytes"] for r in runs),
        verdicts=(_usual_verdict(runs, "before"), _usual_verdict(runs, "after")),
        ranks=(_mean_rank(runs, "before"), _mean_rank(runs, "after")),
        rates=_best_by_rate(trials),
        gain=gain,
        tried=_tried_values(trials),
        trials=len(trials),
        failed=cell.failed,
        processors=frozenset(str(r.get("processor", "")) for r in runs),
    )


def _best_by_rate(trials: Iterable[Record]) -> dict[float, float]:
    best: dict[float, float] = {}
    for trial in trials:
        rate, score = trial["config"]["lr"], metric_of(trial, "validation")
        best[rate] = max(best.get(rate, 0.0), 100 * (score or 0.0))  # 0 if it did not stay finite
    return dict(sorted(best.items()))


def _tried_values(trials: Sequence[Record]) -> dict[str, tuple[float, ...]]:
    """Return the values of each chosen field, sorted, where there are several."""
    values = {name: tuple(sorted({trial["config"][name] for trial in trials})) for name in CHOSEN}
    return {name: of for name, of in values.items() if len(of) > 1}


def _usual_verdict(runs: Sequence[Record], when: str) -> str:
    return Counter(str(r["diagnosis"][when]["verdict"]) for r in runs).most_common(1)[0][0]


def _mean_rank(runs: Sequence[Record], when: str) -> float:
    """Return the effective rank of what enters the last layer, the outputs of a graph network, or leaves it."""
    return statistics.fmean(_last_hidden(r, when)["effective_rank"] for r in runs)


def _last_hidden(record: Record, when: str) -> Mapping[str, Any]:
    blocks = [layer for layer in record["diagnosis"][when]["layers"] if layer["name"].startswith("block")]
    last: Mapping[str, Any] = blocks[-2 if record["config"]["task"] == "gcn" else -1]
    return last


def _with_time(each: Standing, others: Mapping[At, Standing]) -> Standing:
    """Return a standing with its gain over plain models that had as much time.

    Their score is taken on the line between their usual training and the longer one. A row that takes longer than that
    is compared with the longer training, and says so.
    """
    plain, longer = (others.get((each.group, row, each.depth)) for row in (NONE, LONGER))
    if each.row == NONE or plain is None or longer is None or not longer.seconds > plain.seconds:
        return each
    seeds = each.scores.keys() & plain.scores.keys() & longer.scores.keys()
    if not seeds or math.isnan(each.seconds) or len(plain.processors | longer.processors | each.processors) > 1:
        return each
    share = min(1.0, max(0.0, (each.seconds - plain.seconds) / (longer.seconds - plain.seconds)))
    rival = {seed: (1 - share) * plain.scores[seed] + share * longer.scores[seed] for seed in seeds}
    less = longer.seconds if each.seconds > SLACK * longer.seconds else None
    return replace(each, gain_in_time=compare(each.scores, rival), plain_seconds=less)


def measured_gains(
    table: PaperTable, records: Sequence[Record], unfinished: Mapping[At, str] | None = None
) -> dict[str, Any]:
    """Return what advice is taken from, as `uncollapse.diagnosis.reference_data` reads it.

    Gains are averaged over the datasets of a task by seed. Datasets on which fewer rows were run than on others are
    left out, and so are rows that are not on all that remain: means over different datasets cannot be compared. Advice
    names single changes, so combinations are left out too. A task on which no cure was run yet says nothing of cures.
    Rows whose sweep is not complete are left out, and those of which a seed did not stay finite: the mean of the others
    would be too good.
    """
    found: dict[tuple[str, int], dict[str, dict[str, Standing]]] = defaultdict(lambda: defaultdict(dict))
    known = [record for record in records if not record["config"]["draw"]]  # the demo's graph is new to advice
    for each in build_standings(table, known, unfinished):
        single = not any(sign in each.row for sign in "+,") and each.row != "fewer epochs"
        if single and len(each.scores) >= FEWEST and not each.lacks and not (each.failed and each.row != NONE):
            found[each.group.partition(",")[0], each.depth][each.group][each.row] = each
    entries = [_measured_entry(task, depth, groups) for (task, depth), groups in found.items()]
    date = max((str(record["date"])[:10] for record in known), default="")
    return {"source": "results/arena", "date": date, "measured": [entry for entry in entries if entry]}


def _measured_entry(task: str, depth: int, groups: Mapping[str, Mapping[str, Standing]]) -> dict[str, Any] | None:
    most = max(len(rows) for rows in groups.values())
    full = {group: rows for group, rows in groups.items() if len(rows) == most and NONE in rows}
    if not full:
        return None
    first, *others = full.values()
    common = [row for row in first if row != NONE and all(row in rows for rows in others)]
    gains = [gain for row in common if (gain := _gain([rows[row] for rows in full.values()], len(common)))]
    if not any(gain["cure"] for gain in gains):
        return None
    plain = [rows[NONE] for rows in full.values()]
    return {
        "kind": KINDS[task],
        "depth": depth,
        "data": [group.partition(", ")[2] or group.partition("-")[2] or group for group in full],
        "cause": Counter(each.verdicts[1] for each in plain).most_common(1)[0][0],
        "score": round(statistics.fmean(each.mean for each in plain), 2),
        "gains": sorted(gains, key=lambda gain: -gain["low"]),
    }


def _gain(several: Sequence[Standing], rows: int) -> dict[str, Any] | None:
    """Return the gain of a row over all datasets; None if they have too few seeds in common.

    Advice takes the best of so many rows, so their intervals hold together.
    """
    differences = [each.gain.paired.differences for each in several if each.gain]
    seeds = set.intersection(*(set(each) for each in differences)) if differences else set()
    if len(differences) < len(several) or len(seeds) < FEWEST:
        return None
    means = [statistics.fmean(each[seed] for each in differences) for seed in seeds]
    mean = statistics.fmean(means)
    interval = mean_interval(mean, statistics.stdev(means), len(means), rows)
    assert interval is not None  # there are several seeds
    numbers = {"mean": round(mean, 2), "low": round(interval[0], 2), "high": round(interval[1], 2)}
    return {"row": several[0].row, **_way(several), **numbers, "seeds": len(seeds)}


def _way(several: Sequence[Standing]) -> dict[str, str]:
    """Return how a user gets a row: the cure, its place, and a line of code."""
    first, chosen = several[0], [each.chosen for each in several]
    if first.row == "shallower":
        blocks = statistics.median_low(each["blocks"] for each in chosen)
        return {"cure": "", "place": "model", "code": f"# build it with {blocks} blocks"}
    if first.row == LONGER:
        return {"cure": "", "place": "training", "code": "# train it longer, without a cure"}
    contestant = find_contestant(first.group.partition(",")[0], first.row)
    scale = statistics.median_low(each["scale"] for each in chosen)
    cures = [step["cure"] for step in contestant.attach]
    usual = "conv.output" if first.group.startswith("gcn") else CURES[cures[-1]].place[0] if cures else ""
    place = str(contestant.attach[-1].get("at", usual)) if cures else "model"
    return {"cure": cures[0] if len(cures) == 1 else "", "place": place, "code": contestant.code_for(scale)}
