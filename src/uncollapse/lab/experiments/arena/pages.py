"""Tables of cost, learning rates and missing runs of the arena, the progress of its rows, and its plots."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uncollapse.lab.config.fields import identity
from uncollapse.lab.experiments.arena.config import NAME, Config, group_of, row_of
from uncollapse.lab.experiments.arena.standings import WORKS, At, Standing, build_standings
from uncollapse.lab.runs.grids import Grid, GridCell
from uncollapse.lab.tables.contrasts import NONE as NOTHING
from uncollapse.lab.tables.contrasts import format_interval, format_signed
from uncollapse.lab.tables.paper_table import Details, PaperTable
from uncollapse.lab.tables.selection import Record
from uncollapse.lab.tables.significance import mean_interval
from uncollapse.lab.tables.table_page import ResultPlot
from uncollapse.report.canvas import (
    INK,
    LINE,
    add_legend_below,
    legend_columns,
    new_figure,
    series_marker,
    series_style,
)

PLACE = ("task", "depth", "cure")
COST = ("gain", "95 % interval", "s", "plain s", "MB")
BEFORE_AFTER = ("rank before → after", "verdict before → after")
BAR: dict[str, Any] = {"linestyle": "none", "capsize": 2.5, "elinewidth": 1.0}

Grids = Mapping[str, Sequence[Grid]]


def list_details(table: PaperTable, grids: Grids, records: Sequence[Record], every: Sequence[Record]) -> list[Details]:
    """Return the further tables of the arena. every: all results, where `records` are a selection of them."""
    found = build_standings(table, records, unfinished_rows(grids, every))
    return [cost_table(table, found), diagnosis_table(found), rate_table(found), missing_table(grids, every)]


def cost_table(table: PaperTable, found: Sequence[Standing]) -> Details:
    """Return the gain of each row at equal time, and what it costs."""
    rows = [(*_place(each), *_gain_in_time(table, each), f"{each.megabytes:.1f}") for each in found]
    note = (
        "Gains are in points of test accuracy, with the 95 % interval. Equal time: compared with a plain model that "
        "trains for as many processor seconds, on the line between the rows none and more epochs. A row that takes "
        "longer than more epochs is compared with it, and one that is faster than none with none. s: processor seconds "
        "of a run. Plain s: those of the plain model, where it had fewer. Seconds of different processors are not "
        "compared. MB: what a training step stores for its backward pass."
    )
    return Details("Gain at equal time, and cost", note, (*PLACE, *COST), rows, words=len(PLACE))


def diagnosis_table(found: Sequence[Standing]) -> Details:
    """Return what the diagnosis said of each row before and after training."""
    rows = [
        (*_place(each), " → ".join(f"{rank:.1f}" for rank in each.ranks), " → ".join(each.verdicts)) for each in found
    ]
    note = "Rank: effective rank after the last block, before and after training."
    return Details("Diagnosis before and after training", note, (*PLACE, *BEFORE_AFTER), rows, words=len(PLACE))


def _place(each: Standing) -> tuple[str, str, str]:
    return each.group, str(each.depth), each.label


def _gain_in_time(table: PaperTable, each: Standing) -> tuple[str, str, str, str]:
    """Return the gain at equal time, its interval, the row's seconds, and those of the plain model if it had fewer."""
    gain, less = each.gain_in_time, each.plain_seconds
    mean = NOTHING if gain is None else format_signed(table, gain.mean)
    interval = NOTHING if gain is None or gain.interval is None else format_interval(table, gain.interval)
    return mean, interval, f"{each.seconds:.1f}", "" if less is None else f"{less:.1f}"


def rate_table(found: Sequence[Standing]) -> Details:
    """Return the learning rates that work with each cure, and what was chosen."""
    best = best_validation(found)
    rows = []
    for each in (each for each in found if each.rates):
        works = [rate for rate, score in each.rates.items() if score >= WORKS * best[each.group, each.depth]]
        span = f"{works[0]:g} … {works[-1]:g}" if works else NOTHING
        rows.append(
            (*_place(each), f"{len(works)} of {len(each.rates)}", span, str(each.trials), each.choice or NOTHING)
        )
    note = (
        f"A learning rate works if its best trial reaches {WORKS:.0%} of the best validation score of any cure there. "
        "Cures with a strength were tried with three learning rates or more, the others with nine or more. A chosen "
        "value that is the lowest or the highest of those tried is marked: beyond it there may be a better one."
    )
    head = (*PLACE, "work", "from … to", "trials", "chosen")
    return Details("Learning rates that work", note, head, rows, words=len(PLACE))


def best_validation(found: Iterable[Standing]) -> dict[tuple[str, int], float]:
    """Return the best validation score of each place."""
    best: dict[tuple[str, int], float] = defaultdict(float)
    for each in found:
        best[each.group, each.depth] = max(best[each.group, each.depth], *each.rates.values(), 0.0)
    return best


@dataclass(frozen=True)
class Progress:
    """Progress of a row of a sweep.

    grid: the name of the sweep. at: group, row and depth. begun: whether anything of it was run. lacks: how far it is,
    such as "3 of 9 trials"; empty if it is complete. chooses: whether it has trials to choose from.
    """

    grid: str
    at: At
    begun: bool
    lacks: str
    chooses: bool


