"""Tables of finished and of planned runs on the terminal."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from uncollapse.cli import console

SPLITS = ("train", "validation", "dev", "test", "always")  # of the data
ACCURACIES = (*SPLITS, "mr", "cr", "subj", "mpqa", "trec", "topics")  # and tasks, whose metrics are shown in percent
PER_SECOND = "_per_second"  # ends the name of a rate in a record's pace
TEACHER = "teacher_"  # begins the name of a metric of the model that another one was distilled from
ENDLESS = 10_000  # columns: wide enough to measure a table without wrapping
DAY = 86_400  # seconds
MISSING = "It would fail, because something is missing:"
SELECTED_EPOCH = "epoch"  # the metric that says which epoch's weights were tested


@dataclass(frozen=True)
class Outcome:
    """A finished run. new: it ran now; otherwise its result existed."""

    record: Mapping[str, Any]
    path: Path
    new: bool


@dataclass(frozen=True)
class PlannedRun:
    """A run that may start.

    begun: it continues from a checkpoint. again: it runs even if its result exists. missing: which data is not here.
    """

    name: str
    path: Path
    there: bool
    seconds: float
    begun: bool = False
    again: bool = False
    missing: str = ""

    @property
    def due(self) -> bool:
        """Whether it would run."""
        return self.again or not self.there

    @property
    def state(self) -> str:
        """Whether its result exists, in words."""
        if self.there:
            return "exists, will be replaced" if self.again else "exists"
        return "begun" if self.begun else "missing"


def format_duration(seconds: float) -> str:
    """Return a time in words.

    >>> format_duration(8), format_duration(240), format_duration(9000), format_duration(400_000)
    ('8 s', '4 min', '2.5 h', '5 days')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 3 * DAY else f"{round(seconds / DAY):,} days"


def format_rate(value: float) -> str:
    """Return a rate per second in words; without decimals from ten on.

    >>> format_rate(3.217), format_rate(86.4), format_rate(12345.6)
    ('3.2', '86', '12,346')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def print_plan(plan: Sequence[PlannedRun], *, as_json: bool) -> None:
    """Print each run with its file and its cost, and the total time."""
    if as_json:
        facts = [dataclasses.asdict(run) | {"path": str(run.path), "due": run.due} for run in plan]
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    terminal = console.stdout_console()
    if _fits(terminal, table := plan_table(plan)):
        terminal.print(table)
        for run in plan:
            terminal.print(Text(str(run.path)), soft_wrap=True)
    else:
        _print_lines(terminal, plan, [str(run.path) for run in plan])
    due = [run for run in plan if run.due]
    for words in dict.fromkeys(run.missing for run in due if run.missing):
        console.print_paragraph(terminal, f"{MISSING} {words}", style="bold red")
    total = f", about {format_duration(sum(run.seconds for run in due))} on one core" if due else ""
    console.print_paragraph(terminal, f"{len(due)} of {len(plan)} would run{total}. Nothing was run.")


def print_runs(terminal: Console, plan: Sequence[PlannedRun]) -> None:
    """Print a table of runs, or two lines for each where a long name would be broken inside."""
    if _fits(terminal, table := plan_table(plan)):
        terminal.print(table)
    else:
        _print_lines(terminal, plan, [run.name for run in plan])


def _fits(terminal: Console, table: Table) -> bool:
    return terminal.measure(table, options=terminal.options.update(max_width=ENDLESS)).maximum <= terminal.width


def _print_lines(terminal: Console, plan: Sequence[PlannedRun], heads: Sequence[str]) -> None:
    for run, head in zip(plan, heads, strict=True):
        terminal.print(Text(head), soft_wrap=True)
        cost = f", about {format_duration(run.seconds)} on one core" if run.due else ""
        console.print_paragraph(terminal, f"{run.state}{cost}", bullet=" · ")


def plan_table(plan: Sequence[PlannedRun]) -> Table:
    """Return a table with one line per run: its name, whether its result exists, and how long it takes."""
    table = Table(Column("run", overflow="fold"), "result", box=box.SIMPLE_HEAD)
    table.add_column("on one core", justify="right")
    for run in plan:
        table.add_row(Text(run.name), run.state, f"about {format_duration(run.seconds)}" if run.due else "–")
    return table


def print_outcomes(title: str, outcomes: Sequence[Outcome]) -> None:
    """Print one line per seed, the mean and deviation, and the files; one line per metric if that is too wide."""
    terminal = console.stdout_console()
    table = _by_seed(outcomes)
    wide = terminal.measure(table, options=terminal.options.update(max_width=ENDLESS)).maximum
    console.print_paragraph(terminal, title, style="italic")  # above the table, not in it: it may be far wider
    terminal.print(table if wide <= terminal.width else _by_metric(outcomes))
    for words in (*_class_lists(outcomes), *_skipped_images(outcomes), *_throughput(outcomes)):
        terminal.print(Text(words), soft_wrap=True)
    if _same_ending(outcomes):
        console.print_paragraph(terminal, f"All ended {_ending(outcomes[0])}.")
    for outcome in outcomes:
        terminal.print(Text(f"{'Written' if outcome.new else 'Exists'}: {outcome.path}"), soft_wrap=True)


def _by_seed(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one line per seed, and their mean and deviation."""
    names = _metric_names(outcomes)
    table = Table("seed", box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(_heading(name, outcomes), justify="right")
    table.add_column("time", justify="right")
    endings = any(map(_ending, outcomes)) and not _same_ending(outcomes)  # what was only measured has no last epoch
    if endings:
        table.add_column("ended")
    for outcome in outcomes:
        record = outcome.record
        numbers = (format_metric(name, [record["figures"].get(name)]) for name in names)
        ended = [_ending(outcome)] if endings else []
        table.add_row(str(record["seed"]), *numbers, format_duration(record["seconds"]), *ended)
    if len(outcomes) > 1:
        table.add_section()
        means = (format_metric(name, [outcome.record["figures"].get(name) for outcome in outcomes]) for name in names)
        table.add_row("mean ± std", *means)
    return table


def _by_metric(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one line per metric and one column per seed."""
    table = Table("", box=box.SIMPLE_HEAD)
    for outcome in outcomes:
        table.add_column(f"seed {outcome.record['seed']}", justify="right")
    if len(outcomes) > 1:
        table.add_column("mean ± std", justify="right", no_wrap=True)
    for name in _metric_names(outcomes):
        values = [outcome.record["figures"].get(name) for outcome in outcomes]
        mean = [format_metric(name, values)] if len(outcomes) > 1 else []
        table.add_row(_heading(name, outcomes), *(format_metric(name, [value]) for value in values), *mean)
    table.add_section()
    table.add_row("time", *(format_duration(outcome.record["seconds"]) for outcome in outcomes))
    if any(map(_ending, outcomes)) and not _same_ending(outcomes):
        table.add_row("ended", *map(_ending, outcomes))
    return table


def _class_lists(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the name and hash of the class lists, where there are any."""
    lists = [outcome.record.get("data", {}).get("class_list") for outcome in outcomes]
    said = (f"The {one['classes']} classes of {one['name']}, sha256 {one['sha256']}." for one in lists if one)
    return list(dict.fromkeys(said))


def _skipped_images(outcomes: Sequence[Outcome]) -> list[str]:
    """Return how many images could not be read, where the records say so."""
    skipped = (outcome.record.get("data", {}).get("skipped") for outcome in outcomes)
    parts = [{part: count for part, count in each.items() if count} for each in skipped if isinstance(each, dict)]
    lines = (
        ", ".join(f"{part} {count}{' times' * (part == 'train')}" for part, count in each.items()) for each in parts
    )
    return [f"Images that could not be read and were left out: {line}." for line in dict.fromkeys(lines) if line]


def _throughput(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the mean training rate and the share of time spent waiting for data, where the records have them."""
    paces = [outcome.record["pace"] for outcome in outcomes if outcome.record.get("pace")]
    units = dict.fromkeys(name for pace in paces for name in pace if name.endswith(PER_SECOND))
    lines = []
    for unit in units:
        measured = [pace for pace in paces if unit in pace]
        fast = statistics.fmean(pace[unit] for pace in measured)
        waiting = statistics.fmean(pace.get("waiting", 0.0) for pace in measured)
        name = unit.removesuffix(PER_SECOND)
        lines.append(
            f"Trained at {format_rate(fast)} {name}/s; {100 * waiting:.0f} % of that time was spent waiting for data."
        )
    return lines


def _metric_names(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the names of all metrics that are numbers; those of splits come first."""
    names = dict.fromkeys(ACCURACIES)
    for outcome in outcomes:
        names |= dict.fromkeys(outcome.record["figures"])
    names.pop(SELECTED_EPOCH, None)
    return [name for name in names if _finite([outcome.record["figures"].get(name) for outcome in outcomes])]


def _heading(name: str, outcomes: Sequence[Outcome]) -> str:
    """Return the heading of a metric: short for a measure, with the task's metric where the results name it."""
    from uncollapse.diagnosis.measures import MEASURES  # imports torch, which the help does not need

    if name in MEASURES:
        return MEASURES[name].short
    if name not in SPLITS:
        return name.replace("_", " ")
    metrics = {outcome.record.get("data", {}).get("metric") for outcome in outcomes}
    return f"{name}, {metrics.pop()}" if len(metrics) == 1 and None not in metrics else name


def _finite(values: Sequence[Any]) -> list[float]:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    return [float(value) for value in numbers if math.isfinite(value)]


def format_metric(name: str, values: Sequence[Any]) -> str:
    """Return the mean and, for several values, the deviation (n−1); in percent for a split; a dash without numbers.

    >>> format_metric("test", [0.8125]), format_metric("rank", [12.0, 14.0]), format_metric("test", [None])
    ('81.25 %', '13 ± 1.414', '–')
    >>> format_metric("teacher_test", [0.75])
    '75.00 %'
    """
    numbers = _finite(values)
    if not numbers:
        return "–"
    part, _, what = name.removeprefix(TEACHER).partition("_")
    share = part in ACCURACIES and what != "loss" and all(-1 <= value <= 1 for value in numbers)
    factor, form, unit = (100, ".2f", " %") if share else (1, ".4g", "")
    spread = f" ± {factor * statistics.stdev(numbers):{form}}" if len(numbers) > 1 else ""
    return f"{factor * statistics.fmean(numbers):{form}}{spread}{unit}"


def _same_ending(outcomes: Sequence[Outcome]) -> bool:
    """Return whether several runs ended alike, so that one line says it."""
    return len(outcomes) > 1 and _ending(outcomes[0]).startswith("after") and len(set(map(_ending, outcomes))) == 1


def _ending(outcome: Outcome) -> str:
    """Return the last epoch, why a run stopped early, and which epoch's weights were tested."""
    record, parts = outcome.record, []
    epochs, selected = record.get("epochs"), record["figures"].get(SELECTED_EPOCH)
    last = epochs[-1]["epoch"] if epochs else None
    if last is not None:
        early = last != record["config"].get("epochs") and record.get("ended")
        parts.append(f"after epoch {last}" + (f": {early}" if early else ""))
    if selected not in (None, last):
        parts.append(f"epoch {selected} was tested")
    if not outcome.new:
        parts.append("already done")
    return ", ".join(parts)