def list_progress(grids: Grids, records: Sequence[Record]) -> Iterator[Progress]:
    """Yield how far each row of each sweep is."""
    done = {identity(NAME, Config(**r["config"])): r for r in records}
    for name, cell in ((name, cell) for name, of in grids.items() for grid in of for cell in grid.cells(Config)):
        first = vars(cell.trials[0])
        begun, lacks = _count(cell, done)
        yield Progress(name, (group_of(first), row_of(first), first["depth"]), begun, lacks, bool(cell.choose))


def unfinished_rows(grids: Grids, records: Sequence[Record]) -> dict[At, str]:
    """Return the rows whose choice or seeds are not complete, with how far they are.

    A row may have seeds and yet lack trials, such as after its sweep got other learning rates.
    """
    return {each.at: each.lacks for each in list_progress(grids, records) if each.chooses and each.lacks}


def _count(cell: GridCell, done: Mapping[str, Record]) -> tuple[bool, str]:
    """Return whether a row has begun, and how far it is; empty if it is complete."""
    trials = [done[name] for name in (identity(NAME, trial) for trial in cell.trials) if name in done]
    if len(trials) < len(cell.trials):
        return bool(trials), f"{len(trials)} of {len(cell.trials)} trials"
    seeds = [identity(NAME, follower) in done for follower in cell.followers(trials)]
    return True, "" if all(seeds) else f"{sum(seeds)} of {len(seeds)} seeds"


def missing_table(grids: Grids, records: Sequence[Record]) -> Details:
    """Return what the sweeps still lack, one row per place."""
    begun: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    untouched: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for each in (each for each in list_progress(grids, records) if each.lacks):
        group, row, depth = each.at
        at = (each.grid, group, str(depth))
        (begun if each.begun else untouched)[at].append(f"{row} ({each.lacks})" if each.begun else row)
    places = dict.fromkeys([*begun, *untouched])
    rows = [(*at, ", ".join(begun[at]) or NOTHING, ", ".join(dict.fromkeys(untouched[at])) or NOTHING) for at in places]
    note = "To continue: uncollapse sweep arena --grid NAME" if rows else "Nothing: every sweep is complete."
    return Details("Not run yet", note, ("grid", "task", "depth", "begun", "not begun"), rows, words=5)


def draw_plots(table: PaperTable, records: Sequence[Record]) -> Iterator[ResultPlot]:
    """Yield the plots of each task: score over seconds, rank against gain, and validation over learning rates."""
    groups: dict[str, dict[int, list[Standing]]] = defaultdict(lambda: defaultdict(list))
    for each in build_standings(table, records):
        groups[each.group][each.depth].append(each)
    for group, depths in groups.items():
        yield ResultPlot(
            f"{group}: score over seconds",
            "Mean test accuracy over the processor seconds of a run. Bars are 95 % intervals over seeds.",
            _panels(f"{group}: score over seconds", depths, "seconds of processor time", "test accuracy, %", _seconds),
        )
        yield ResultPlot(
            f"{group}: rank and gain",
            "Gain over none against the effective rank after the last block: hollow before training, filled after it. "
            "Bars are 95 % intervals over seeds.",
            _panels(f"{group}: rank and gain", depths, "effective rank, last block", "gain, points", _rank),
        )
        if any(each.rates for several in depths.values() for each in several):
            yield ResultPlot(
                f"{group}: learning rates",
                "Best validation score of the trials at each learning rate, one seed.",
                _panels(f"{group}: learning rates", depths, "learning rate", "validation score, %", _rates),
            )


def _panels(title: str, depths: Mapping[int, Sequence[Standing]], x: str, y: str, draw: Any) -> Any:
    """Return a figure with one panel per depth; a row has the same color, marker and dashes in all of them."""
    names = list(dict.fromkeys(each.row for several in depths.values() for each in several))
    width = max(5.6, 5.0 * len(depths))
    columns = legend_columns(width, names)
    figure, panels = new_figure(title, (width, 4.0 + 0.19 * math.ceil(len(names) / columns)), len(depths))
    for axes, (depth, several) in zip(panels, sorted(depths.items()), strict=True):
        for each in several:
            number = names.index(each.row)
            look = series_style(number) | {"linewidth": 1.2, "marker": series_marker(number), "markersize": 6}
            draw(axes, each, look | {"label": each.row})
        axes.set_title(f"depth {depth}", fontsize=10, color=INK)
        axes.set_xlabel(x, color=INK)
        axes.set_ylabel(y, color=INK)
        axes.grid(axis="y", color=LINE, linewidth=0.8)
    add_legend_below(figure, panels[-1], columns)
    return figure


def _seconds(axes: Any, each: Standing, look: dict[str, Any]) -> None:
    axes.errorbar([each.seconds], [each.mean], yerr=_half(list(each.scores.values())), **look | BAR)


def _rank(axes: Any, each: Standing, look: dict[str, Any]) -> None:
    before, after = each.ranks
    gain = each.gain.paired if each.gain else None
    at, values = (0.0, []) if gain is None else (gain.mean, list(gain.differences.values()))
    path = {name: look[name] for name in ("color", "linestyle")}
    axes.plot([before, after], [at, at], linewidth=0.8, alpha=0.6, **path)
    axes.plot([before], [at], **look | {"markerfacecolor": "none", "linestyle": "none", "label": None})
    axes.errorbar([after], [at], yerr=_half(values), **look | BAR)


def _rates(axes: Any, each: Standing, look: dict[str, Any]) -> None:
    axes.set_xscale("log")
    axes.plot(list(each.rates), list(each.rates.values()), **look)


def _half(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean, 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    interval = mean_interval(mean, deviation, len(values))
    return interval[1] - mean if interval else 0.0
